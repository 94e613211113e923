// Counters that are cheap enough to stay on. One thread writes each, and any thread may read it.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <vector>

#include "base/types.h"

namespace gdsdata {

// A count that only one thread adds to, so it needs no locked instruction.
class Counter {
 public:
  void add(uint64_t amount) { value_.store(get() + amount, std::memory_order_relaxed); }
  uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

// Durations in buckets of an eighth of a power of two: percentiles are right within 12.5 %.
class LatencyHistogram {
 public:
  void add(std::chrono::nanoseconds duration) { counts_[bucket_of(duration.count())].add(1); }
  static size_t bucket_of(int64_t nanoseconds) {
    const auto value = static_cast<uint64_t>(nanoseconds < kSteps ? kSteps : nanoseconds);
    const int power = std::bit_width(value) - 1;
    return static_cast<size_t>(power) * kSteps + ((value >> (power - kStepBits)) & (kSteps - 1));
  }
  // The middle of a bucket.
  static double bucket_ns(size_t bucket) {
    const double base = static_cast<double>(uint64_t{1} << (bucket / kSteps));
    return base * (1 + (static_cast<double>(bucket % kSteps) + 0.5) / kSteps);
  }
  uint64_t count(size_t bucket) const { return counts_[bucket].get(); }
  static constexpr size_t kBuckets = 64 * 8;

 private:
  static constexpr int kStepBits = 3;
  static constexpr int64_t kSteps = 1 << kStepBits;
  std::array<Counter, kBuckets> counts_;
};

// The counters of one worker.
struct WorkerCounters {
  std::array<Counter, kRouteCount> bytes;  // delivered, by route
  Counter storage_bytes;                   // requested from storage, including over-read and gaps
  Counter transfers;
  Counter requests;  // coalesced from the transfers that storage had to serve
  Counter segments;
  Counter exchanged;  // requests taken by a backend, plus those it completed
  Counter errors;
  Counter retries;  // requests that failed between storage and device, repeated through the host
  Counter idle_ns;     // waiting for work; counted when work comes
  Counter active_ns;   // the rest of the time
  Counter storage_ns;  // of active_ns, in backends: transfers with writes' checksums, and waiting for them
  Counter link_ns;     // of active_ns, waiting for copies between the host and a device
  Counter device_ns;   // of active_ns, waiting for a device's work before these copies
  LatencyHistogram segment_latency;
};

struct LatencySummary {
  uint64_t count = 0;
  double p50_us = 0, p90_us = 0, p99_us = 0, p999_us = 0;
};

struct EngineStatistics {
  RouteBytes bytes;
  uint64_t storage_bytes = 0, transfers = 0, requests = 0, segments = 0, errors = 0, retries = 0;
  double worker_idle_s = 0, worker_active_s = 0, worker_storage_s = 0;
  double worker_link_s = 0, worker_device_s = 0;
  LatencySummary segment_latency;
};

EngineStatistics summarize(const std::vector<const WorkerCounters*>& workers);

}  // namespace gdsdata
