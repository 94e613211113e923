// Short reads that the waiting caller does itself, to a device that the processor cannot write.
#include <unistd.h>

#include <fstream>
#include <set>
#include <thread>

#include "base/crc32.h"
#include "device/cuda_api.h"
#include "engine/pending.h"
#include "engine/whole.h"
#include "staged.h"

namespace gdsdata::testing {
namespace {

std::set<pid_t> tasks() {
  std::set<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    found.insert(std::stoi(entry.path().filename()));
  }
  return found;
}

// How often the thread has slept.
uint64_t sleeps_of(pid_t task) {
  std::ifstream status("/proc/self/task/" + std::to_string(task) + "/status");
  for (std::string word; status >> word;) {
    uint64_t count = 0;
    if (word == "voluntary_ctxt_switches:" && status >> count) return count;
  }
  ADD_FAILURE() << "no thread " << task;
  return 0;
}

// Short reads whose waiting caller copies them to the device, through the guest's staging memory.
class ShortReads : public Staged {
 protected:
  static constexpr Setting kSetting{.workers = 2, .staging_bytes = 8 << 20, .segment_bytes = 1 << 20};

  // Waits until all workers sleep: one that is about to would take a segment without being woken.
  std::shared_ptr<Engine> engine_at_rest(const Setting& setting = kSetting) {
    const auto others = tasks();
    auto engine = make_engine(setting);
    workers_.clear();
    for (const pid_t task : tasks()) {
      if (others.count(task) == 0) workers_.push_back(task);
    }
    EXPECT_EQ(workers_.size(), setting.workers);
    for (int seen = 0; seen < 3; ++seen) {
      if (!std::all_of(workers_.begin(), workers_.end(), sleeps)) seen = 0;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return engine;
  }

  static std::shared_ptr<Group> read_into(Memory& memory, std::shared_ptr<FileTable> files, uint64_t bytes) {
    auto group = std::make_shared<Group>();
    group->edit().files = std::move(files);
    group->edit().transfers = {{0, 0, bytes, memory.data()}};
    return group;
  }

  // The bytes served since `begin_spans`.
  struct Served {
    uint64_t by_guest = 0, by_workers = 0;
  };
  static Served served(Engine& engine) {
    const auto bytes_of = [](const Spans& kept) {
      return std::accumulate(kept.spans.begin(), kept.spans.end(), uint64_t{0},
                             [](uint64_t sum, const gdsdata::Span& span) { return sum + span.bytes; });
    };
    std::vector<Spans> spans = engine.end_spans();
    Served served{bytes_of(spans.back()), 0};
    spans.pop_back();
    for (const Spans& of_worker : spans) served.by_workers += bytes_of(of_worker);
    return served;
  }

  const TemporaryFolder folder_;
  const Bytes content_ = random_bytes(tuning::kShortReadBytes + 1, 1);
  const std::string path_ = folder_.write("a", content_);
  const std::shared_ptr<FileTable> files_ = table_of({path_});
  std::vector<pid_t> workers_;  // of engine_at_rest
};

TEST_F(ShortReads, AreDoneByTheWaitingCallerAndWakeNoWorker) {
  const auto engine = engine_at_rest();
  const auto slept = [&] { return sleeps_of(workers_[0]) + sleeps_of(workers_[1]); };
  const uint64_t before = slept();
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, uint64_t{4096}, uint64_t{70'001}, tuning::kShortReadBytes}) {
    SCOPED_TRACE(bytes);
    Memory memory(*device_, content_.size());
    engine->begin_spans(1000);
    const auto group = read_into(memory, files_, bytes);
    engine->run(group);
    EXPECT_TRUE(group->result().copies.empty()) << "it is there";
    EXPECT_EQ(group->result().bytes[Route::kPageCache], bytes);
    const Served by = served(*engine);
    EXPECT_EQ(by.by_guest, bytes);
    EXPECT_EQ(by.by_workers, 0u);
    Bytes expected(content_.size(), kUntouched);
    std::copy_n(content_.begin(), bytes, expected.begin());
    ASSERT_TRUE(same(memory.content(), expected));
  }
  EXPECT_EQ(slept(), before) << "a worker was woken";
  EXPECT_EQ(engine->statistics().transfers, 4u) << "one of nothing is none";
}

TEST_F(ShortReads, ServedAtOnceWakeNoWorkerAndAreThere) {
  const auto engine = engine_at_rest();
  const auto slept = [&] { return sleeps_of(workers_[0]) + sleeps_of(workers_[1]); };
  const uint64_t before = slept();
  Memory memory(*device_, 4096);
  const auto group = read_into(memory, files_, 4096);
  Pending pending(*engine, group, {}, /*waits_now=*/true);
  engine->serve_at_once(*group);
  EXPECT_TRUE(pending.ended());
  pending.finish();
  ASSERT_TRUE(same(memory.content(), {content_.begin(), content_.begin() + 4096}));
  EXPECT_EQ(slept(), before) << "a worker was woken";
}

TEST_F(ShortReads, ServedAtOnceDoNotWaitForASlowCopy) {
  const auto engine = engine_at_rest();
  std::vector<std::unique_ptr<Memory>> memories;
  for (int i = 0; i < 3; ++i) memories.push_back(std::make_unique<Memory>(*device_, 4096));
  std::vector<std::unique_ptr<Pending>> reads;
  set_delay_us(100'000);
  const auto began = std::chrono::steady_clock::now();
  for (uint64_t i = 0; i < 3; ++i) {
    const auto group = read_into(*memories[i], files_, 4096);
    group->edit().transfers.front().offset = 5000 * i;
    reads.push_back(std::make_unique<Pending>(*engine, group, std::function<void()>(), /*waits_now=*/true));
    engine->serve_at_once(*group);
    EXPECT_FALSE(reads.back()->complete()) << "its copy takes 100 ms";
  }
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(50));
  for (uint64_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(reads[i]->wait(kPatience));
    reads[i]->finish();
    EXPECT_TRUE(reads[i]->complete());
    const auto begin = content_.begin() + static_cast<ptrdiff_t>(5000 * i);
    ASSERT_TRUE(same(memories[i]->content(), {begin, begin + 4096})) << i;
  }
}

TEST_F(ShortReads, ServedAtOnceDoNotWaitForWorkOfTheDevice) {
  SKIP_WITH_REAL_CUDA();
  const auto engine = engine_at_rest();
  Memory memory(*device_, 4096);
  FAKE(cuda, fake_cuda_keep_busy)(0, 100'000);
  const auto group = read_into(memory, files_, 4096);
  group->edit().before = {device_->foreign_stream(0)->record()};
  Pending pending(*engine, group, {}, /*waits_now=*/true);
  const auto began = std::chrono::steady_clock::now();
  engine->serve_at_once(*group);
  EXPECT_FALSE(pending.complete());
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(50));
  ASSERT_TRUE(pending.wait(kPatience));
  pending.finish();
  ASSERT_TRUE(same(memory.content(), {content_.begin(), content_.begin() + 4096}));
}

TEST_F(ShortReads, ServedAtOnceComeFromStorageIfThePageCacheLacksThem) {
  const auto engine = engine_at_rest();
  Memory memory(*device_, 4096);
  drop_from_page_cache(path_);
  const auto group = read_into(memory, files_, 4096);
  Pending pending(*engine, group, {}, /*waits_now=*/true);
  engine->serve_at_once(*group);
  ASSERT_TRUE(pending.wait(kPatience));
  pending.finish();
  ASSERT_TRUE(same(memory.content(), {content_.begin(), content_.begin() + 4096}));
}

TEST_F(ShortReads, ThatArePendingAreDoneByTheWaitingCallerToo) {
  const auto engine = engine_at_rest({.workers = 1, .staging_bytes = 2 << 20, .segment_bytes = 1 << 20});
  set_delay_us(50'000);
  Memory busy(*device_, 5 << 20), memory(*device_, 4096);
  auto long_read = std::make_shared<Group>();  // keeps the worker busy, whose staging memory holds one segment
  long_read->edit().files = table_of({folder_.write("long", random_bytes(5 << 20, 2))});
  long_read->edit().transfers = {{0, 0, 5 << 20, busy.data()}};
  Pending others(*engine, long_read);
  engine->begin_spans(1000);
  Pending pending(*engine, read_into(memory, files_, 4096));
  ASSERT_TRUE(pending.wait(kPatience));
  pending.finish();
  ASSERT_TRUE(same(memory.content(), {content_.begin(), content_.begin() + 4096}));
  ASSERT_TRUE(others.wait(kPatience));
  others.finish();
  EXPECT_LE(served(*engine).by_guest, 4096u) << "the caller serves the group that it waits for, and no other";
}

TEST_F(ShortReads, OfALittleMoreAreTheWorkers) {
  const auto engine = engine_at_rest();
  Memory memory(*device_, content_.size());
  engine->begin_spans(1000);
  engine->run(read_into(memory, files_, tuning::kShortReadBytes + 1));
  EXPECT_EQ(served(*engine).by_guest, 0u);
  ASSERT_TRUE(same(memory.content(), content_));
}

TEST_F(ShortReads, OfWhatThePageCacheLacksAreTheWorkers) {
  const auto engine = engine_at_rest();
  Memory memory(*device_, content_.size());
  drop_from_page_cache(path_);
  std::ifstream(path_).get();  // loads its first pages
  const auto group = read_into(memory, files_, tuning::kShortReadBytes);
  group->edit().checksum = Checksum::kCrc32;
  engine->run(group);
  EXPECT_LT(group->result().bytes[Route::kPageCache], tuning::kShortReadBytes);
  EXPECT_EQ(counted(group->result().bytes), tuning::kShortReadBytes);
  EXPECT_EQ(group->checksums(), std::vector<uint32_t>{crc32(content_.data(), tuning::kShortReadBytes)});
  EXPECT_EQ(engine->statistics().transfers, 1u);
  Bytes got = memory.content();
  got.resize(tuning::kShortReadBytes);
  ASSERT_TRUE(same(got, {content_.begin(), content_.end() - 1}));
  EXPECT_EQ(read_file(path_).size(), content_.size());  // loads all of it
  engine->begin_spans(1000);
  engine->run(read_into(memory, files_, tuning::kShortReadBytes));
  EXPECT_EQ(served(*engine).by_guest, tuning::kShortReadBytes) << "it has kept staging memory";
}

TEST_F(ShortReads, HaveTheirChecksums) {
  const auto engine = engine_at_rest();
  Memory memory(*device_, content_.size());
  const Moved moved = read_many(*engine, files_, {{0, 5, 70'000, memory.data()}, {0, 99, 3, memory.data() + 80'000}},
                                Conversion::kNone, /*with_checksums=*/true, {});
  EXPECT_EQ(moved.checksums, (std::vector{crc32(content_.data() + 5, 70'000), crc32(content_.data() + 99, 3)}));
}

TEST_F(ShortReads, HaveNoChecksumsOfConvertedElements) {
  const auto engine = engine_at_rest();
  Memory memory(*device_, content_.size());
  const Error error = error_of([&] {
    read_many(*engine, files_, {{0, 4, 400, memory.data()}}, Conversion::kF32ToBf16, /*with_checksums=*/true, {});
  });
  EXPECT_EQ(error.code, ErrorCode::kInvalidArgument);
}

TEST_F(ShortReads, WaitForWhatStillUsesTheMemory) {
  const auto engine = engine_at_rest();
  const Bytes old = random_bytes(tuning::kShortReadBytes, 2);
  Memory memory(*device_, old.size());
  for (int round = 0; round < 10; ++round) {
    set_delay_us(200);
    memory.fill(old);
    set_delay_us(20000);
    const auto used = memory.read_later();
    const auto group = read_into(memory, files_, old.size());
    group->edit().before = {used};
    engine->run(group);
    ASSERT_TRUE(used->done()) << "the copy did not wait";
    ASSERT_TRUE(same(memory.result(), old)) << "the earlier work on the memory found it changed";
    set_delay_us(200);
    ASSERT_TRUE(same(memory.content(), {content_.begin(), content_.end() - 1}));
  }
}

TEST_F(ShortReads, OfManyCallersAtOnceAreAllRight) {
  const auto engine = engine_at_rest();
  constexpr uint64_t kBytes = 50'000;
  set_delay_us(500);
  std::vector<std::jthread> callers;
  for (uint64_t caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      Memory memory(*device_, kBytes);
      for (uint64_t round = 0; round < 50; ++round) {
        const uint64_t offset = 1000 * caller + 7777 * round;
        const auto group = read_into(memory, files_, kBytes);
        group->edit().transfers.front().offset = offset;
        engine->run(group);
        const auto begin = content_.begin() + static_cast<ptrdiff_t>(offset);
        ASSERT_TRUE(same(memory.content(), {begin, begin + kBytes})) << "caller " << caller << ", round " << round;
      }
    });
  }
}

TEST_F(ShortReads, LeaveTheContextOfTheirCallerAsItWas) {
  const auto second = test_device(1);
  if (second == nullptr) GTEST_SKIP() << "one GPU";
  const auto engine = engine_at_rest();
  Memory memory(*device_, content_.size());
  std::jthread([&] {
    const CudaApi& api = CudaApi::get();
    CudaApi::Context found = nullptr, left = nullptr;
    if (!real_cuda()) {
      engine->run(read_into(memory, files_, 4096));
      EXPECT_EQ(FAKE(cuda, fake_cuda_has_context)(), 0);
    }
    second->bind_thread();
    ASSERT_EQ(api.context_pop(&found), CudaApi::kSuccess);
    ASSERT_EQ(api.context_push(found), CudaApi::kSuccess);
    engine->run(read_into(memory, files_, 8192));
    ASSERT_EQ(api.context_pop(&left), CudaApi::kSuccess);
    EXPECT_EQ(left, found);
  }).join();
  Bytes got = memory.content();
  got.resize(8192);
  ASSERT_TRUE(same(got, {content_.begin(), content_.begin() + 8192}));
}

TEST_F(ShortReads, AreEndedWithTheEngineThatOnlyTheirCallerHasStill) {
  Memory memory(*device_, content_.size());
  std::atomic<bool> begun{false};
  set_delay_us(100'000);
  std::jthread caller([&, engine = make_engine(kSetting)]() mutable {
    begun = true;
    engine->run(read_into(memory, files_, tuning::kShortReadBytes));
    engine.reset();
  });
  while (!begun) std::this_thread::yield();
  engines_.clear();
  caller.join();
  set_delay_us(200);
  Bytes got = memory.content();
  got.resize(tuning::kShortReadBytes);
  ASSERT_TRUE(same(got, {content_.begin(), content_.end() - 1}));
}

TEST_F(ShortReads, HaveStagingMemoryThatTheEngineStates) {
  const auto engine = engine_at_rest();
  const uint64_t of_workers = 2 * ((1 << 20) + Staging::taken_at_most(kSetting.staging_bytes));
  EXPECT_EQ(engine->bounce_bytes() - of_workers, Staging::most_bytes(tuning::kShortReadBytes));
}

class ShortReadErrors : public ShortReads {
 protected:
  static constexpr int kOutOfMemory = 2, kLaunchFailed = 719;
  void SetUp() override {
    SKIP_WITH_REAL_CUDA();
    ShortReads::SetUp();
  }
};

TEST_F(ShortReadErrors, ACopyThatFailsIsTheCallersErrorAndTheNextReadIsRight) {
  Memory memory(*device_, 4096);
  const auto engine = engine_at_rest();
  for (const char* call : {"cuMemcpyHtoDAsync", "cuEventRecord", "cuEventQuery"}) {
    SCOPED_TRACE(call);
    for (int round = 0; round < 20; ++round) {  // more than fit if each leaked staging memory
      FAKE(cuda, fake_cuda_fail_next)(call, kLaunchFailed);
      const Error error = error_of([&] { engine->run(read_into(memory, files_, 4096)); });
      EXPECT_EQ(error.code, ErrorCode::kDevice);
      EXPECT_NE(error.message.find("CUDA_ERROR_LAUNCH_FAILED"), std::string::npos) << error.message;
    }
    memory.fill(Bytes(4096, kUntouched));
    engine->run(read_into(memory, files_, 4096));
    ASSERT_TRUE(same(memory.content(), {content_.begin(), content_.begin() + 4096}));
  }
}

TEST_F(ShortReadErrors, NoCopyComesBehindAnError) {
  const auto engine = engine_at_rest();
  Memory memory(*device_, 4096);
  for (int round = 0; round < 10; ++round) {
    set_delay_us(20000);
    FAKE(cuda, fake_cuda_fail_next)("cuEventQuery", kLaunchFailed);
    error_of([&] { engine->run(read_into(memory, files_, 4096)); });
    set_delay_us(0);
    const Bytes mine = random_bytes(4096, 5);
    memory.fill(mine);
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    ASSERT_TRUE(same(memory.content(), mine)) << "a copy came late, in round " << round;
  }
}

TEST_F(ShortReadErrors, WithoutMemoryOrAStreamOfItsOwnTheWorkersDoIt) {
  for (const char* call : {"cuMemHostRegister", "cuStreamCreate"}) {
    SCOPED_TRACE(call);
    Memory memory(*device_, 4096);
    const auto engine = engine_at_rest();
    FAKE(cuda, fake_cuda_fail_next)(call, kOutOfMemory);
    engine->begin_spans(1000);
    engine->run(read_into(memory, files_, 4096));
    const Served by = served(*engine);
    EXPECT_EQ(by.by_workers, 4096u);
    EXPECT_EQ(by.by_guest, 0u);
    ASSERT_TRUE(same(memory.content(), {content_.begin(), content_.begin() + 4096}));
  }
}

TEST_F(ShortReadErrors, ADeviceLostUnderTheCopyIsTheCallersErrorAndNoHang) {
  Memory memory(*device_, 4096);
  const auto engine = engine_at_rest();
  engine->run(read_into(memory, files_, 4096));
  const auto asked = [] { return FAKE(cuda, fake_cuda_calls)("cuMemcpyHtoDAsync"); };
  for (int round = 0; round < 3; ++round) {
    FAKE(cuda, fake_cuda_keep_busy)(0, 200'000);
    const auto group = read_into(memory, files_, 4096);
    group->edit().before = {device_->foreign_stream(0)->record()};
    std::jthread loses([&, before = asked()] {
      while (asked() == before) std::this_thread::yield();
      FAKE(cuda, fake_cuda_break)(700);
    });
    const Error error = error_of([&] { engine->run(group); });
    EXPECT_EQ(error.code, ErrorCode::kDevice);
    loses.join();
    error_of([&] { engine->run(read_into(memory, files_, 4096)); });
    FAKE(cuda, fake_cuda_break)(0);
    engine->run(read_into(memory, files_, 4096));  // after the copy in flight, which a lost device would not do
    ASSERT_TRUE(same(memory.content(), {content_.begin(), content_.begin() + 4096}));
  }
}

}  // namespace
}  // namespace gdsdata::testing
