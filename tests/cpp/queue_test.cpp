// The order of segments, and the workers that are woken for them.
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "engine/segment_queue.h"
#include "testing.h"

namespace gdsdata::testing {
namespace {

std::shared_ptr<Group> group_of(Priority priority) {
  auto group = std::make_shared<Group>();
  group->edit().priority = priority;
  return group;
}

void push(SegmentQueue& queue, const std::shared_ptr<Group>& group, size_t count) {
  std::vector<Segment> segments(count, Segment{group, {}, {}, {}, false});
  queue.push_fresh(segments);
}

Priority popped(SegmentQueue& queue) {
  Segment segment;
  EXPECT_TRUE(queue.pop(segment, /*wait=*/false));
  return segment.group->request().priority;
}

TEST(SegmentQueue, TrainingGoesFirstAndTheBackgroundGetsEveryNinthTurn) {
  SegmentQueue queue;
  push(queue, group_of(Priority::kBackground), 20);
  push(queue, group_of(Priority::kTraining), 100);
  for (int turn = 1; turn <= 100; ++turn) {
    ASSERT_EQ(popped(queue), turn % 9 == 0 ? Priority::kBackground : Priority::kTraining) << "turn " << turn;
  }
}

TEST(SegmentQueue, TheBackgroundGetsAllTurnsThatTrainingLeaves) {
  SegmentQueue queue;
  push(queue, group_of(Priority::kBackground), 3);
  EXPECT_EQ(popped(queue), Priority::kBackground);
  push(queue, group_of(Priority::kTraining), 1);
  EXPECT_EQ(popped(queue), Priority::kTraining);
  EXPECT_EQ(popped(queue), Priority::kBackground);
  EXPECT_EQ(popped(queue), Priority::kBackground);
  Segment segment;
  EXPECT_FALSE(queue.pop(segment, /*wait=*/false));
}

TEST(SegmentQueue, TheBackgroundGetsItsTurnBetweenSegmentsForStorageToo) {
  SegmentQueue queue;
  const auto training = group_of(Priority::kTraining);
  push(queue, group_of(Priority::kBackground), 3);
  int turns = 0;
  do {  // like a consumer that helps while its data is on the disk
    queue.push_for_storage({training, {}, {{}}, {}, false});
    queue.push_for_storage({training, {}, {{}}, {}, false});
  } while (++turns <= 9 && popped(queue) == Priority::kTraining);
  EXPECT_LE(turns, 9) << "storage is busy with training, and a checkpoint never ends";
}

TEST(SegmentQueue, BackgroundThatGoesToStorageDoesNotGoBeforeTraining) {
  SegmentQueue queue;
  const auto background = group_of(Priority::kBackground);
  for (int i = 0; i < 20; ++i) queue.push_for_storage({background, {}, {{}}, {}, false});
  push(queue, group_of(Priority::kTraining), 8);
  for (int turn = 1; turn <= 8; ++turn) ASSERT_EQ(popped(queue), Priority::kTraining) << "turn " << turn;
  EXPECT_EQ(popped(queue), Priority::kBackground);
}

TEST(SegmentQueue, APatientGroupGetsOneWorkerAtATimeUntilAHurry) {
  using namespace std::chrono_literals;
  SegmentQueue queue;
  std::atomic<int> about_to_wait{0}, took{0};
  std::atomic<bool> over{false};
  std::vector<std::jthread> workers;
  for (int i = 0; i < 6; ++i) {
    workers.emplace_back([&] {
      ++about_to_wait;
      Segment segment;
      if (!queue.pop(segment, /*wait=*/true)) return;
      ++took;
      while (!over) std::this_thread::sleep_for(1ms);
    });
  }
  const auto after = [&](int count) {
    const auto until = std::chrono::steady_clock::now() + 10s;
    while (took < count && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(1ms);
    std::this_thread::sleep_for(50ms);  // others that should not come would come now
    return took.load();
  };
  while (about_to_wait < 6) std::this_thread::sleep_for(1ms);
  std::this_thread::sleep_for(100ms);
  const auto patient = group_of(Priority::kTraining);
  patient->edit().patient = true;
  push(queue, patient, 2);
  EXPECT_EQ(after(1), 1);
  push(queue, patient, 2);
  EXPECT_EQ(after(2), 2) << "the first worker has not come back: another one is needed";
  queue.hurry();
  EXPECT_EQ(after(4), 4);
  push(queue, patient, 1);
  push(queue, group_of(Priority::kBackground), 1);
  EXPECT_EQ(after(6), 6);
  over = true;
  queue.close();
}

TEST(SegmentQueue, AHelpedGroupWakesNoWorkerUntilAHurry) {
  using namespace std::chrono_literals;
  SegmentQueue queue;
  std::atomic<int> took{0};
  const auto work = [&] {
    Segment segment;
    while (queue.pop(segment, /*wait=*/true)) ++took;
  };
  std::jthread worker(work);
  std::this_thread::sleep_for(100ms);
  const auto group = group_of(Priority::kTraining);
  std::vector<Segment> segments(1, Segment{group, {}, {}, {}, false});
  queue.push_fresh(segments, /*helped=*/true);
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(took, 0);
  queue.hurry();
  const auto until = std::chrono::steady_clock::now() + 10s;
  while (took < 1 && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(took, 1);
  queue.close();
}

TEST(SegmentQueue, SpareSegmentsGoInTheSameTurns) {
  SegmentQueue queue;
  Segment segment;
  EXPECT_FALSE(queue.pop_spare(segment));
  push(queue, group_of(Priority::kBackground), 1);
  push(queue, group_of(Priority::kTraining), 1);
  for (const Priority next : {Priority::kTraining, Priority::kBackground}) {
    ASSERT_TRUE(queue.pop_spare(segment));
    EXPECT_EQ(segment.group->request().priority, next);
  }
}

TEST(SegmentQueue, NothingIsSpareWhileAWorkerWaits) {
  SegmentQueue queue;
  std::atomic<pid_t> thread{0};
  std::atomic<int> took{0};
  std::thread worker([&] {
    thread = static_cast<pid_t>(::syscall(SYS_gettid));
    Segment segment;
    while (queue.pop(segment, /*wait=*/true)) ++took;
  });
  for (int turn = 1; turn <= 20; ++turn) {
    while (thread == 0 || !sleeps(thread)) std::this_thread::yield();
    push(queue, group_of(Priority::kTraining), 1);
    Segment segment;
    EXPECT_FALSE(queue.pop_spare(segment));
    while (took < turn) std::this_thread::yield();
  }
  queue.close();
  worker.join();
}

TEST(SegmentQueue, AHelperOfTrainingTakesNothingOfTheBackground) {
  SegmentQueue queue;
  push(queue, group_of(Priority::kBackground), 2);
  Segment segment;
  EXPECT_FALSE(queue.pop_fresh(segment, Priority::kTraining));
  push(queue, group_of(Priority::kTraining), 2);
  EXPECT_TRUE(queue.pop_fresh(segment, Priority::kTraining));
  EXPECT_TRUE(queue.pop_fresh(segment, Priority::kBackground));
  EXPECT_EQ(segment.group->request().priority, Priority::kTraining) << "it goes first here too";
  EXPECT_TRUE(queue.pop_fresh(segment, Priority::kBackground));
  EXPECT_EQ(segment.group->request().priority, Priority::kBackground);
  EXPECT_EQ(popped(queue), Priority::kBackground);
}

}  // namespace
}  // namespace gdsdata::testing
