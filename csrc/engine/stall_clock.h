// Distinguishes storage that hangs from storage that is slow.
#pragma once

#include <chrono>
#include <cstdint>

namespace gdsdata {

// Call `stalled` regularly during a wait. One thread uses it.
class StallClock {
 public:
  // The timeout counts from now. 0: none.
  explicit StallClock(std::chrono::nanoseconds timeout) : timeout_(timeout) {}

  // Returns true if this number (see Engine::progress_of) has not changed for the timeout.
  bool stalled(uint64_t progress) {
    const auto now = Clock::now();
    if (progress != progress_) {
      progress_ = progress;
      moved_ = now;
    }
    return timeout_.count() > 0 && now - moved_ >= timeout_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  const std::chrono::nanoseconds timeout_;
  Clock::time_point moved_ = Clock::now();
  uint64_t progress_ = 0;
};

}  // namespace gdsdata
