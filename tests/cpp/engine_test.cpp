#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstring>
#include <deque>
#include <fstream>
#include <latch>
#include <set>
#include <thread>

#include "backend/page_cache.h"
#include "base/crc32.h"
#include "engine/endings.h"
#include "engine/pending.h"
#include "engine/prefetcher.h"
#include "engine/ring.h"
#include "engine/whole.h"
#include "testing.h"

namespace gdsdata::testing {
namespace {

std::shared_ptr<Engine> make_engine(DirectMode direct = DirectMode::kAuto, const std::string& faults = "",
                                    size_t workers = 2) {
  EngineOptions options;
  options.workers = workers;
  options.segment_bytes = 65536;
  options.io.request_bytes = 65536;
  options.io.bounce_bytes = 1 << 20;
  options.io.queue_depth = 16;
  options.io.direct = direct;
  options.io.faults = faults;
  return std::make_shared<Engine>(options, host_device());
}

size_t open_rings() {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    count += std::filesystem::read_symlink(entry.path(), gone).string().find("io_uring") != std::string::npos ? 1 : 0;
  }
  return count;
}

TEST(Engine, PrepareOpensARingBeforeTheFirstRequest) {
  const size_t before = open_rings();
  const auto engine = make_engine(DirectMode::kAuto, "", /*workers=*/1);
  if (engine->selection().name != "uring") GTEST_SKIP() << "no io_uring";
  EXPECT_EQ(open_rings(), before) << "a warm page cache needs none";
  engine->prepare();
  for (int tries = 0; open_rings() == before && tries < 5000; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(open_rings(), before + 1);
}

TEST(Ring, AgreesWithAModelOverRandomSteps) {
  std::mt19937_64 random(6);
  for (size_t slots = 1; slots <= 5; ++slots) {
    Ring ring(slots);
    std::vector<Ring::State> model(slots, Ring::State::kFree);
    std::deque<size_t> order;
    for (int step = 0; step < 5000; ++step) {
      const size_t slot = random() % slots;
      switch (random() % 4) {
        case 0: {
          const bool has_free = std::count(model.begin(), model.end(), Ring::State::kFree) > 0;
          const auto acquired = ring.acquire();
          ASSERT_EQ(acquired.has_value(), has_free);
          if (acquired) {
            ASSERT_EQ(model[*acquired], Ring::State::kFree) << "a slot was given twice";
            model[*acquired] = Ring::State::kFilling;
            order.push_back(*acquired);
          }
          break;
        }
        case 1:
          if (model[slot] != Ring::State::kFilling) {
            ASSERT_THROW(ring.ready(slot), std::logic_error);
          } else {
            ring.ready(slot);
            model[slot] = Ring::State::kReady;
          }
          break;
        case 2:
          ASSERT_EQ(ring.head_ready(), !order.empty() && model[order.front()] == Ring::State::kReady);
          if (ring.head_ready()) {
            ASSERT_EQ(ring.take(), order.front());
            model[order.front()] = Ring::State::kLeased;
            order.pop_front();
          }
          break;
        default:
          if (model[slot] != Ring::State::kLeased) {
            ASSERT_THROW(ring.release(slot), std::logic_error);
          } else {
            ring.release(slot);
            model[slot] = Ring::State::kFree;
          }
      }
      for (size_t i = 0; i < slots; ++i) ASSERT_EQ(ring.state(i), model[i]);
      for (const auto state : {Ring::State::kFree, Ring::State::kFilling, Ring::State::kReady, Ring::State::kLeased}) {
        ASSERT_EQ(ring.count(state), static_cast<size_t>(std::count(model.begin(), model.end(), state)));
      }
    }
  }
}

TEST(LatencyHistogram, PlacesEveryDurationWithinAnEighth) {
  for (int64_t ns = 8; ns < 10'000'000'000; ns += 1 + ns / 50) {
    const double middle = LatencyHistogram::bucket_ns(LatencyHistogram::bucket_of(ns));
    ASSERT_NEAR(middle / static_cast<double>(ns), 1.0, 0.125) << ns;
  }
}

class EngineOverFaults : public ::testing::TestWithParam<std::tuple<DirectMode, std::string>> {};

TEST_P(EngineOverFaults, MovesManyGroupsAtOnceWithoutMixingThem) {
  const auto [direct, faults] = GetParam();
  TemporaryFolder folder;
  const Bytes a = random_bytes(3'000'001, 1), b = random_bytes(700, 2);
  const auto files = table_of({folder.write("a", a), folder.write("b", b)});
  const auto engine = make_engine(direct, faults);
  std::mt19937_64 random(7);
  for (int round = 0; round < 4; ++round) {
    if (round % 2 == 1) drop_from_page_cache(files->path(0));
    struct Job {
      std::shared_ptr<Group> group = std::make_shared<Group>();
      std::vector<Bytes> memory;
    };
    std::vector<Job> jobs(8);
    std::atomic<size_t> ended{0};
    for (Job& job : jobs) {
      job.group->edit().files = files;
      job.group->edit().checksum = round < 2 ? Checksum::kCrc32 : Checksum::kNone;
      for (int i = 0; i < 30; ++i) {
        const uint32_t file = random() % 5 == 0 ? 1 : 0;
        const uint64_t size = file == 0 ? a.size() : b.size();
        const uint64_t offset = random() % size;
        const uint64_t limit = random() % 4 == 0 ? 500000 : 3000;
        job.memory.emplace_back(1 + random() % std::min(size - offset, limit));
        job.group->edit().transfers.push_back({file, offset, job.memory.back().size(), nullptr});
      }
      for (int i = 0; i < 30; ++i) job.group->edit().transfers[i].memory = job.memory[i].data();
      job.group->edit().on_done = [&] { ++ended; };
    }
    for (Job& job : jobs) engine->submit(job.group);
    while (ended != jobs.size()) engine->help() ? void() : std::this_thread::yield();
    for (Job& job : jobs) {
      ASSERT_FALSE(job.group->result().error) << job.group->result().error->message;
      uint64_t counted = 0, asked = 0;
      for (size_t i = 0; i < kRouteCount; ++i) counted += job.group->result().bytes.bytes[i];
      for (size_t i = 0; i < job.memory.size(); ++i) {
        const Transfer& transfer = job.group->request().transfers[i];
        asked += transfer.length;
        const Bytes& content = transfer.file == 0 ? a : b;
        ASSERT_EQ(std::memcmp(job.memory[i].data(), content.data() + transfer.offset, transfer.length), 0);
        if (round < 2) {
          ASSERT_EQ(job.group->checksums()[i], crc32(job.memory[i].data(), transfer.length));
        }
      }
      ASSERT_EQ(counted, asked) << "every byte is counted once, by the route that served it";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, EngineOverFaults,
                         ::testing::Combine(::testing::Values(DirectMode::kAuto, DirectMode::kAlways,
                                                              DirectMode::kNever),
                                            ::testing::Values("", "seed=3,shorten=0.3,interrupt=0.2",
                                                              "seed=3,late=0.2,late_ms=1,reorder=0.5")));

TEST(Engine, ServesAWarmFileFromThePageCacheAndAColdOneFromTheDisk) {
  TemporaryFolder folder;
  const Bytes content = random_bytes(4 << 20, 1);
  const std::string path = folder.write("a", content);
  const auto engine = make_engine();
  Bytes memory(content.size());
  const auto read = [&](uint64_t length, uint64_t records) {
    auto group = std::make_shared<Group>();
    group->edit().files = table_of({path});
    for (uint64_t i = 0; i < records; ++i)
      group->edit().transfers.push_back({0, i * length, length, memory.data() + i * length});
    engine->run(group);
    EXPECT_EQ(std::memcmp(memory.data(), content.data(), length * records), 0);
    return group->result().bytes;
  };
  EXPECT_EQ(read(content.size(), 1)[Route::kPageCache], content.size());
  EXPECT_EQ(read(1000, 100)[Route::kPageCache], 100000u);
  drop_from_page_cache(path);
  RouteBytes cold = read(1000, 100);
  EXPECT_EQ(cold[Route::kDirect], 100000u) << "page cache " << cold[Route::kPageCache];
  EXPECT_EQ(read(content.size(), 1)[Route::kDirect], content.size());
}

TEST(Engine, JoinsColdNeighborsIntoFewRequests) {
  TemporaryFolder folder;
  const std::string path = folder.write("a", random_bytes(4 << 20, 1));
  drop_from_page_cache(path);
  const auto engine = make_engine(DirectMode::kAlways);
  Bytes memory(64 * 1000);
  auto group = std::make_shared<Group>();
  group->edit().files = table_of({path});
  for (uint64_t i = 0; i < 64; ++i) group->edit().transfers.push_back({0, i * 1000, 1000, memory.data() + i * 1000});
  engine->run(group);
  EXPECT_EQ(engine->statistics().transfers, 64u);
  EXPECT_EQ(engine->statistics().requests, 1u);
}

TEST(Engine, CountsTheTimeThatStorageTakes) {
  TemporaryFolder folder;
  const std::string path = folder.write("a", random_bytes(1 << 20, 1));
  const auto storage_s = [&](DirectMode direct, const std::string& faults) {
    const auto engine = make_engine(direct, faults, 1);
    Bytes memory(1 << 20);
    auto group = std::make_shared<Group>();
    group->edit().files = table_of({path});
    group->edit().transfers.push_back({0, 0, memory.size(), memory.data()});
    engine->run(group);
    return engine->statistics().worker_storage_s;
  };
  EXPECT_EQ(storage_s(DirectMode::kAuto, ""), 0) << "all of it is in the page cache";
  EXPECT_GE(storage_s(DirectMode::kAlways, "late=1,late_ms=50"), 0.05);
  EXPECT_LT(storage_s(DirectMode::kAlways, "late=1,late_ms=50"), 5);
}

TEST(Engine, KeepsTheFirstErrorOfAGroupAndGoesOnWithOthers) {
  TemporaryFolder folder;
  const Bytes content = random_bytes(1 << 20, 1);
  const auto files = table_of({folder.write("a", content), folder.file("missing")});
  const auto engine = make_engine();
  Bytes memory(content.size());
  auto bad = std::make_shared<Group>();
  bad->edit().files = files;
  bad->edit().transfers = {{0, 0, 1000, memory.data()}, {1, 77, 1000, memory.data() + 1000}};
  const Error error = error_of([&] { engine->run(bad); });
  EXPECT_EQ(error.code, ErrorCode::kNotFound);
  EXPECT_EQ(error.offset, 77u);
  EXPECT_EQ(error.length, 1000u);
  bad->edit().transfers.pop_back();
  EXPECT_NO_THROW(engine->run(bad)) << "a group may be used again after an error";
}

std::shared_ptr<Group> group_of_one(const std::string& path, Bytes& memory) {
  auto group = std::make_shared<Group>();
  group->edit().files = table_of({path});
  group->edit().transfers.push_back({0, 0, memory.size(), memory.data()});
  return group;
}

// libc++, which wheels are built with, leaves a function that is moved from as it was.
TEST(Engine, HoldsNothingOfWhatItCalledAtTheEndOfAGroup) {
  TemporaryFolder folder;
  const auto engine = make_engine();
  Bytes memory(1000);
  const auto group = group_of_one(folder.write("a", memory), memory);
  auto owner = std::make_shared<int>();
  const std::weak_ptr<int> held = owner;
  group->edit().on_done = [owner = std::move(owner)] {};
  engine->submit(group);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!held.expired() && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  EXPECT_TRUE(held.expired());
}

TEST(Engine, TakesMemoryWhenItsFirstReadBeginsAndReadsTransfersInOrder) {
  constexpr uint64_t kLong = 3'000'000, kShort = 1000;  // one is cut into several segments
  TemporaryFolder folder;
  const Bytes content = random_bytes(kLong + 2 * kShort, 1);
  const std::string path = folder.write("a", content);
  const auto engine = make_engine();
  std::latch workers_may_go_on(1);
  std::vector<std::shared_ptr<Group>> keepers;
  Bytes kept(engine->options().workers);
  std::latch all_are_kept(static_cast<ptrdiff_t>(kept.size()));
  for (std::byte& byte : kept) {
    keepers.push_back(std::make_shared<Group>());
    keepers.back()->edit().files = table_of({path});
    keepers.back()->edit().transfers = {{0, 0, 1, &byte}};
    keepers.back()->edit().on_done = [&] {
      all_are_kept.count_down();
      workers_may_go_on.wait();
    };
    engine->submit(keepers.back());
  }
  all_are_kept.wait();
  for (const Conversion conversion : {Conversion::kNone, Conversion::kU16ToI64, Conversion::kF32ToBf16}) {
    Bytes memory(result_bytes(conversion, content.size()));
    std::atomic<int> taken{0};
    const auto group = std::make_shared<Group>();
    group->edit().files = table_of({path});
    group->edit().conversion = conversion;
    group->edit().transfers = {{0, kLong, kShort}, {0, 0, kLong}, {0, kLong + kShort, kShort}};
    group->edit().take_memory = [&] {
      ++taken;
      return memory.data();
    };
    Pending pending(*engine, group);
    if (conversion == Conversion::kNone) {
      EXPECT_EQ(taken, 0) << "no worker can have begun";
      workers_may_go_on.count_down();
    }
    ASSERT_TRUE(pending.wait(std::chrono::seconds(60)));
    pending.finish();
    EXPECT_EQ(taken, 1);
    Bytes stored(content.begin() + kLong, content.begin() + kLong + kShort);
    stored.insert(stored.end(), content.begin(), content.begin() + kLong);
    stored.insert(stored.end(), content.begin() + kLong + kShort, content.end());
    Bytes expected(memory.size());
    convert(conversion, expected.data(), stored.data(), stored.size());
    EXPECT_EQ(memory, expected);
  }
}

TEST(Pending, EndsWithAndWithoutAWaiter) {
  TemporaryFolder folder;
  const Bytes content = random_bytes(1 << 20, 1);
  const std::string path = folder.write("a", content);
  const auto engine = make_engine();
  Bytes first(content.size()), second(content.size());
  Pending waited(*engine, group_of_one(path, first)), looked_at(*engine, group_of_one(path, second));
  EXPECT_TRUE(waited.wait(std::chrono::seconds(60)));
  EXPECT_TRUE(waited.ended());
  EXPECT_NO_THROW(waited.finish());
  while (!looked_at.ended()) std::this_thread::yield();
  EXPECT_EQ(first, content);
  EXPECT_EQ(second, content);
  RouteBytes bytes = looked_at.group().result().bytes;
  EXPECT_EQ(bytes[Route::kPageCache], content.size());
}

TEST(Pending, IsWaitedForNoLongerThanItsCallerHasPatience) {
  TemporaryFolder folder;
  const std::string path = folder.write("a", random_bytes(1 << 20, 1));
  const auto engine = make_engine(DirectMode::kAlways, "late=1,late_ms=300");
  Bytes memory(1 << 20);
  Pending pending(*engine, group_of_one(path, memory));
  EXPECT_FALSE(pending.wait(std::chrono::milliseconds(0)));
  EXPECT_FALSE(pending.wait(std::chrono::milliseconds(20)));
  EXPECT_THROW(pending.wait(std::chrono::seconds(60), [] { throw std::runtime_error("Ctrl-C"); }), std::runtime_error);
  EXPECT_FALSE(pending.ended()) << "an exception of a poll ended it";
  EXPECT_TRUE(pending.wait(std::chrono::seconds(60)));
}

TEST(Pending, ThrowsTheErrorOfItsGroupInItsEnd) {
  TemporaryFolder folder;
  const auto engine = make_engine();
  Bytes memory(1000);
  Pending pending(*engine, group_of_one(folder.file("missing"), memory));
  EXPECT_TRUE(pending.wait(std::chrono::seconds(60)));
  EXPECT_EQ(error_of([&] { pending.finish(); }).code, ErrorCode::kNotFound);
}

TEST(Endings, ReportEachGroupOnceAndNothingWhenAllHaveEnded) {
  TemporaryFolder folder;
  const Bytes content = random_bytes(1 << 16, 1);
  const std::string path = folder.write("a", content);
  for (const char* faults : {"", "late=0.5,late_ms=20,seed=1"}) {
    const auto engine = make_engine(*faults == 0 ? DirectMode::kAuto : DirectMode::kAlways, faults);
    Endings endings(engine);
    std::vector<Bytes> memory(20, Bytes(content.size()));
    std::vector<std::unique_ptr<Pending>> pending;
    for (size_t i = 0; i < memory.size(); ++i) {
      pending.push_back(std::make_unique<Pending>(*engine, group_of_one(path, memory[i]), endings.expect(i)));
    }
    endings.close();
    std::vector<int> reported(memory.size());
    while (true) {
      const auto numbers = endings.take([] { return false; });
      if (numbers.empty()) break;
      for (const int64_t number : numbers) {
        EXPECT_TRUE(pending[number]->ended());
        ++reported[number];
      }
    }
    EXPECT_EQ(reported, std::vector<int>(memory.size(), 1));
    for (const Bytes& one : memory) EXPECT_EQ(one, content);
  }
}

TEST(Endings, TakeReturnsNothingOnceItsCallerGivesUp) {
  TemporaryFolder folder;
  const std::string path = folder.write("a", random_bytes(1 << 16, 1));
  const auto engine = make_engine(DirectMode::kAlways, "late=1,late_ms=400");
  Endings endings(engine);
  Bytes memory(1 << 16);
  Pending pending(*engine, group_of_one(path, memory), endings.expect(7));
  std::thread closing([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    endings.close();
  });
  EXPECT_TRUE(endings.take([] { return true; }).empty());
  closing.join();
  EXPECT_FALSE(pending.ended());
  EXPECT_EQ(endings.take([] { return false; }), std::vector<int64_t>{7});
  endings.expect(8);
  endings.not_begun();
  EXPECT_TRUE(endings.take([] { return false; }).empty());
}

TEST(Endings, ReportAGroupWithAWaiterOnlyIfTheWaiterDoesNotSeeItsEnd) {
  TemporaryFolder folder;
  const std::string path = folder.write("a", random_bytes(1 << 16, 1));
  const auto engine = make_engine(DirectMode::kAlways, "late=1,late_ms=50");
  Endings endings(engine);
  Bytes memory(1 << 16);
  std::vector<int64_t> reported;
  std::atomic<size_t> reported_count{0};
  std::thread reporting([&] {
    for (auto numbers = endings.take([] { return false; }); !numbers.empty();
         numbers = endings.take([] { return false; })) {
      reported.insert(reported.end(), numbers.begin(), numbers.end());
      reported_count = reported.size();
    }
  });
  for (int64_t number = 0; number < 4; ++number) {
    const bool sees_it = number % 2 == 0;
    endings.begin_waiting(number);
    Pending pending(*engine, group_of_one(path, memory), endings.expect(number));
    ASSERT_TRUE(pending.wait(std::chrono::seconds(30)));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // other work that ends with it
    endings.end_waiting(number, sees_it);
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (reported_count < static_cast<size_t>(number + 1) / 2 && std::chrono::steady_clock::now() < until) {
      std::this_thread::yield();
    }
    EXPECT_EQ(reported_count, static_cast<size_t>(number + 1) / 2) << "before another one ends";
  }
  endings.close();
  reporting.join();
  EXPECT_EQ(reported, (std::vector<int64_t>{1, 3}));
}

bool is_mapped(const std::string& path) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.ends_with(path)) return true;
  }
  return false;
}

TEST(PageCache, MapsAShortFileAtItsSecondReadIntoTheResultAndALongOneAtOnce) {
  TemporaryFolder folder;
  for (const auto into : {PageCache::Into::kResult, PageCache::Into::kStaging}) {
    for (const uint64_t size : {uint64_t{2} << 20, PageCache::kLongFileBytes}) {
      const bool is_result = into == PageCache::Into::kResult, is_long = size >= PageCache::kLongFileBytes;
      const std::string path = folder.write(std::to_string(size) + (is_result ? "r" : "s"), random_bytes(size, 1));
      const auto file = File::open_for_reading(path);
      PageCache cache{into};
      for (const bool again : {false, true}) {
        Bytes found(size);
        const std::vector<Transfer> parts{{0, 0, size / 2, found.data()},
                                          {0, size / 2, size - size / 2, found.data() + size / 2}};
        const std::vector<File*> files{file.get(), file.get()};
        std::vector<Transfer> left;
        RouteBytes bytes;
        ASSERT_FALSE(cache.serve(parts, files, Conversion::kNone, false, left, bytes));
        if (!left.empty()) GTEST_SKIP() << "the system drops pages";
        ASSERT_EQ(found, random_bytes(size, 1));
        EXPECT_EQ(is_mapped(path), is_long || (is_result && again)) << size << (is_result ? " result" : " staging");
      }
    }
  }
}

TEST(Engine, ReadsOfCallersThatHelpAtTheSameTimeAllEnd) {
  TemporaryFolder folder;
  const Bytes content = random_bytes(900'000, 4);
  const std::string path = folder.write("a", content);
  EngineOptions options;
  options.workers = 2;
  Engine engine(options, host_device());
  constexpr int kThreads = 3, kRounds = 300;
  std::barrier start(kThreads);
  std::vector<std::jthread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        Bytes found(content.size());
        Caller caller;
        caller.memory = found.data();
        start.arrive_and_wait();
        read_range(engine, path, 0, found.size(), caller);
        EXPECT_EQ(found, content);
      }
    });
  }
}

TEST(Engine, ReportsAFileTruncatedUnderItsMapping) {
  for (const uint64_t length : {1000, 300'000}) {
    TemporaryFolder folder;
    const Bytes written = random_bytes(4 << 20, 1);
    const std::string path = folder.write("a", written);
    const auto engine = make_engine();
    const auto files = table_of({path});
    Bytes memory(60 * length);
    const auto read = [&] {
      auto group = std::make_shared<Group>();
      group->edit().files = files;
      for (uint64_t i = 0; i < 60; ++i) {
        group->edit().transfers.push_back({0, i * 60'000, length, memory.data() + i * length});
      }
      engine->run(group);
    };
    for (int round = 0; round < 3; ++round) {  // from the third on, the mapping also serves long reads
      std::fill(memory.begin(), memory.end(), std::byte{0});
      read();
      for (uint64_t i = 0; i < 60; ++i) {
        ASSERT_EQ(std::memcmp(memory.data() + i * length, written.data() + i * 60'000, length), 0);
      }
    }
    std::filesystem::resize_file(path, 1'000'500);  // within a page: the bytes behind it read as zeros
    const Error error = error_of(read);
    EXPECT_EQ(error.code, ErrorCode::kCorrupt);
    EXPECT_NE(error.message.find("ends at 1000500 bytes"), std::string::npos) << error.message;
  }
}

TEST(Engine, EndsEveryGroupBeforeItsOwnEnd) {
  TemporaryFolder folder;
  const auto files = table_of({folder.write("a", random_bytes(1 << 20, 1))});
  Bytes memory(1 << 20);
  std::atomic<int> ended{0};
  {
    const auto engine = make_engine(DirectMode::kAlways, "late=1,late_ms=5");
    for (int i = 0; i < 5; ++i) {  // within half the time that an engine waits for its workers
      auto group = std::make_shared<Group>();
      group->edit().files = files;
      group->edit().transfers = {{0, 0, memory.size(), memory.data()}};
      group->edit().on_done = [&] { ++ended; };
      engine->submit(group);
    }
  }
  EXPECT_EQ(ended, 5);
}

TEST(Engine, RefusesToWorkInAForkedChildAndDoesNotHangThere) {
  const auto engine = make_engine();
  const pid_t child = ::fork();
  if (child == 0) {
    auto group = std::make_shared<Group>();
    try {
      engine->submit(group);
    } catch (const Failure& failure) {
      const_cast<std::shared_ptr<Engine>&>(engine).reset();
      ::_exit(failure.error().code == ErrorCode::kClosed ? 0 : 1);
    }
    ::_exit(2);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(Engine, RefusesOptionsThatMakeNoSense) {
  EngineOptions options;
  options.io.bounce_bytes = options.io.request_bytes;
  const Error error = error_of([&] { Engine(options, host_device()); });
  EXPECT_EQ(error.code, ErrorCode::kInvalidArgument);
  EXPECT_NE(error.message.find("bounce_bytes"), std::string::npos);
}

TEST(Whole, WritesAtomicallyAndLeavesTheOldFileWhenItFails) {
  TemporaryFolder folder;
  Bytes old_content = random_bytes(10000, 1), new_content = random_bytes(300001, 2);
  const std::string path = folder.write("a", old_content);
  const auto failing = make_engine(DirectMode::kAuto, "fail_at=0");
  error_of(
      [&] { write_whole(*failing, path, new_content.size(), {new_content.data(), {}, Priority::kBackground, {}}); });
  EXPECT_EQ(read_file(path), old_content);
  EXPECT_EQ(folder.entries(), 1u) << "a temporary was left";
  const auto engine = make_engine();
  write_whole(*engine, path, new_content.size(), {new_content.data(), {}, Priority::kBackground, {}});
  EXPECT_EQ(read_file(path), new_content);
  EXPECT_EQ(folder.entries(), 1u);
}

TEST(BufferPool, TakesTheBufferThatWasReleasedLastAndAllocatesOnlyForReservations) {
  constexpr size_t kKept = 6;
  const auto pool = std::make_shared<BufferPool>(host_device(), 4096, kKept);
  std::mt19937_64 random(3);
  std::deque<BufferPool::Reservation> reserved;
  std::vector<std::shared_ptr<DeviceBuffer>> taken;
  std::vector<std::byte*> released;  // last released last
  std::set<std::byte*> known;
  for (int step = 0; step < 5000; ++step) {
    const size_t in_use = reserved.size() + taken.size();
    if (random() % 2 == 0 && in_use < kKept) {
      reserved.emplace_back(*pool);
    } else if (random() % 2 == 0 && !reserved.empty()) {
      taken.push_back(reserved.back().take());
      reserved.pop_back();
      std::byte* memory = taken.back()->data();
      ASSERT_TRUE(released.empty() || released.back() == memory);
      if (released.empty()) {
        EXPECT_TRUE(known.insert(memory).second) << "it is in use";
      } else {
        released.pop_back();
      }
      *memory = std::byte{1};
    } else if (random() % 2 == 0 && !reserved.empty()) {
      reserved.pop_back();  // nobody needs it
    } else if (!taken.empty()) {
      const size_t one = random() % taken.size();
      released.push_back(taken[one]->data());
      pool->handed_over();
      taken.erase(taken.begin() + static_cast<ptrdiff_t>(one));
    }
    ASSERT_LE(known.size(), kKept);
  }
  EXPECT_GT(known.size(), 1u);
}

class PrefetcherTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kSample = 1000;
  static constexpr size_t kSamples = 2000;
  TemporaryFolder folder_;
  Bytes content_ = random_bytes(kSample * kSamples, 9);
  std::string path_ = folder_.write("a", content_);
  std::shared_ptr<BufferPool> pool_;

  std::unique_ptr<Prefetcher> make(std::shared_ptr<Engine> engine, size_t batch, size_t slots = 4,
                                   std::chrono::milliseconds stall = std::chrono::milliseconds(60000)) {
    PrefetchOptions options;
    options.slots = slots;
    options.sample_bytes = kSample;
    options.batch_samples = batch;
    options.stall_timeout = stall;
    pool_ = std::make_shared<BufferPool>(engine->device(), kSample * batch + Prefetcher::kPlacementBytes, slots + 2);
    return std::make_unique<Prefetcher>(std::move(engine), table_of({path_}), pool_, options);
  }
  void plan(Prefetcher& prefetcher, const std::vector<int64_t>& samples, const std::vector<int64_t>& sizes) {
    std::vector<int64_t> offsets;
    for (const int64_t sample : samples) offsets.push_back(sample * static_cast<int64_t>(kSample));
    prefetcher.plan(std::vector<int32_t>(samples.size(), 0), offsets, sizes);
  }
  void expect(const Prefetcher::Batch& batch, const int64_t* samples) {
    for (size_t i = 0; i < batch.samples; ++i) {
      ASSERT_EQ(std::memcmp(batch.buffer->data() + i * kSample, content_.data() + samples[i] * kSample, kSample), 0);
    }
  }
};

TEST_F(PrefetcherTest, GivesBatchesInOrderHoweverTheirReadsEnd) {
  for (const std::string faults : {"", "seed=1,late=0.5,late_ms=2,reorder=0.5"}) {
    const auto prefetcher = make(make_engine(faults.empty() ? DirectMode::kAuto : DirectMode::kAlways, faults), 7);
    std::mt19937_64 random(8);
    std::vector<int64_t> samples(1000);
    for (auto& sample : samples) sample = static_cast<int64_t>(random() % kSamples);
    std::vector<int64_t> sizes(142, 7);
    sizes.push_back(6);
    plan(*prefetcher, samples, sizes);
    size_t taken = 0;
    while (auto batch = prefetcher->next({})) {
      expect(*batch, samples.data() + taken);
      taken += batch->samples;
    }
    EXPECT_EQ(taken, samples.size());
  }
}

TEST_F(PrefetcherTest, BatchesAreTheConsumersForAsLongAsItKeepsThem) {
  auto prefetcher = make(make_engine(), 10, 2);
  std::vector<int64_t> samples(500);
  for (size_t i = 0; i < samples.size(); ++i) samples[i] = static_cast<int64_t>((i * 37) % kSamples);
  plan(*prefetcher, samples, std::vector<int64_t>(50, 10));
  std::vector<Prefetcher::Batch> kept;
  while (auto batch = prefetcher->next({})) kept.push_back(std::move(*batch));
  prefetcher.reset();
  ASSERT_EQ(kept.size(), 50u);
  for (size_t i = 0; i < kept.size(); ++i) expect(kept[i], samples.data() + i * 10);
}

TEST_F(PrefetcherTest, UsesTheSameFewBuffersWhenTheConsumerDropsBatches) {
  const auto prefetcher = make(make_engine(), 10, 3);
  plan(*prefetcher, std::vector<int64_t>(2000, 5), std::vector<int64_t>(200, 10));
  std::set<std::byte*> buffers;
  while (auto batch = prefetcher->next({})) buffers.insert(batch->buffer->data());
  EXPECT_LE(buffers.size(), 3 + 2u);
}

TEST_F(PrefetcherTest, FindsItsBuffersAgainInTheNextEpoch) {
  const auto engine = make_engine();
  std::set<std::byte*> buffers;
  auto prefetcher = make(engine, 10, 3);
  const auto pool = pool_;
  for (int epoch = 0; epoch < 20; ++epoch) {
    plan(*prefetcher, std::vector<int64_t>(100, 5), std::vector<int64_t>(10, 10));
    while (auto batch = prefetcher->next({})) buffers.insert(batch->buffer->data());
    PrefetchOptions options;
    options.slots = 3;
    options.sample_bytes = kSample;
    options.batch_samples = 10;
    prefetcher->close();
    prefetcher = std::make_unique<Prefetcher>(engine, table_of({path_}), pool, options);
  }
  EXPECT_LE(buffers.size(), 3 + 2u);
}

TEST_F(PrefetcherTest, RaisesAnErrorAtTheBatchItBelongsToAndGoesOnBehindIt) {
  const auto prefetcher = make(make_engine(), 1, 4);
  std::vector<int64_t> samples = {0, 1, static_cast<int64_t>(kSamples), 3, 4};
  plan(*prefetcher, samples, std::vector<int64_t>(5, 1));
  expect(*prefetcher->next({}), &samples[0]);
  expect(*prefetcher->next({}), &samples[1]);
  const Error error = error_of([&] { prefetcher->next({}); });
  EXPECT_EQ(error.code, ErrorCode::kCorrupt);
  EXPECT_EQ(error.offset, kSamples * kSample);
  expect(*prefetcher->next({}), &samples[3]);
  expect(*prefetcher->next({}), &samples[4]);
  EXPECT_FALSE(prefetcher->next({}));
}

TEST_F(PrefetcherTest, ClosesAtAnyMomentWithoutHanging) {
  const auto engine = make_engine(DirectMode::kAlways, "seed=2,late=0.5,late_ms=3");
  std::mt19937_64 random(10);
  for (int round = 0; round < 100; ++round) {
    const auto prefetcher = make(engine, 20);
    plan(*prefetcher, std::vector<int64_t>(400, 3), std::vector<int64_t>(20, 20));
    for (size_t i = random() % 5; i > 0; --i) prefetcher->next({});
    if (round % 2 == 0) {
      prefetcher->close();
      EXPECT_EQ(error_of([&] { prefetcher->next({}); }).code, ErrorCode::kClosed);
    }
  }
}

TEST_F(PrefetcherTest, RaisesAStallWhenNothingEnds) {
  const auto engine = make_engine(DirectMode::kAlways, "late=1,late_ms=600");
  const auto prefetcher = make(engine, 1, 1, std::chrono::milliseconds(100));
  plan(*prefetcher, {0}, {1});
  const Error error = error_of([&] { prefetcher->next({}); });
  EXPECT_EQ(error.code, ErrorCode::kStalled);
  EXPECT_NE(error.message.find(path_), std::string::npos);
}

TEST_F(PrefetcherTest, AnInterruptedWaitLosesNoBatch) {
  const auto prefetcher = make(make_engine(DirectMode::kAlways, "late=1,late_ms=200"), 1);
  const std::vector<int64_t> samples = {11, 12};
  plan(*prefetcher, samples, {1, 1});
  struct Interrupt {};
  EXPECT_THROW(prefetcher->next([] { throw Interrupt(); }), Interrupt);
  expect(*prefetcher->next({}), &samples[0]);
  expect(*prefetcher->next({}), &samples[1]);
}

// A ring of four slots over long segments. The batches are of 1 to kMost samples of 1 MiB.
class LongSegments : public ::testing::Test {
 protected:
  static constexpr uint64_t kRecord = 1 << 20, kSegment = 8 * kRecord;
  static constexpr int64_t kMost = 64;

  LongSegments() {
    EngineOptions options;
    options.workers = 4;
    options.segment_bytes = kSegment;
    engine_ = std::make_shared<Engine>(options, host_device());
    PrefetchOptions of_batches;
    of_batches.slots = 4;
    of_batches.sample_bytes = kRecord;
    of_batches.batch_samples = kMost;
    const auto pool = std::make_shared<BufferPool>(engine_->device(), kRecord * kMost + Prefetcher::kPlacementBytes,
                                                   of_batches.slots + 2);
    const std::string path = folder_.write("a", Bytes(kRecord * kMost));
    prefetcher_ = std::make_unique<Prefetcher>(engine_, table_of({path}), pool, of_batches);
  }
  // Plans batches, and returns each worker's spans when all are ready.
  std::vector<Spans> read(const std::vector<int64_t>& sizes, size_t ready) {
    std::vector<int64_t> offsets;
    for (const int64_t size : sizes) {
      for (int64_t i = 0; i < size; ++i) offsets.push_back(i * int64_t{kRecord});
    }
    engine_->begin_spans(1000);
    prefetcher_->plan(std::vector<int32_t>(offsets.size()), offsets, sizes);
    while (prefetcher_->statistics().ready < ready) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return engine_->end_spans();
  }
  // How many workers read a long batch while three of these sizes are ready.
  size_t workers_behind(const std::vector<int64_t>& sizes) {
    read({1, sizes[0], sizes[1], sizes[2]}, 4);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // all workers sleep
    prefetcher_->next({});
    const std::vector<Spans> spans = read({kMost}, 4);
    return static_cast<size_t>(std::count_if(spans.begin(), spans.end(), [](auto& of) { return !of.spans.empty(); }));
  }

  TemporaryFolder folder_;
  std::shared_ptr<Engine> engine_;
  std::unique_ptr<Prefetcher> prefetcher_;
};

TEST_F(LongSegments, AreReadByOneWorkerWhileHalfOfTheRingIsReady) { EXPECT_EQ(workers_behind({64, 64, 1}), 1u); }

TEST_F(LongSegments, AreReadByAllWorkersWhileReadyBatchesAreShort) { EXPECT_GT(workers_behind({1, 1, 1}), 1u); }

TEST_F(PrefetcherTest, RefusesAPlanThatDoesNotFit) {
  const auto prefetcher = make(make_engine(), 2);
  EXPECT_EQ(error_of([&] { plan(*prefetcher, {0, 1, 2}, {3}); }).code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(error_of([&] { plan(*prefetcher, {0, 1, 2}, {2}); }).code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(error_of([&] {
              prefetcher->plan(std::vector<int32_t>{5}, std::vector<int64_t>{0}, std::vector<int64_t>{1});
            }).code,
            ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace gdsdata::testing
