#include "engine/spans.h"

#include <new>
#include <utility>

namespace gdsdata {

namespace {

int64_t nanoseconds(SpanLog::Time time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

}  // namespace

void SpanLog::begin(size_t most) {
  std::lock_guard lock(mutex_);
  kept_ = {};
  most_ = most;
  on_.store(true, std::memory_order_relaxed);
}

Spans SpanLog::end() {
  std::lock_guard lock(mutex_);
  on_.store(false, std::memory_order_relaxed);
  return std::exchange(kept_, {});
}

void SpanLog::keep(Work work, Time begin, Time end, uint64_t bytes) {
  std::lock_guard lock(mutex_);
  if (!on_.load(std::memory_order_relaxed)) return;  // ended meanwhile
  try {
    if (kept_.spans.size() < most_) {
      kept_.spans.push_back({work, nanoseconds(begin), nanoseconds(end), bytes});
      return;
    }
  } catch (const std::bad_alloc&) {  // count it as dropped, and continue the work
  }
  ++kept_.dropped;
}

}  // namespace gdsdata
