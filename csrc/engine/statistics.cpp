#include "engine/statistics.h"

#include <utility>

namespace gdsdata {

namespace {

LatencySummary percentiles(const std::vector<const WorkerCounters*>& workers) {
  std::array<uint64_t, LatencyHistogram::kBuckets> counts{};
  LatencySummary summary;
  for (const WorkerCounters* worker : workers) {
    for (size_t i = 0; i < counts.size(); ++i) {
      const uint64_t count = worker->segment_latency.count(i);
      counts[i] += count;
      summary.count += count;
    }
  }
  const std::pair<double, double*> wanted[] = {
      {0.5, &summary.p50_us}, {0.9, &summary.p90_us}, {0.99, &summary.p99_us}, {0.999, &summary.p999_us}};
  for (const auto& [share, result] : wanted) {
    double below = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
      below += static_cast<double>(counts[i]);
      if (counts[i] != 0 && below >= share * static_cast<double>(summary.count)) {
        *result = LatencyHistogram::bucket_ns(i) / 1e3;
        break;
      }
    }
  }
  return summary;
}

double seconds(const Counter& nanoseconds) { return static_cast<double>(nanoseconds.get()) / 1e9; }

}  // namespace

EngineStatistics summarize(const std::vector<const WorkerCounters*>& workers) {
  EngineStatistics sum;
  for (const WorkerCounters* worker : workers) {
    for (size_t i = 0; i < kRouteCount; ++i) sum.bytes.bytes[i] += worker->bytes[i].get();
    sum.storage_bytes += worker->storage_bytes.get();
    sum.transfers += worker->transfers.get();
    sum.requests += worker->requests.get();
    sum.segments += worker->segments.get();
    sum.errors += worker->errors.get();
    sum.retries += worker->retries.get();
    sum.worker_idle_s += seconds(worker->idle_ns);
    sum.worker_active_s += seconds(worker->active_ns);
    sum.worker_storage_s += seconds(worker->storage_ns);
    sum.worker_link_s += seconds(worker->link_ns);
    sum.worker_device_s += seconds(worker->device_ns);
  }
  sum.segment_latency = percentiles(workers);
  return sum;
}

}  // namespace gdsdata
