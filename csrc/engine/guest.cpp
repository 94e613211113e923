#include "engine/guest.h"

#include <algorithm>
#include <new>
#include <utility>

namespace gdsdata {

Guest::Guest(const EngineOptions& options, Device& device, SegmentQueue& queue, Link& link)
    : queue_(queue),
      device_(device),
      reader_(options, device, log_.spans),
      copies_(device, link, kStagingBytes, StagedCopies::Waits::kSoon, log_),
      is_staged_(!device.host_addressable()) {}

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
  serve(segments_.begin(std::move(segment)), Copies::kAreWaitedFor);
  return true;
}

bool Guest::help_with(const Group& group, Copies copies) {
  Segment segment;
  if (!reserve() || !queue_.pop_fresh_of(group, segment)) return false;
  serve(segments_.begin(std::move(segment)), copies);
  return true;
}

void Guest::serve(ActiveSegment& active, Copies copies) {
  const BesideCaptures beside_captures(device_);
  try {
    if (!active.stopped() && !(is_staged_ ? serve_staged(active) : serve_in_place(active))) {
      queue_.push_for_storage(std::move(active.segment));
      segments_.release(active);
      return;
    }
  } catch (...) {
    active.error = current_error();
  }
  end(active, copies);
}

// Returns false if the page cache does not suffice. The segment then has its rest.
bool Guest::serve_in_place(ActiveSegment& active) {
  left_.clear();
  active.group().place();
  reader_.serve_all(active, active.parts(), left_);
  if (left_.empty()) return true;
  active.segment.rest = left_;
  active.segment.bytes = active.bytes;
  return false;
}

// Returns false, and changes nothing, if the page cache or staging memory does not suffice.
bool Guest::serve_staged(ActiveSegment& active) {
  const auto parts = active.parts();
  device_parts_.assign(parts.begin(), parts.end());
  left_.clear();
  try {
    copies_.open_once();
    copies_.reclaim();
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

void Guest::end(ActiveSegment& active, Copies copies) {
  take_checksums(active);
  if (active.place.memory != nullptr) copy_to_device(active, copies);
  segments_.finish(active, log_.counters).report();
}

void Guest::copy_to_device(ActiveSegment& active, Copies copies) noexcept {
  try {
    copies_.copy_in(active);
    if (active.copied != nullptr && copies == Copies::kMayStayInFlight && !StagedCopies::copied_soon(active)) {
      return copies_.release_when_copied(active);
    }
    if (active.copied != nullptr) copies_.wait_for_copied(active);
  } catch (...) {
    active.error = current_error();
    copies_.finish_stream();
  }
  active.copied.reset();
  copies_.release(active.place);
}

}  // namespace gdsdata
