// A worker's actions over time, for a profiler's trace. They are recorded only on request.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace gdsdata {

enum class Work : uint8_t {
  kPageCache,  // copying from the page cache
  kStorage,    // in a backend: transferring, or waiting for it
  kLink,       // waiting for copies between the host and a device
  kDevice,     // waiting for a device's work before these copies
};
inline constexpr std::array<const char*, 4> kWorkNames = {"page cache", "storage", "link", "device"};

// On the steady clock, which is CLOCK_MONOTONIC.
struct Span {
  Work work;
  int64_t begin_ns, end_ns;
  uint64_t bytes;  // delivered in it
};

struct Spans {
  std::vector<Span> spans;
  uint64_t dropped = 0;  // spans beyond the requested number
};

// One thread adds to it. Any thread may begin and end it.
class SpanLog {
 public:
  using Time = std::chrono::steady_clock::time_point;

  void begin(size_t most);  // clears it
  Spans end();
  void add(Work work, Time begin, Time end, uint64_t bytes) {
    if (on_.load(std::memory_order_relaxed)) keep(work, begin, end, bytes);
  }

 private:
  void keep(Work work, Time begin, Time end, uint64_t bytes);
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  size_t most_ = 0;
  Spans kept_;
};

}  // namespace gdsdata
