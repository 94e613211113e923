// The counters and spans of one worker.
#pragma once

#include <chrono>

#include "engine/spans.h"
#include "engine/statistics.h"

namespace gdsdata {

using Clock = std::chrono::steady_clock;

inline uint64_t ns_between(Clock::time_point begin, Clock::time_point end) {
  return static_cast<uint64_t>((end - begin).count());
}

// Only its worker writes it. Any thread may read it.
struct WorkerLog {
  WorkerCounters counters;
  SpanLog spans;
};

// Divides one worker's time into active and idle. Only its worker uses it.
class WorkClock {
 public:
  explicit WorkClock(WorkerCounters& counters) : counters_(counters) {}
  void start() { counted_at_ = Clock::now(); }
  // Count the time since the last count or the start.
  void count_active() { count(counters_.active_ns); }
  void count_idle() { count(counters_.idle_ns); }

 private:
  void count(Counter& counter) {
    const auto now = Clock::now();
    counter.add(ns_between(counted_at_, now));
    counted_at_ = now;
  }

  WorkerCounters& counters_;
  Clock::time_point counted_at_;
};

}  // namespace gdsdata
