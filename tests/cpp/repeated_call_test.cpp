// A thread that calls a function whenever that is requested.
#include "engine/repeated_call.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "testing.h"

namespace gdsdata::testing {
namespace {

// A function whose calls wait until the test lets them go on.
class Gate {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    ++begun_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return let_through_ >= begun_; });
    ++ended_;
    changed_.notify_all();
  }
  void let_through(int calls) {
    std::lock_guard lock(mutex_);
    let_through_ = calls;
    changed_.notify_all();
  }
  void wait_until_begun(int calls) { wait(begun_, calls); }
  void wait_until_ended(int calls) { wait(ended_, calls); }
  int begun() {
    std::lock_guard lock(mutex_);
    return begun_;
  }
  int ended() {
    std::lock_guard lock(mutex_);
    return ended_;
  }

 private:
  void wait(int& counter, int calls) {
    std::unique_lock lock(mutex_);
    ASSERT_TRUE(changed_.wait_for(lock, std::chrono::seconds(30), [&] { return counter >= calls; }));
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  int begun_ = 0, ended_ = 0, let_through_ = 0;
};

TEST(RepeatedCall, RequestsDuringACallBecomeOneMoreCall) {
  Gate gate;
  RepeatedCall call("test", [&] { gate.pass(); });
  call.request();
  gate.wait_until_begun(1);
  for (int i = 0; i < 5; ++i) call.request();
  gate.let_through(2);
  gate.wait_until_ended(2);
  call.end();
  EXPECT_EQ(gate.begun(), 2);
}

TEST(RepeatedCall, ItsEndWaitsForTheCallInProgressAndNoneBeginsAfterIt) {
  Gate gate;
  RepeatedCall call("test", [&] { gate.pass(); });
  call.request();
  gate.wait_until_begun(1);
  std::thread opener([&] { gate.let_through(9); });
  call.end();
  EXPECT_EQ(gate.ended(), 1);
  call.request();
  call.end();
  EXPECT_EQ(gate.begun(), 1);
  opener.join();
}

TEST(RepeatedCall, EndsAtOnceIfNothingWasRequested) {
  std::atomic<int> calls = 0;
  {
    RepeatedCall call("test", [&] { ++calls; });
  }
  EXPECT_EQ(calls, 0);
}

}  // namespace
}  // namespace gdsdata::testing
