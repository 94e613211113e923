#include "engine/staging.h"

#include <algorithm>

#include "base/extent_math.h"

namespace gdsdata {

namespace {

constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kCacheLine = 64;

bool follows(const Transfer& before, const Transfer& after) {
  return before.file == after.file && before.offset + before.length == after.offset &&
         before.memory + before.length == after.memory;
}

// Whether one copy may move two transfers that are adjacent on the device. Asks the driver once for
// each allocation.
class Joinable {
 public:
  explicit Joinable(Device& device) : device_(device) {}
  bool operator()(const Transfer& before, const Transfer& after) {
    if (before.memory < range_.begin || before.memory >= range_.end) range_ = device_.allocation_of(before.memory);
    return after.memory >= range_.begin && after.memory + after.length <= range_.end;
  }

 private:
  Device& device_;
  AddressRange range_;
};

}  // namespace

bool Staging::Place::has_pages_of(const Piece& piece) const {
  return piece.length >= kPagedBytes && std::any_of(runs.begin(), runs.end(), [&](const Run& run) {
           return run.owns_pages && piece.memory >= run.host && piece.memory + piece.length <= run.host + run.bytes;
         });
}

bool Staging::place(std::span<Transfer> transfers, Place& place) {
  place.runs.clear();
  run_at_.clear();
  at_.resize(transfers.size());
  uint64_t end = 0;
  bool last_paged = false;
  Joinable joinable(device_);
  for (size_t first = 0; first < transfers.size();) {
    size_t last = first + 1;
    uint64_t length = transfers[first].length;
    for (; last < transfers.size() && follows(transfers[last - 1], transfers[last]); ++last) {
      if (!joinable(transfers[last - 1], transfers[last])) break;
      length += transfers[last].length;
    }
    const Transfer& head = transfers[first];
    const bool paged = length >= kPagedBytes;
    const bool follows_on_device =
        !place.runs.empty() && place.runs.back().device + place.runs.back().bytes == head.memory;
    // Samples of whole pages may be congruent in file and batch: then one copy moves several.
    const bool goes_on = follows_on_device && paged == last_paged &&
                         (!paged || end % kPageBytes == head.offset % kPageBytes) &&
                         joinable(transfers[first - 1], head);
    if (goes_on) {
      if (end % kPageBytes != 0) place.runs.back().owns_pages = false;  // one page is shared
    } else {
      end = paged ? align_up(end, kPageBytes) + head.offset % kPageBytes
                  : align_up(end, last_paged ? kPageBytes : kCacheLine);
      place.runs.push_back({nullptr, head.memory, 0, paged});
      run_at_.push_back(end);
    }
    for (; first < last; ++first) {
      at_[first] = end;
      end += transfers[first].length;
    }
    place.runs.back().bytes += length;
    last_paged = paged;
  }
  place.bytes = align_up(end, kPageBytes);
  place.memory = nullptr;
  if (place.bytes == 0) return true;
  place.memory = take(place.bytes);
  if (place.memory == nullptr) return false;
  for (size_t i = 0; i < transfers.size(); ++i) transfers[i].memory = place.memory + at_[i];
  for (size_t i = 0; i < place.runs.size(); ++i) place.runs[i].host = place.memory + run_at_[i];
  return true;
}

void Staging::release(Place& place) {
  if (place.memory != nullptr) {
    const bool in_first =
        first_ != nullptr && place.memory >= first_->data() && place.memory < first_->data() + first_->size_bytes();
    (in_first ? first_ : all_)->release(place.memory, place.bytes);
  }
  place.memory = nullptr;
  place.runs.clear();
}

void Staging::take_all() {
  if (all_ == nullptr) all_ = make_arena(bytes_);
}

std::byte* Staging::take(uint64_t bytes) {
  const bool is_short = bytes <= kFirstBytes && bytes_ > kFirstBytes;
  if (is_short && all_ == nullptr && first_ == nullptr) first_ = make_arena(kFirstBytes);
  if (first_ != nullptr) {
    if (std::byte* memory = first_->take(bytes)) return memory;
  }
  take_all();
  return all_->take(bytes);
}

std::unique_ptr<BounceArena> Staging::make_arena(uint64_t bytes) {
  auto arena = std::make_unique<BounceArena>(device_, bytes);
  memory_.emplace_back(arena->data(), arena->size_bytes());
  return arena;
}

}  // namespace gdsdata
