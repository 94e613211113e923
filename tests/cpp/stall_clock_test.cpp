#include "engine/stall_clock.h"

#include "testing.h"

namespace gdsdata::testing {
namespace {

using std::chrono::milliseconds;

class Waiting : public ::testing::Test {
 protected:
  // Looks every 50 ms, as waits do, and returns the time until the clock calls it a stall.
  milliseconds until_stalled() {
    for (const auto began = now; now < began + 100 * kTimeout;) {
      now += milliseconds(50);
      if (clock.stalled(progress, now)) return std::chrono::duration_cast<milliseconds>(now - began);
    }
    return milliseconds::max();
  }
  static constexpr milliseconds kTimeout{1000};
  StallClock::Clock::time_point now{};
  StallClock clock{kTimeout, now};
  uint64_t progress = 0;
};

TEST_F(Waiting, IsAStallAfterTheTimeoutWithoutProgress) { EXPECT_EQ(until_stalled(), kTimeout); }

TEST_F(Waiting, BeginsAnewWithEachProgress) {
  for (; progress < 100; ++progress, now += milliseconds(900)) EXPECT_FALSE(clock.stalled(progress, now));
  EXPECT_FALSE(clock.stalled(progress, now));
  EXPECT_EQ(until_stalled(), kTimeout);
}

TEST_F(Waiting, OfAProcessThatWasStoppedGoesOnAsIfItHadHardlyBeen) {
  EXPECT_FALSE(clock.stalled(progress, now));
  now += std::chrono::hours(1);
  EXPECT_FALSE(clock.stalled(progress, now));
  EXPECT_EQ(until_stalled(), kTimeout * 3 / 4);
}

TEST_F(Waiting, ThatSeldomLooksIsAStallAllTheSame) {
  int looks = 1;
  while (!clock.stalled(progress, now += std::chrono::hours(1))) ++looks;
  EXPECT_EQ(looks, 4);
}

TEST_F(Waiting, WithoutATimeoutIsNoStall) {
  StallClock endless{milliseconds(0), now};
  EXPECT_FALSE(endless.stalled(0, now));
  EXPECT_FALSE(endless.stalled(0, now + std::chrono::hours(1000)));
}

}  // namespace
}  // namespace gdsdata::testing
