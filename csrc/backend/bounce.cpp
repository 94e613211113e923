#include "backend/bounce.h"

#include <algorithm>

#include "base/extent_math.h"

namespace gdsdata {

BounceArena::BounceArena(Device& device, uint64_t bytes)
    : buffer_(device.allocate_pinned(align_up(bytes, kPageBytes))), free_{{0, buffer_->size_bytes() / kPageBytes}} {}

std::byte* BounceArena::take(uint64_t bytes) {
  const size_t pages = align_up(bytes, kPageBytes) / kPageBytes;
  const auto range = std::find_if(free_.begin(), free_.end(), [&](const FreeRange& r) { return r.pages >= pages; });
  if (range == free_.end()) return nullptr;
  std::byte* memory = data() + range->first_page * kPageBytes;
  range->first_page += pages;
  range->pages -= pages;
  if (range->pages == 0) free_.erase(range);
  return memory;
}

void BounceArena::give_back(std::byte* memory, uint64_t bytes) {
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
