// A condition variable whose time limits do not depend on the system's clock.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>  // std::cv_status
#include <ctime>
#include <mutex>
#include <system_error>
#include <utility>

namespace gdsdata {

// It takes the place of std::condition_variable. With a glibc older than 2.30, as wheels have it,
// libc++ converts a time limit to the system's clock. A wait would then take an hour longer if that
// clock is set back by an hour meanwhile.
class Condition {
 public:
  using Clock = std::chrono::steady_clock;

  Condition() {
    pthread_condattr_t attributes;
    check(::pthread_condattr_init(&attributes));
    const int set = ::pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    const int made = set == 0 ? ::pthread_cond_init(&condition_, &attributes) : set;
    ::pthread_condattr_destroy(&attributes);
    check(made);
  }
  ~Condition() { ::pthread_cond_destroy(&condition_); }
  Condition(const Condition&) = delete;
  Condition& operator=(const Condition&) = delete;

  void notify_one() noexcept { ::pthread_cond_signal(&condition_); }
  void notify_all() noexcept { ::pthread_cond_broadcast(&condition_); }

  // Waits for a notification. May also return without one.
  void wait(std::unique_lock<std::mutex>& lock) { check(::pthread_cond_wait(&condition_, native(lock))); }
  // Waits until `is_met` returns true.
  template <typename IsMet>
  void wait(std::unique_lock<std::mutex>& lock, IsMet is_met) {
    while (!is_met()) wait(lock);
  }

  // The same, at most until `deadline`.
  std::cv_status wait_until(std::unique_lock<std::mutex>& lock, Clock::time_point deadline) {
    const auto time = std::max(deadline.time_since_epoch(), Clock::duration::zero());
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(time);
    const std::chrono::nanoseconds rest = time - seconds;
    const timespec until{static_cast<time_t>(seconds.count()), static_cast<long>(rest.count())};
    const int ended = ::pthread_cond_timedwait(&condition_, native(lock), &until);
    if (ended == ETIMEDOUT) return std::cv_status::timeout;
    check(ended);
    return std::cv_status::no_timeout;
  }
  // Returns whether `is_met` returned true in time.
  template <typename IsMet>
  bool wait_until(std::unique_lock<std::mutex>& lock, Clock::time_point deadline, IsMet is_met) {
    while (!is_met()) {
      if (wait_until(lock, deadline) == std::cv_status::timeout) return is_met();
    }
    return true;
  }

  // The same, at most for `time`.
  std::cv_status wait_for(std::unique_lock<std::mutex>& lock, std::chrono::nanoseconds time) {
    return wait_until(lock, behind(time));
  }
  template <typename IsMet>
  bool wait_for(std::unique_lock<std::mutex>& lock, std::chrono::nanoseconds time, IsMet is_met) {
    return wait_until(lock, behind(time), std::move(is_met));
  }

 private:
  static void check(int error) {
    if (error != 0) throw std::system_error(error, std::generic_category(), "condition variable");
  }
  static pthread_mutex_t* native(std::unique_lock<std::mutex>& lock) { return lock.mutex()->native_handle(); }
  static Clock::time_point behind(std::chrono::nanoseconds time) {
    const auto now = Clock::now();
    return time < Clock::time_point::max() - now ? now + time : Clock::time_point::max();
  }

  pthread_cond_t condition_;
};

}  // namespace gdsdata
