// Registers device memory with cuFile, so that disks write to it without a copy on the device. This
// takes milliseconds and space in the GPU's window on the bus (BAR1): use it for reused memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace gdsdata {

// Registers memory until the last owner of the result releases it. That must be before the memory
// is freed, and when no transfer uses it. Returns null if cuFile is missing, refuses, or has no
// space left; transfers work without registration. The same span may be registered many times. Call
// it on a thread of the device (Device::bind_thread).
std::shared_ptr<void> register_cufile_memory(std::span<std::byte> memory);

// The address of memory as cuFile expects it: registered memory by its start and an offset, other
// memory by itself.
struct CufilePlace {
  std::byte* memory;
  uint64_t offset_bytes;
};
CufilePlace find_cufile_place(std::byte* memory, uint64_t bytes);

}  // namespace gdsdata
