// Tests which groups wait for the link to a device, and for how long.
#include <atomic>
#include <chrono>

#include "engine/engine.h"
#include "staged.h"

namespace gdsdata::testing {
namespace {

using std::chrono::steady_clock;

class BusyLink : public Staged {
 protected:
  static constexpr int kLost = 700;

  void SetUp() override {
    SKIP_WITH_REAL_CUDA();
    Staged::SetUp();
    set_delay_us(0);
  }

  void set_link_bytes_per_s(uint64_t most) { FAKE(cuda, fake_cuda_set_link_bytes_per_s)(most); }

  // Reads so many segments of the file, which is in the page cache.
  std::shared_ptr<Group> read_of(size_t segments, Memory& memory, size_t first = 0) {
    auto group = std::make_shared<Group>();
    group->edit().files = files_;
    const uint64_t begin = first * kSegmentBytes;
    group->edit().transfers = {{0, begin, segments * kSegmentBytes, memory.data() + begin}};
    return group;
  }

  Bytes beginning(size_t segments) const {
    return {content_.begin(), content_.begin() + static_cast<ptrdiff_t>(segments * kSegmentBytes)};
  }

  static uint64_t calls(const char* name) { return FAKE(cuda, fake_cuda_calls)(name); }

  const TemporaryFolder folder_;
  const Bytes content_ = random_bytes(32 * kSegmentBytes, 1);
  const std::shared_ptr<FileTable> files_ = table_of({folder_.write("a", content_)});
};

TEST_F(BusyLink, GetsCopiesTogetherThatCameWhileItWasBusy) {
  const auto engine = make_engine({.workers = 2, .staging_bytes = 4 << 20});
  Memory memory(*device_, content_.size());
  set_link_bytes_per_s(8 << 20);
  const uint64_t before = calls("cuMemcpyHtoDAsync") + calls("cuMemcpyBatchAsync");
  const auto group = read_of(32, memory);
  ASSERT_TRUE(run(engine, group));
  ASSERT_FALSE(group->result().error) << group->result().error->message;
  EXPECT_LE(calls("cuMemcpyHtoDAsync") + calls("cuMemcpyBatchAsync") - before, 16u) << "copies of 32 segments";
  EXPECT_LE(group->result().copies.size(), 1u) << "one stream for all workers";
  set_link_bytes_per_s(0);
  ASSERT_TRUE(same(memory.content(), content_));
}

TEST_F(BusyLink, GetsCopiesOneByOneOfADriverThatCannotTakeThemTogether) {
  const auto engine = make_engine({.workers = 2, .staging_bytes = 4 << 20});
  Memory memory(*device_, content_.size());
  FAKE(cuda, fake_cuda_set_copy_batches)(false);
  set_link_bytes_per_s(40 << 20);
  const uint64_t before = calls("cuMemcpyHtoDAsync");
  const auto group = read_of(32, memory);
  ASSERT_TRUE(run(engine, group));
  ASSERT_FALSE(group->result().error) << group->result().error->message;
  EXPECT_EQ(calls("cuMemcpyHtoDAsync") - before, 32u);
  set_link_bytes_per_s(0);
  ASSERT_TRUE(same(memory.content(), content_));
}

TEST_F(BusyLink, DoesNotKeepAGroupFromEndingOnceWorkersHaveNothingElseToDo) {
  const auto engine = make_engine({.workers = 1, .staging_bytes = 4 << 20});
  Memory memory(*device_, content_.size());
  set_link_bytes_per_s(1 << 20);
  const auto group = read_of(8, memory);  // takes 0.5 s
  Ended ended;
  group->edit().on_done = ended.one();
  engine->submit(group);
  if (!ended.wait_for(1)) return leave(engine, group);
  ASSERT_EQ(group->result().copies.size(), 1u);
  EXPECT_FALSE(group->result().copies[0]->done()) << "it ended when its copies did";
  group->result().copies[0]->wait();
  set_link_bytes_per_s(0);
  ASSERT_TRUE(same(memory.content(), [&] {
    Bytes expected(content_.size(), kUntouched);
    std::copy_n(content_.begin(), 8 * kSegmentBytes, expected.begin());
    return expected;
  }()));
}

// A worker that waits for storage wakes every 100 ms, and would submit waiting copies then.
TEST_F(BusyLink, DoesNotKeepAGroupFromEndingWhileItsWorkerWaitsForStorage) {
  const auto engine =
      make_engine({.faults = "late=1,late_ms=500", .backend = "uring", .workers = 1, .staging_bytes = 8 << 20});
  Memory memory(*device_, content_.size()), other(*device_, content_.size());
  const std::string cold = folder_.write("cold", content_);
  set_link_bytes_per_s(2 << 20);
  auto soonest = std::chrono::steady_clock::duration::max();
  for (int round = 0; round < 5; ++round) {
    drop_from_page_cache(cold);
    const auto warm = read_of(4, memory), late = read_of(32, other);
    late->edit().files = table_of({cold});
    Ended ended, late_ended;
    warm->edit().on_done = ended.one();
    late->edit().on_done = late_ended.one();
    const auto began = steady_clock::now();
    engine->submit(warm);
    engine->submit(late);
    if (!ended.wait_for(1)) return leave(engine, warm);
    soonest = std::min(soonest, steady_clock::now() - began);
    late->cancel();
    if (!late_ended.wait_for(1)) return leave(engine, late);
    for (const auto& copy : warm->result().copies) copy->wait();
  }
  EXPECT_LT(soonest, std::chrono::milliseconds(80));
}

TEST_F(BusyLink, OfALostDeviceIsAnErrorOfEachGroupThatWaitedForItAndNoHang) {
  const auto engine = make_engine({.workers = 2, .staging_bytes = kLeastStagingBytes});
  Memory memory(*device_, content_.size());
  for (int round = 0; round < 5; ++round) {
    set_link_bytes_per_s(4 << 20);
    std::vector<std::shared_ptr<Group>> groups;
    Ended ended;
    for (size_t i = 0; i < 16; ++i) {
      groups.push_back(read_of(1, memory, i));
      groups.back()->edit().on_done = ended.one();
      engine->submit(groups.back());
    }
    ASSERT_TRUE(ended.wait_for(2));
    FAKE(cuda, fake_cuda_break)(kLost);
    if (!ended.wait_for(16)) return leave(engine, groups.back());
    size_t failed = 0;
    for (const auto& group : groups) failed += group->result().error ? 1 : 0;
    EXPECT_GT(failed, 0u) << "there is staging memory for two of them";
    FAKE(cuda, fake_cuda_break)(0);
    set_link_bytes_per_s(0);
    memory.read_later()->wait();  // after copies that were in flight
    const auto next = read_of(16, memory);
    ASSERT_TRUE(run(engine, next));
    ASSERT_FALSE(next->result().error) << next->result().error->message;
    const Bytes found = memory.content();
    ASSERT_TRUE(same({found.begin(), found.begin() + 16 * kSegmentBytes}, beginning(16)));
  }
}

TEST_F(BusyLink, AFailedBatchIsTheErrorOfEachOfItsGroups) {
  const auto engine = make_engine({.workers = 1, .staging_bytes = 4 << 20});
  Memory memory(*device_, content_.size());
  for (int round = 0; round < 5; ++round) {
    set_link_bytes_per_s(2 << 20);
    FAKE(cuda, fake_cuda_fail_next)("cuMemcpyBatchAsync", 719);
    Ended ended;
    std::vector<std::shared_ptr<Group>> groups;
    for (size_t i = 0; i < 8; ++i) {
      groups.push_back(read_of(1, memory, i));
      groups.back()->edit().on_done = ended.one();
    }
    // The worker itself submits them, so all are queued before it looks for other work.
    const auto first = read_of(1, memory);
    first->edit().on_done = [&] {
      for (const auto& group : groups) engine->submit(group);
    };
    engine->submit(first);
    if (!ended.wait_for(8)) return leave(engine, groups.back());
    size_t failed = 0;
    for (const auto& group : groups) {
      if (group->result().error) {
        ++failed;
        EXPECT_NE(group->result().error->message.find("CUDA_ERROR_LAUNCH_FAILED"), std::string::npos)
            << group->result().error->message;
      }
      EXPECT_EQ(group->result().copies.empty(), group->result().error.has_value());
    }
    EXPECT_GE(failed, 2u);
    set_link_bytes_per_s(0);
    const auto next = read_of(8, memory);
    ASSERT_TRUE(run(engine, next));
    const Bytes found = memory.content();
    ASSERT_TRUE(same({found.begin(), found.begin() + 8 * kSegmentBytes}, beginning(8)));
  }
}

}  // namespace
}  // namespace gdsdata::testing
