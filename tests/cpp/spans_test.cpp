// Spans of workers' actions, recorded on request.
#include "engine/spans.h"

#include <atomic>
#include <thread>

#include "testing.h"

namespace gdsdata::testing {
namespace {

using Time = SpanLog::Time;

Time at(int64_t ns) { return Time(std::chrono::nanoseconds(ns)); }

int64_t now_ns() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

TEST(SpanLog, KeepsWhatComesBetweenItsBeginAndItsEnd) {
  SpanLog log;
  log.add(Work::kLink, at(1), at(2), 3);
  log.begin(10);
  log.add(Work::kStorage, at(10), at(20), 30);
  const Spans kept = log.end();
  log.add(Work::kLink, at(4), at(5), 6);
  ASSERT_EQ(kept.spans.size(), 1u);
  EXPECT_EQ(kept.spans[0].work, Work::kStorage);
  EXPECT_EQ(kept.spans[0].begin_ns, 10);
  EXPECT_EQ(kept.spans[0].end_ns, 20);
  EXPECT_EQ(kept.spans[0].bytes, 30u);
  EXPECT_EQ(kept.dropped, 0u);
  EXPECT_TRUE(log.end().spans.empty());
}

TEST(SpanLog, KeepsTheFirstOnesAndCountsTheOthers) {
  SpanLog log;
  for (int round = 0; round < 2; ++round) {
    log.begin(3);
    for (int64_t i = 0; i < 10; ++i) log.add(Work::kLink, at(i), at(i + 1), 0);
    const Spans kept = log.end();
    ASSERT_EQ(kept.spans.size(), 3u);
    EXPECT_EQ(kept.spans.back().begin_ns, 2);
    EXPECT_EQ(kept.dropped, 7u);
  }
}

TEST(SpanLog, BeginsAndEndsWhileItsThreadAdds) {
  SpanLog log;
  std::atomic<bool> done{false};
  std::atomic<uint64_t> added{0};
  std::thread worker([&] {
    for (int64_t i = 0; !done; ++i) {
      log.add(Work::kPageCache, at(i), at(i + 1), 1);
      ++added;
    }
  });
  for (int round = 0; round < 200; ++round) {
    log.begin(50);
    for (const uint64_t before = added; added < before + 100;) std::this_thread::yield();
    const Spans kept = log.end();
    ASSERT_EQ(kept.spans.size(), 50u);
    ASSERT_GT(kept.dropped, 0u);
    for (size_t i = 1; i < 50; ++i) ASSERT_EQ(kept.spans[i].begin_ns, kept.spans[i - 1].end_ns);
  }
  done = true;
  worker.join();
}

class EngineSpans : public ::testing::Test {
 protected:
  static constexpr size_t kBytes = 4 << 20;

  std::shared_ptr<Engine> make_engine(DirectMode direct = DirectMode::kAuto) {
    EngineOptions options;
    options.workers = 2;
    options.segment_bytes = 65536;
    options.io.direct = direct;
    return std::make_shared<Engine>(options, host_device());
  }
  void read(Engine& engine) {
    auto group = std::make_shared<Group>();
    group->edit().files = table_of({path_});
    group->edit().transfers = {{0, 0, kBytes, memory_.data()}};
    engine.run(group);
  }

  TemporaryFolder folder_;
  const std::string path_ = folder_.write("a", random_bytes(kBytes, 1));
  Bytes memory_ = Bytes(kBytes);
};

TEST_F(EngineSpans, HoldEveryByteThatWasDeliveredMeanwhile) {
  for (const DirectMode direct : {DirectMode::kAuto, DirectMode::kAlways}) {
    const auto engine = make_engine(direct);
    read(*engine);
    engine->begin_spans(1000);
    const int64_t began_ns = now_ns();
    read(*engine);
    read(*engine);
    const int64_t ended_ns = now_ns();
    const auto of_workers = engine->end_spans();
    read(*engine);
    ASSERT_EQ(of_workers.size(), 3u) << "two workers and the guest";
    uint64_t bytes = 0;
    for (const Spans& of_worker : of_workers) {
      int64_t last_ns = began_ns;
      for (const Span& span : of_worker.spans) {
        if (span.bytes > 0) {
          EXPECT_EQ(span.work, direct == DirectMode::kAuto ? Work::kPageCache : Work::kStorage);
        }
        EXPECT_LE(last_ns, span.begin_ns) << "a thread does one thing at a time";
        EXPECT_LE(span.begin_ns, span.end_ns);
        last_ns = span.end_ns;
        bytes += span.bytes;
      }
      EXPECT_LE(last_ns, ended_ns);
      EXPECT_EQ(of_worker.dropped, 0u);
    }
    EXPECT_EQ(bytes, 2 * kBytes);
  }
}

TEST_F(EngineSpans, AreNotKeptUnlessAskedFor) {
  const auto engine = make_engine();
  read(*engine);
  for (const Spans& of_worker : engine->end_spans()) EXPECT_TRUE(of_worker.spans.empty());
}

TEST_F(EngineSpans, AreAsManyAsWereAskedForAndTheOthersAreCounted) {
  const auto engine = make_engine();
  engine->begin_spans(1);
  read(*engine);
  uint64_t dropped = 0;
  for (const Spans& of_worker : engine->end_spans()) {
    EXPECT_LE(of_worker.spans.size(), 1u);
    dropped += of_worker.dropped;
  }
  EXPECT_GE(dropped, 1u) << "four segments of three";
}

TEST_F(EngineSpans, MayBeAskedForByAnyoneWhileTheEngineWorks) {
  const auto engine = make_engine();
  std::atomic<bool> done{false};
  std::thread asker([&] {
    while (!done) {
      engine->begin_spans(100);
      std::this_thread::yield();
      engine->end_spans();
    }
  });
  for (int round = 0; round < 20; ++round) read(*engine);
  done = true;
  asker.join();
}

}  // namespace
}  // namespace gdsdata::testing
