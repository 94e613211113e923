// Batches ahead of the consumer, in order: planned batches wait, a few are read into the slots of a
// ring, and the consumer takes them one by one.
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
#include "engine/residence.h"

namespace gdsdata {

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
    Events copies;  // its bytes are there behind these; none where the processor wrote them
  };

  // The pool's buffers hold at least a batch (batch_samples of sample_bytes, converted) and
  // kPlacementBytes.
  static constexpr size_t kPlacementBytes = 4096;
  // With a residence, batches are gathered out of it as soon as it is ready.
  Prefetcher(std::shared_ptr<Engine> engine, std::shared_ptr<FileTable> files, std::shared_ptr<BufferPool> pool,
             PrefetchOptions options, std::shared_ptr<Residence> residence = nullptr);
  ~Prefetcher();  // as close()
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // Plans batches to come after those planned before: of sizes[i] samples each, sample by sample
  // the index of the file and the offset in it.
  void plan(std::span<const int32_t> files, std::span<const int64_t> offsets, std::span<const int64_t> sizes);

  // The next batch in order, or nothing when all planned batches were taken. Waits; calls `poll`
  // now and then while it does. Throws Failure: the batch's own error (the following call gives the
  // batch after it), kStalled, kClosed.
  std::optional<Batch> next(const std::function<void()>& poll);

  // Drops what is planned and cancels what was not started. Does not wait, so that storage that
  // hangs does not hang its user; memory that reads still go into is let go when they end. Taken
  // batches stay valid.
  void close();

  PrefetchStatistics statistics() const;  // all zeros in a forked child

 private:
  class Core;  // outlives this while reads into its slots are in flight
  Core& living_core() const;
  std::shared_ptr<Core> core_;
};

}  // namespace gdsdata
