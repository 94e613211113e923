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

// Its worker alone writes it; any thread reads it.
struct WorkerLog {
  WorkerCounters counters;
  SpanLog spans;
};

}  // namespace gdsdata
