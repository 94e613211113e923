// Batches ahead of the consumer, in order: planned batches wait, a few are read into the slots of a ring,
// and the consumer takes them one by one.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "engine/engine.h"
#include "engine/ring.h"

namespace gdsdata {

// Buffers of one size. A batch leaves in one, and when its last user lets go, in whatever thread that is, the
// buffer comes back: its memory is touched, so it is far cheaper than a new one. Outlives prefetchers, so that
// the next epoch finds them. Thread-safe.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  // Keeps at most `max_kept` buffers: those in a ring and spare ones, not those that consumers hold.
  BufferPool(std::shared_ptr<Device> device, size_t buffer_bytes, size_t max_kept);
  std::shared_ptr<DeviceBuffer> take();  // for a ring; throws Failure where there is no memory
  void handed_over();                    // one that was taken is a consumer's now
  size_t buffer_bytes() const { return buffer_bytes_; }
  uint64_t max_kept_bytes() const { return max_kept_ * buffer_bytes_; }

 private:
  void give_back(DeviceBuffer* buffer);
  const std::shared_ptr<Device> device_;
  const size_t buffer_bytes_;
  const size_t max_kept_;
  std::mutex mutex_;
  size_t kept_ = 0;
  std::vector<std::unique_ptr<DeviceBuffer>> spare_;
};

struct PrefetchOptions {
  size_t slots = 4;            // batches in flight or ready
  uint64_t sample_bytes = 0;   // stored
  size_t batch_samples = 0;    // at most
  Conversion conversion = Conversion::kNone;
  std::chrono::milliseconds stall_timeout{60000};  // without any progress
};

struct PrefetchStatistics {
  RouteBytes bytes;        // of the batches taken
  uint64_t batches = 0;    // taken
  uint64_t stalls = 0;     // times the consumer had to wait
  double stall_s = 0;      // how long
  double ring_full_s = 0;  // how long the workers had nothing to fill because every slot was ready
  double mean_ready = 0;   // batches ready when the consumer came
};

class Prefetcher {
 public:
  struct Batch {
    std::shared_ptr<DeviceBuffer> buffer;  // the consumer's for as long as it keeps it
    size_t offset = 0;                     // where in it the first sample starts
    size_t samples = 0;
  };

  // The pool's buffers hold at least a batch (batch_samples of sample_bytes, converted) and kPlacementBytes.
  static constexpr size_t kPlacementBytes = 4096;
  Prefetcher(std::shared_ptr<Engine> engine, std::shared_ptr<FileTable> files, std::shared_ptr<BufferPool> pool,
             PrefetchOptions options);
  ~Prefetcher();  // as close()
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // Plans batches to come after those planned before: of sizes[i] samples each, sample by sample the index of
  // the file and the offset in it.
  void plan(std::span<const int32_t> files, std::span<const int64_t> offsets, std::span<const int64_t> sizes);

  // The next batch in order, or nothing when all planned batches were taken. Waits; calls `poll` now and
  // then while it does. Throws Failure: the batch's own error (the following call gives the batch after
  // it), kStalled, kClosed.
  std::optional<Batch> next(const std::function<void()>& poll);

  // Drops what is planned, waits for what is in flight, lets go of the memory. Taken batches stay valid.
  void close();

  PrefetchStatistics statistics() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Slot {
    std::shared_ptr<DeviceBuffer> buffer;
    std::shared_ptr<Group> group;
    size_t offset = 0;  // of the first sample in the buffer
    size_t samples = 0;
  };

  void fill_free_slots();  // lock held
  size_t placement(uint64_t file_offset) const;
  void slot_done(size_t slot);  // on a worker
  bool help_until_head(std::unique_lock<std::mutex>& lock);
  void wait_for_head(std::unique_lock<std::mutex>& lock, const std::function<void()>& poll);
  Error stalled() const;

  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<FileTable> files_;
  const PrefetchOptions options_;
  const std::shared_ptr<BufferPool> pool_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool closed_ = false;
  bool consumer_waits_ = false;
  Ring ring_;
  std::atomic<bool> head_ready_{false};  // what the ring says, for a glance without the lock
  std::vector<Slot> slots_;
  // What is planned and not yet in a slot.
  std::deque<size_t> planned_sizes_;
  std::vector<int32_t> planned_files_;
  std::vector<int64_t> planned_offsets_;
  size_t next_sample_ = 0;  // in planned_files_ and planned_offsets_

  PrefetchStatistics statistics_;
  uint64_t calls_ = 0;       // of next that found a batch planned, and
  uint64_t ready_seen_ = 0;  // the batches ready at each of them
  uint64_t completed_ = 0;  // groups: progress
  std::optional<Clock::time_point> full_since_;
};

}  // namespace gdsdata
