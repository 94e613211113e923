#include "backend/bounce.h"

#include <algorithm>
#include <exception>

#include "base/extent_math.h"
#include "base/thread_name.h"
#include "device/anonymous_memory.h"
#include "tuning.h"

namespace gdsdata {

BounceArena::BounceArena(Device& device, uint64_t bytes, uint64_t ready_bytes)
    : buffer_(device.allocate_pinned(align_up(bytes, kPageBytes))),
      free_{{0, buffer_->size_bytes() / kPageBytes}},
      ready_pages_(std::min(ready_bytes, buffer_->size_bytes()) / kPageBytes) {}

BounceArena::~BounceArena() {
  stopped_.store(true, std::memory_order_relaxed);
  if (populating_.joinable()) populating_.join();
}

std::byte* BounceArena::take(uint64_t bytes) {
  return take_before(ready_pages_.load(std::memory_order_acquire), bytes);
}

std::byte* BounceArena::take_untouched(uint64_t bytes) { return take_before(size_bytes() / kPageBytes, bytes); }

std::byte* BounceArena::take_before(size_t end_page, uint64_t bytes) {
  const size_t pages = align_up(bytes, kPageBytes) / kPageBytes;
  auto range = std::find_if(free_.begin(), free_.end(), [&](const FreeRange& r) { return r.pages >= pages; });
  if (range == free_.end()) return nullptr;
  if (range->first_page + pages > end_page) {
    populate_rest();
    return nullptr;
  }
  // There is at most one more free range than ranges in use, so release needs no allocation.
  if (const size_t most_ranges = taken_ + 2; free_.capacity() < most_ranges) {
    const size_t place = static_cast<size_t>(range - free_.begin());
    free_.reserve(2 * most_ranges);
    range = free_.begin() + static_cast<ptrdiff_t>(place);
  }
  ++taken_;
  std::byte* memory = data() + range->first_page * kPageBytes;
  range->first_page += pages;
  range->pages -= pages;
  if (range->pages == 0) free_.erase(range);
  return memory;
}

void BounceArena::populate_rest() {
  if (populating_.joinable()) return;
  const size_t end_page = size_bytes() / kPageBytes;
  const auto populate = [this, end_page] {
    name_this_thread("gdsdata-bounce");
    constexpr size_t kPagesAtOnce = tuning::kTouchedAtOnceBytes / kPageBytes;
    for (size_t page = ready_pages_; page < end_page && !stopped_.load(std::memory_order_relaxed);) {
      const size_t pages = std::min(kPagesAtOnce - page % kPagesAtOnce, end_page - page);
      // If the kernel has no such call, the memory is touched when it is used.
      page = populate_pages(data() + page * kPageBytes, pages * kPageBytes) ? page + pages : end_page;
      ready_pages_.store(page, std::memory_order_release);
    }
  };
  try {
    populating_ = std::thread(populate);
  } catch (const std::exception&) {  // no thread is available
    ready_pages_ = end_page;
  }
}

void BounceArena::release(std::byte* memory, uint64_t bytes) {
  --taken_;
  const size_t first_page = static_cast<size_t>(memory - data()) / kPageBytes;
  const size_t pages = align_up(bytes, kPageBytes) / kPageBytes;
  auto next = std::lower_bound(free_.begin(), free_.end(), first_page,
                               [](const FreeRange& range, size_t page) { return range.first_page < page; });
  const bool joins_next = next != free_.end() && first_page + pages == next->first_page;
  const bool joins_previous =
      next != free_.begin() && std::prev(next)->first_page + std::prev(next)->pages == first_page;
  if (joins_previous && joins_next) {
    std::prev(next)->pages += pages + next->pages;
    free_.erase(next);
  } else if (joins_previous) {
    std::prev(next)->pages += pages;
  } else if (joins_next) {
    next->first_page = first_page;
    next->pages += pages;
  } else {
    free_.insert(next, {first_page, pages});
  }
}

}  // namespace gdsdata
