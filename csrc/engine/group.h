// Transfers that complete together: a batch, a tensor, a file.
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

// Which segments come first: see SegmentQueue.
enum class Priority : uint8_t { kTraining, kBackground };

// The part that the caller fills in.
struct GroupRequest {
  std::shared_ptr<FileTable> files;
  std::vector<Transfer> transfers;
  // If it is set, transfers have no addresses: they are read one behind another to the memory that
  // it returns. It is called once: by the first worker that begins, if the processor can write the
  // device, else at the submit. So the memory may be what was just released. Must not throw.
  std::function<std::byte*()> take_memory;
  Direction direction = Direction::kRead;
  Conversion conversion = Conversion::kNone;  // must keep the size if the processor cannot write the device
  Priority priority = Priority::kTraining;
  bool patient = false;  // no caller waits for it soon: wake at most one worker
  Events before;         // device memory is accessed only after these
  // The kind of each transfer's checksum. It is of the bytes in memory, so there is none with a
  // conversion. All bytes then pass through host memory. Writes accept only kCrc32.
  Checksum checksum = Checksum::kNone;
  // Called once, when all transfers have ended, by the worker that ended the last one. It is
  // released then, so what it holds lives as long as the group is in flight. Must not block or
  // throw. Set it again before each submit.
  std::function<void()> on_done;
};

// The part that the workers fill in.
struct GroupResult {
  std::optional<Error> error;  // the first one
  RouteBytes bytes;
  // The last queued copy to the device of each stream. It may still be in flight: the bytes are
  // complete after these events.
  Events copies;
};

// The owner edits the request, submits the group (Engine::submit), and reads the result after
// `on_done` was called. Then it may edit and submit again. In between, the group is in flight and
// belongs to the workers.
class Group {
 public:
  Group() = default;
  explicit Group(GroupRequest request) : request_(std::move(request)) {}

  const GroupRequest& request() const { return request_; }
  // Throws std::logic_error if the group is in flight.
  GroupRequest& edit();
  const GroupResult& result() const { return result_; }
  GroupResult take_result() noexcept { return std::exchange(result_, {}); }
  // The checksum of each transfer, if GroupRequest::checksum is set and there is no error.
  std::vector<uint32_t> checksums() const;

  // Transfers that have not started end without being done. Any thread may call it.
  void cancel() { cancelled_.store(true, std::memory_order_relaxed); }

  // --- For the engine and its workers, in flight ---

  // Begins a flight with these segments, and returns them.
  std::span<const PartRange> begin(const SegmentLimits& limits, bool host_addressable);
  // Begins a flight with so many empty segments, which make workers allocate (Engine::prepare).
  void begin_empty(size_t segments);
  // Ends a flight of which no segment was taken.
  void abort() { open_segments_ = 0; }

  // Gives the parts their addresses. Call it before one is read.
  void place() {
    if (!placed_.load(std::memory_order_acquire)) place_once();
  }
  std::span<Transfer> parts(const PartRange& range) {
    return std::span(segmentation_.parts).subspan(range.first, range.count);
  }
  uint32_t& part_checksum(size_t part) { return part_checksums_[part]; }
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }
  const std::atomic<bool>& cancelled_flag() const { return cancelled_; }
  bool is_short() const { return is_short_; }
  bool past_caches() const { return past_caches_; }

  // Adds a segment. The caller holds an open one, so the group cannot end meanwhile.
  void add_segment() { open_segments_.fetch_add(1, std::memory_order_relaxed); }
  void remove_segment() { open_segments_.fetch_sub(1, std::memory_order_relaxed); }
  // Call it before segment_ended. `copied` follows all copies of `stream` for this group.
  void copied_by(const Stream* stream, std::shared_ptr<Event> copied);
  // The last segment ends the flight and calls on_done.
  void segment_ended(const RouteBytes& bytes, std::optional<Error> error) noexcept;

  // Progress: see Engine::progress_of.
  void count_requests_taken(size_t count) { requests_taken_.fetch_add(count, std::memory_order_relaxed); }
  void count_request_completed() { requests_completed_.fetch_add(1, std::memory_order_relaxed); }
  uint64_t requests_taken() const { return requests_taken_.load(std::memory_order_relaxed); }
  uint64_t requests_completed() const { return requests_completed_.load(std::memory_order_relaxed); }
  uint64_t open_segments() const { return open_segments_.load(std::memory_order_relaxed); }

 private:
  void reset_result();
  void place_once();

  GroupRequest request_;
  Segmentation segmentation_;
  bool is_short_ = false;     // a read of at most tuning::kShortReadBytes: see Engine::help_with
  bool past_caches_ = false;  // copies from the page cache bypass the processor's caches
  std::atomic<size_t> open_segments_{0};  // 0: not in flight
  std::atomic<bool> placed_{true};
  std::atomic<uint64_t> requests_taken_{0}, requests_completed_{0};  // by backends
  std::atomic<bool> cancelled_{false};
  std::vector<uint32_t> part_checksums_;  // empty without checksums

  std::mutex mutex_;  // guards the members that follow, in flight
  GroupResult result_;
  std::vector<const Stream*> copy_streams_;  // the stream of each of GroupResult::copies
};

// Consecutive parts of a group, which one worker takes.
struct Segment {
  std::shared_ptr<Group> group;
  PartRange range;
  // After the page cache was checked: the rest for storage, and the bytes delivered before.
  std::vector<Transfer> rest;
  RouteBytes bytes;
  bool retried = false;  // storage could not deliver to the device, so it goes through the host
};

}  // namespace gdsdata
