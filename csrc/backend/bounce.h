// Memory that disks write into with O_DIRECT, in pieces of any number of pages, out of one buffer of fixed
// size: the bound on what a worker has in flight.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "device/device.h"

namespace gdsdata {

class BounceArena {
 public:
  BounceArena(Device& device, uint64_t bytes);

  std::byte* data() { return buffer_->data(); }
  uint64_t size_bytes() const { return buffer_->size_bytes(); }

  // Null when there is no room. Page-aligned.
  std::byte* take(uint64_t bytes);
  void give_back(std::byte* memory, uint64_t bytes);

 private:
  static constexpr uint64_t kPageBytes = 4096;
  // First fit over free ranges kept sorted by position: few of them exist, because requests are alike.
  struct FreeRange {
    size_t first_page;
    size_t pages;
  };
  std::unique_ptr<PinnedBuffer> buffer_;
  std::vector<FreeRange> free_;
};

}  // namespace gdsdata
