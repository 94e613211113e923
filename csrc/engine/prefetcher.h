// Reads batches ahead of the consumer, in order. Planned batches wait, a few are read into the
// slots of a ring, and the consumer takes them one by one.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "engine/buffer_pool.h"
#include "engine/engine.h"
#include "engine/planned_batches.h"
#include "engine/residence.h"

namespace gdsdata {

struct PrefetchOptions {
  size_t slots = 4;            // batches in flight or ready
  uint64_t sample_bytes = 0;   // as stored
  size_t batch_samples = 0;    // at most
  Conversion conversion = Conversion::kNone;
  std::chrono::milliseconds stall_timeout{60000};  // without any progress
};

struct PrefetchStatistics {
  RouteBytes bytes;        // of the batches taken
  uint64_t batches = 0;    // taken
  uint64_t stalls = 0;     // how often the consumer had to wait
  double stall_s = 0;      // how long it waited
  double ring_full_s = 0;  // how long all slots were ready, so that the workers had none to fill
  double mean_ready = 0;   // batches ready when the consumer asked
  uint64_t ready = 0;      // slots whose batch is ready now
  uint64_t filling = 0;    // slots that are read into now
};

class Prefetcher {
 public:
  struct Batch {
    std::shared_ptr<DeviceBuffer> buffer;  // belongs to the consumer
    size_t offset = 0;                     // of the first sample in the buffer
    size_t samples = 0;
    Events copies;  // its bytes are complete after these; empty if the processor wrote them
  };

  // The pool's buffers hold batch_samples of sample_bytes, converted, and kPlacementBytes.
  static constexpr size_t kPlacementBytes = 4096;
  // With a residence, batches are gathered from it as soon as it is ready.
  Prefetcher(std::shared_ptr<Engine> engine, std::shared_ptr<FileTable> files, std::shared_ptr<BufferPool> pool,
             PrefetchOptions options, std::shared_ptr<Residence> residence = nullptr);
  ~Prefetcher();  // like close()
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // Plans batches after those planned before: sizes[i] samples each. `files` and `offsets` have the
  // file's index and the offset in it for each sample.
  void plan(std::span<const int32_t> files, std::span<const int64_t> offsets, std::span<const int64_t> sizes);
  // The same in an order of samples, by runs of positions: see PlannedBatches.
  void set_order(const SampleOrder& order);
  void plan_runs(std::span<const int64_t> begins, std::span<const int64_t> lengths, std::span<const int64_t> sizes);

  // Returns the next batch in order, or nothing if all planned batches were taken. Waits, and calls
  // `poll` regularly meanwhile. Throws Failure: the batch's own error (the next call returns the
  // batch after it), kStalled, kClosed.
  std::optional<Batch> next(const std::function<void()>& poll);

  // Drops planned batches and cancels those that have not started. Does not wait, because storage
  // may hang: memory of reads in flight is released when they end. Taken batches stay valid.
  void close();

  PrefetchStatistics statistics() const;  // all zeros in a forked child

 private:
  class Core;  // outlives this while reads into its slots are in flight
  Core& living_core() const;
  std::shared_ptr<Core> core_;
};

}  // namespace gdsdata
