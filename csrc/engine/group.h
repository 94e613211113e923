// Transfers that belong together, and end together: a batch, a tensor, a file.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/crc32.h"
#include "base/file_table.h"
#include "base/types.h"
#include "device/device.h"
#include "engine/segmentation.h"

namespace gdsdata {

// Who goes first where both have work: see SegmentQueue.
enum class Priority : uint8_t { kTraining, kBackground };

// A read of so many bytes at most is done by who waits for it, where it can be, and is polled for: for less than it
// takes to wake a worker and to copy out of the page cache beside it (docs/design-decisions.md).
inline constexpr uint64_t kShortReadBytes = 1 << 20;

// Whoever fills a group keeps its hands off between Engine::submit and the call of `on_done`; then the group
// may be filled and submitted again.
class Group {
 public:
  // Filled by the owner.
  std::shared_ptr<FileTable> files;
  std::vector<Transfer> transfers;
  Direction direction = Direction::kRead;
  Conversion conversion = Conversion::kNone;  // for a device that the processor cannot write: of equal size
  Priority priority = Priority::kTraining;
  bool patient = false;  // nobody waits for it soon: a worker more will do, rather than all that have nothing to do
  Events before;  // device memory is touched behind these only
  // Of each transfer, without conversion; taken on the way, so that all of it passes the host. Of writes CRC-32 alone.
  Checksum checksum = Checksum::kNone;
  // Called once, when all transfers have ended, on the worker that ended the last one, and let go after that:
  // what it holds lives as long as the group is in flight. Must not block, nor throw. Set anew for each submit.
  std::function<void()> on_done;

  // What became of it; read after on_done.
  std::optional<Error> error;  // the first one
  RouteBytes bytes;
  // Copies to the device that were asked for and may still be under way: its bytes are there behind these.
  Events copies() const;
  void add_copies(Events& events) const;
  // With checksums and without an error: that of each transfer.
  std::vector<uint32_t> checksums() const;

  // What has not been started need not be: its transfers end without being done.
  void cancel() { abandoned_.store(true, std::memory_order_relaxed); }

 private:
  friend class Engine;
  friend class Link;
  friend class Pending;
  friend class Worker;
  // Before the segments are told to have ended: `copied` is behind all that was copied for this group by `stream`.
  void copied_by(const Stream* stream, std::shared_ptr<Event> copied);
  void segment_ended(const RouteBytes& segment_bytes, std::optional<Error> segment_error);

  Segmentation segmentation_;
  std::vector<uint32_t> part_checksums_;
  bool is_short_ = false;  // a read of kShortReadBytes at most
  bool past_caches_ = false;  // what is copied out of the page cache goes past the processor's caches
  std::atomic<size_t> open_segments_{0};
  std::atomic<uint64_t> requests_given_{0}, requests_completed_{0};  // to a backend, and by it: Engine::progress_of
  std::atomic<bool> abandoned_{false};
  std::vector<std::pair<const Stream*, std::shared_ptr<Event>>> copied_;  // the last one of each stream
  std::mutex mutex_;
};

// What a worker takes: consecutive parts of a group.
struct Segment {
  std::shared_ptr<Group> group;
  PartRange range;
  // Once memory has been asked: what only storage has, and what was delivered before.
  std::vector<Transfer> rest;
  RouteBytes bytes;
  bool retried = false;  // storage could not deliver to the device: this time by way of the host
};

}  // namespace gdsdata
