// Waits with a time limit, and the system's clock.
#include "base/condition.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <thread>

#include "testing.h"

namespace {

// How far the system's clock is ahead for this thread.
thread_local std::chrono::seconds clock_is_ahead{0};

}  // namespace

// Takes the place of libc's, for the C++ library too.
extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const auto result = static_cast<int>(::syscall(SYS_clock_gettime, clock, time));
  if (result == 0 && clock == CLOCK_REALTIME) time->tv_sec += clock_is_ahead.count();
  return result;
}

namespace gdsdata::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// A wait asks for the time, and then the clock is set back by an hour: the kernel has never heard
// of that hour.
class ClockSetBack : public ::testing::Test {
 protected:
  ClockSetBack() { clock_is_ahead = 1h; }
  ~ClockSetBack() override {
    clock_is_ahead = 0s;
    ended_.set_value();
    rescuer_.join();
  }
  Condition condition_;
  std::mutex mutex_;
  std::atomic<bool> rescued_{false};

 private:
  std::promise<void> ended_;
  std::thread rescuer_{[this] {
    if (ended_.get_future().wait_for(10s) == std::future_status::ready) return;
    rescued_ = true;
    condition_.notify_all();
  }};
};

TEST_F(ClockSetBack, AWaitForAConditionEndsInTime) {
  std::unique_lock lock(mutex_);
  EXPECT_FALSE(condition_.wait_for(lock, 20ms, [this] { return rescued_.load(); }));
  EXPECT_FALSE(rescued_);
}

TEST_F(ClockSetBack, AWaitForANotificationEndsInTime) {
  std::unique_lock lock(mutex_);
  while (condition_.wait_for(lock, 20ms) != std::cv_status::timeout) continue;
  EXPECT_FALSE(rescued_);
}

TEST(Condition, AWaitWithoutEndIsNotified) {
  Condition condition;
  std::mutex mutex;
  bool is_met = false;
  std::unique_lock lock(mutex);
  std::thread other([&] {
    std::lock_guard guard(mutex);
    is_met = true;
    condition.notify_one();
  });
  EXPECT_TRUE(condition.wait_for(lock, std::chrono::nanoseconds::max(), [&] { return is_met; }));
  other.join();
}

TEST(Condition, ATimeThatHasPassedEndsTheWaitAtOnce) {
  Condition condition;
  std::mutex mutex;
  std::unique_lock lock(mutex);
  EXPECT_EQ(condition.wait_until(lock, Clock::now() - 1h), std::cv_status::timeout);
  EXPECT_EQ(condition.wait_until(lock, Clock::time_point::min()), std::cv_status::timeout);
  EXPECT_FALSE(condition.wait_for(lock, -1ns, [] { return false; }));
  EXPECT_TRUE(condition.wait_for(lock, -1ns, [] { return true; }));
}

}  // namespace
}  // namespace gdsdata::testing
