#include "engine/guest.h"

#include <algorithm>
#include <new>
#include <utility>

namespace gdsdata {

Guest::Guest(const EngineOptions& options, Device& device, SegmentQueue& queue, Link& link)
    : queue_(queue),
      reader_(options, device, log_.spans),
      copies_(device, link, kStagingBytes, StagedCopies::Waits::kSoon, log_) {}

// Returns false if there is no memory: a guest need not help.
bool Guest::reserve() {
  try {
    segments_.reserve();
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

bool Guest::help(Priority lowest) {
  Segment segment;
  if (!reserve() || !queue_.pop_fresh(segment, lowest)) return false;
  ActiveSegment& active = segments_.begin(std::move(segment));
  try {
    left_.clear();
    if (!active.stopped()) {
      active.group().place();
      reader_.serve_all(active, active.parts(), left_);
    }
    if (!left_.empty()) {
      active.segment.rest = left_;
      active.segment.bytes = active.bytes;
      queue_for_storage(active);
      return true;
    }
  } catch (...) {
    active.error = current_error();
  }
  end(active);
  return true;
}

bool Guest::help_with(const Group& group) {
  Segment segment;
  if (!reserve() || !queue_.pop_fresh_of(group, segment)) return false;
  ActiveSegment& active = segments_.begin(std::move(segment));
  try {
    if (!active.stopped() && !serve_staged(active)) {
      queue_for_storage(active);
      return true;
    }
  } catch (...) {
    active.error = current_error();
  }
  end(active);
  return true;
}

// Returns false, and changes nothing, if the page cache or staging memory does not suffice.
bool Guest::serve_staged(ActiveSegment& active) {
  const auto parts = active.parts();
  device_parts_.assign(parts.begin(), parts.end());
  left_.clear();
  try {
    copies_.open_once();
    if (!copies_.place(parts, active.place)) return false;
  } catch (const Failure&) {
    return false;
  }
  reader_.serve_all(active, parts, left_);
  if (left_.empty()) return true;
  std::copy(device_parts_.begin(), device_parts_.end(), parts.begin());
  copies_.release(active.place);
  return false;
}

void Guest::queue_for_storage(ActiveSegment& active) {
  queue_.push_for_storage(std::move(active.segment));
  segments_.release(active);
}

void Guest::copy_to_device(ActiveSegment& active) noexcept {
  try {
    copies_.copy_in(active);
    if (active.copied != nullptr) copies_.wait_for_copied(active);
  } catch (...) {
    active.error = current_error();
    copies_.finish_stream();
  }
  active.copied.reset();
  copies_.release(active.place);
}

void Guest::end(ActiveSegment& active) {
  take_checksums(active);
  if (active.place.memory != nullptr) copy_to_device(active);
  segments_.finish(active, log_.counters).report();
}

}  // namespace gdsdata
