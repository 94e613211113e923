// Transfers that belong together and end together: a batch, a tensor, a file.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/crc32.h"
#include "base/file_table.h"
#include "base/types.h"
#include "device/device.h"
#include "engine/segmentation.h"

namespace gdsdata {

// Which segments go first if both kinds wait: see SegmentQueue.
enum class Priority : uint8_t { kTraining, kBackground };

// The part that a caller fills.
struct GroupRequest {
  std::shared_ptr<FileTable> files;
  std::vector<Transfer> transfers;
  Direction direction = Direction::kRead;
  Conversion conversion = Conversion::kNone;  // of equal size, if the processor cannot write the device
  Priority priority = Priority::kTraining;
  bool patient = false;  // nobody waits for it soon: wake one worker more, not every idle one
  Events before;         // device memory is read and written behind these only
  // The kind of each transfer's checksum, before conversion. All bytes then pass through host
  // memory. Writes take kCrc32 alone.
  Checksum checksum = Checksum::kNone;
  // Called once, when all transfers have ended, on the worker that ended the last one, and released
  // then: what it holds lives as long as the group is in flight. Must not block, nor throw. Set it
  // anew for each submit.
  std::function<void()> on_done;
};

// The part that the workers fill.
struct GroupResult {
  std::optional<Error> error;  // the first one
  RouteBytes bytes;
  // Copies to the device that were queued and may still be in flight, the last one of each stream:
  // the bytes are there behind these.
  Events copies;
};

// The owner edits the request, submits the group (Engine::submit), and reads the result once
// `on_done` was called; then it may edit and submit again. Between, the group is in flight and
// belongs to the workers.
class Group {
 public:
  Group() = default;
  explicit Group(GroupRequest request) : request_(std::move(request)) {}

  const GroupRequest& request() const { return request_; }
  // Throws std::logic_error in flight.
  GroupRequest& edit();
  const GroupResult& result() const { return result_; }
  GroupResult take_result() noexcept { return std::exchange(result_, {}); }
  // With GroupRequest::checksum and without an error: that of each transfer.
  std::vector<uint32_t> checksums() const;

  // Transfers that have not started end without being done. Any thread may call it.
  void cancel() { cancelled_.store(true, std::memory_order_relaxed); }

  // --- For the engine and its workers, in flight ---

  // Begins a flight with these segments, and returns them.
  std::span<const PartRange> begin(const SegmentLimits& limits, bool host_addressable);
  // Begins a flight with so many empty segments, which prepare workers (Engine::prepare).
  void begin_empty(size_t segments);
  // Ends a flight of which nobody has taken a segment.
  void abort() { open_segments_ = 0; }

  std::span<Transfer> parts(const PartRange& range) {
    return std::span(segmentation_.parts).subspan(range.first, range.count);
  }
  uint32_t& part_checksum(size_t part) { return part_checksums_[part]; }
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }
  bool is_short() const { return is_short_; }
  bool past_caches() const { return past_caches_; }

  // One more segment. Its caller holds an open one, so the group cannot end meanwhile.
  void add_segment() { open_segments_.fetch_add(1, std::memory_order_relaxed); }
  void remove_segment() { open_segments_.fetch_sub(1, std::memory_order_relaxed); }
  // Before segment_ended: `copied` is behind all that was copied for this group by `stream`.
  void copied_by(const Stream* stream, std::shared_ptr<Event> copied);
  // The last one ends the flight, and calls on_done.
  void segment_ended(const RouteBytes& bytes, std::optional<Error> error) noexcept;

  // Progress: see Engine::progress_of.
  void count_requests_taken(size_t count) { requests_taken_.fetch_add(count, std::memory_order_relaxed); }
  void count_request_completed() { requests_completed_.fetch_add(1, std::memory_order_relaxed); }
  uint64_t requests_taken() const { return requests_taken_.load(std::memory_order_relaxed); }
  uint64_t requests_completed() const { return requests_completed_.load(std::memory_order_relaxed); }
  uint64_t open_segments() const { return open_segments_.load(std::memory_order_relaxed); }

 private:
  void reset_result();

  GroupRequest request_;
  Segmentation segmentation_;
  bool is_short_ = false;     // a read of at most tuning::kShortReadBytes: see Engine::help_with
  bool past_caches_ = false;  // copies out of the page cache go past the processor's caches
  std::atomic<size_t> open_segments_{0};  // 0: not in flight
  std::atomic<uint64_t> requests_taken_{0}, requests_completed_{0};  // by backends
  std::atomic<bool> cancelled_{false};
  std::vector<uint32_t> part_checksums_;  // empty without checksums

  std::mutex mutex_;  // guards, in flight, what follows
  GroupResult result_;
  std::vector<const Stream*> copy_streams_;  // of GroupResult::copies, one each
};

// Consecutive parts of a group, which one worker takes.
struct Segment {
  std::shared_ptr<Group> group;
  PartRange range;
  // Once memory has been asked: what only storage has, and what was delivered before.
  std::vector<Transfer> rest;
  RouteBytes bytes;
  bool retried = false;  // storage could not deliver to the device: this time by way of the host
};

}  // namespace gdsdata
