// Device memory that cuFile knows beforehand, so that disks write into it without a copy on the
// device. Registering takes milliseconds and room in the GPU's window on the bus (BAR1): it is for
// memory that is used again and again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace gdsdata {

// Registers until the last owner of the result lets go of it, which must be before the memory is
// freed and when no transfer uses it. Null where cuFile is not there, refuses, or has no room left
// for it: transfers work without. The same span may be asked for by many. On a thread of the device
// (Device::bind_thread).
std::shared_ptr<void> register_cufile_memory(std::span<std::byte> memory);

// How cuFile wants a place named: registered memory by its begin, other memory by itself.
struct CufilePlace {
  std::byte* memory;
  uint64_t offset_bytes;
};
CufilePlace find_cufile_place(std::byte* memory, uint64_t bytes);

}  // namespace gdsdata
