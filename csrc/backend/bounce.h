// Memory for O_DIRECT, allocated in whole pages from one buffer of fixed size. It limits what a
// worker has in flight.
//
// On some machines, the first touch of memory takes longer than a disk takes to fill it. So a
// thread touches the memory in advance. It starts when untouched memory is first needed, and ends
// when all is touched.
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
  // The first `ready_bytes` are available at once, touched or not.
  BounceArena(Device& device, uint64_t bytes, uint64_t ready_bytes = kAll);
  ~BounceArena();
  BounceArena(const BounceArena&) = delete;
  BounceArena& operator=(const BounceArena&) = delete;

  std::byte* data() { return buffer_->data(); }
  uint64_t size_bytes() const { return buffer_->size_bytes(); }

  // Returns page-aligned memory. Null if there is no room, or if the memory is not touched yet.
  std::byte* take(uint64_t bytes);
  // The same for callers that have nothing else to wait for. Null if there is no room.
  std::byte* take_untouched(uint64_t bytes);
  void release(std::byte* memory, uint64_t bytes);

 private:
  static constexpr uint64_t kPageBytes = 4096;
  // Allocation is first fit. Free ranges are sorted by position, and there are few, because
  // requests are of similar size.
  struct FreeRange {
    size_t first_page;
    size_t pages;
  };
  std::byte* take_before(size_t end_page, uint64_t bytes);
  void populate_rest();

  std::unique_ptr<PinnedBuffer> buffer_;
  std::vector<FreeRange> free_;
  size_t taken_ = 0;  // allocations in use
  std::atomic<size_t> ready_pages_;
  std::atomic<bool> stopped_{false};
  std::thread populating_;
};

}  // namespace gdsdata
