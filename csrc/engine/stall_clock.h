// Distinguishes storage that hangs from storage that is slow.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace gdsdata {

// Call `stalled` regularly during a wait. One thread uses it.
class StallClock {
 public:
  using Clock = std::chrono::steady_clock;
  // The timeout counts from now. 0: none.
  explicit StallClock(std::chrono::nanoseconds timeout, Clock::time_point now = Clock::now())
      : timeout_(timeout), looked_(now) {}

  // Returns true if this number (see Engine::progress_of) has not changed for the timeout.
  //
  // If the process was stopped (SIGSTOP, a paused container), its reads were too, and nobody
  // looked. So the time since the last look counts as a quarter of the timeout at most.
  bool stalled(uint64_t progress, Clock::time_point now = Clock::now()) {
    still_ += std::min<std::chrono::nanoseconds>(now - looked_, timeout_ / 4);
    looked_ = now;
    if (progress != progress_) still_ = {};
    progress_ = progress;
    return timeout_.count() > 0 && still_ >= timeout_;
  }

 private:
  const std::chrono::nanoseconds timeout_;
  Clock::time_point looked_;
  std::chrono::nanoseconds still_{0};
  uint64_t progress_ = 0;
};

}  // namespace gdsdata
