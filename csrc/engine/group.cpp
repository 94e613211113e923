#include "engine/group.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "base/convert.h"
#include "tuning.h"

namespace gdsdata {

GroupRequest& Group::edit() {
  if (open_segments_.load(std::memory_order_acquire) != 0) {
    throw std::logic_error("a group's request was edited while the group was in flight");
  }
  return request_;
}

std::vector<uint32_t> Group::checksums() const {
  std::vector<uint32_t> joined;
  const std::vector<Transfer>& parts = segmentation_.parts;
  size_t part = 0;
  for (const Transfer& transfer : request_.transfers) {
    uint32_t sum = 0;  // of no bytes
    for (uint64_t done = 0; done < transfer.length; done += parts[part++].length) {
      const uint32_t of_part = part_checksums_[part];
      sum = done == 0 ? of_part : joined_checksums(request_.checksum, sum, of_part, parts[part].length);
    }
    joined.push_back(sum);
  }
  return joined;
}

void Group::reset_result() {
  result_.error.reset();
  result_.bytes = {};
  result_.copies.clear();
  copy_streams_.clear();
  cancelled_ = false;
  requests_taken_ = requests_completed_ = 0;
}

std::span<const PartRange> Group::begin(const SegmentLimits& limits, bool host_addressable) {
  reset_result();
  SegmentLimits own = limits;
  // Opening a file can take milliseconds. The workers then share the group evenly, however few
  // bytes that is.
  const bool is_remote = request_.files != nullptr && request_.files->has_remote();
  if (is_remote) {
    // As many requests as a server answers side by side, however many workers begin them.
    own.workers = tuning::kRequestsOfRemoteGroup;
    own.least_read_bytes = tuning::kLeastSegmentBytes;
    if (host_addressable) own.read_bytes = tuning::kRemoteRequestBytes;
  } else if (request_.direction == Direction::kRead && request_.files != nullptr &&
             request_.files->has_closed_files()) {
    const size_t share = (request_.transfers.size() + limits.workers - 1) / limits.workers;
    own.parts = std::clamp<size_t>(share, 1, limits.parts);
  }
  segment(request_.transfers, request_.direction, request_.conversion, own, segmentation_);
  is_short_ = request_.direction == Direction::kRead && segmentation_.bytes <= tuning::kShortReadBytes;
  // Shorter batches reuse memory that is read soon, so it stays in the processor's caches. So does
  // staging memory of any batch.
  past_caches_ = host_addressable && segmentation_.bytes >= tuning::kPastCachesBytes;
  placed_ = request_.take_memory == nullptr;
  if (!host_addressable) place();
  part_checksums_.assign(request_.checksum != Checksum::kNone ? segmentation_.parts.size() : 0, 0);
  open_segments_ = segmentation_.segments.size();
  return segmentation_.segments;
}

void Group::place_once() {
  const std::lock_guard lock(mutex_);
  if (placed_) return;
  std::byte* memory = request_.take_memory();
  for (Transfer& part : segmentation_.parts) {
    part.memory = memory;
    memory += result_bytes(request_.conversion, part.length);
  }
  placed_.store(true, std::memory_order_release);
}

void Group::begin_empty(size_t segments) {
  reset_result();
  placed_ = true;
  segmentation_ = {};
  open_segments_ = segments;
}

void Group::copied_by(const Stream* stream, std::shared_ptr<Event> copied) {
  std::lock_guard lock(mutex_);
  const auto known = std::find(copy_streams_.begin(), copy_streams_.end(), stream);
  if (known != copy_streams_.end()) {
    result_.copies[static_cast<size_t>(known - copy_streams_.begin())] = std::move(copied);
    return;
  }
  copy_streams_.reserve(copy_streams_.size() + 1);  // both grow, or neither
  result_.copies.push_back(std::move(copied));
  copy_streams_.push_back(stream);
}

void Group::segment_ended(const RouteBytes& bytes, std::optional<Error> error) noexcept {
  {
    std::lock_guard lock(mutex_);
    result_.bytes += bytes;
    if (error) {
      if (!result_.error) result_.error = std::move(error);
      cancel();
    }
  }
  if (open_segments_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  // The owner may edit and submit again from now on. `exchange`, because libc++ leaves a function
  // that is moved from as it was, and this one may hold its owner.
  const auto on_done = std::exchange(request_.on_done, nullptr);
  try {
    on_done();
  } catch (...) {  // it must not throw, but the worker's other groups must end
  }
}

}  // namespace gdsdata
