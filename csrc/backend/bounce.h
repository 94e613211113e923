// Memory that disks write into with O_DIRECT, in pieces of any number of pages, out of one buffer
// of fixed size: the bound on what a worker has in flight.
//
// Some machines take longer to bring memory that was never touched than a disk to fill it, so that
// it would wait for who touches it. That is a thread's work: it begins when such memory is first
// missed, and ends when all is there.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "device/device.h"

namespace gdsdata {

class BounceArena {
 public:
  static constexpr uint64_t kAll = std::numeric_limits<uint64_t>::max();
  // The first `ready_bytes` are given out at once, touched or not.
  BounceArena(Device& device, uint64_t bytes, uint64_t ready_bytes = kAll);
  ~BounceArena();
  BounceArena(const BounceArena&) = delete;
  BounceArena& operator=(const BounceArena&) = delete;

  std::byte* data() { return buffer_->data(); }
  uint64_t size_bytes() const { return buffer_->size_bytes(); }

  // Null when there is no room, or the memory is not there yet. Page-aligned.
  std::byte* take(uint64_t bytes);
  // For who has nothing else to wait for: null when there is no room.
  std::byte* take_untouched(uint64_t bytes);
  void give_back(std::byte* memory, uint64_t bytes);

 private:
  static constexpr uint64_t kPageBytes = 4096;
  // First fit over free ranges kept sorted by position: few of them exist, because requests are
  // alike.
  struct FreeRange {
    size_t first_page;
    size_t pages;
  };
  std::byte* take_before(size_t end_page, uint64_t bytes);
  void bring_the_rest();

  std::unique_ptr<PinnedBuffer> buffer_;
  std::vector<FreeRange> free_;
  size_t taken_ = 0;  // and not given back
  std::atomic<size_t> ready_pages_;
  std::atomic<bool> stopped_{false};
  std::thread bringing_;
};

}  // namespace gdsdata
