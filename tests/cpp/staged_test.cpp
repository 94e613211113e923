// The engine with a device that the processor cannot write.
#include "staged.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <memory>
#include <numeric>
#include <random>
#include <regex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "base/crc32.h"
#include "base/extent_math.h"
#include "engine/whole.h"

namespace gdsdata::testing {
namespace {

size_t element_bytes(Conversion conversion) { return stored_element_bytes(conversion); }

// A group of reads into random places, some of them adjacent, and the expected memory.
struct Reads {
  std::shared_ptr<Group> group = std::make_shared<Group>();
  std::unique_ptr<Memory> memory;
  Bytes expected;

  Reads(Device& device, std::mt19937_64& random, std::shared_ptr<FileTable> files, const std::vector<Bytes>& contents,
        Conversion conversion, size_t count) {
    const uint64_t unit = element_bytes(conversion);
    group->edit().files = std::move(files);
    group->edit().conversion = conversion;
    const bool scattered = random() % 3 == 0;
    const uint64_t longest = random() % 3 == 0 ? 200000 : 3000;
    uint64_t end = random() % 5000;
    for (size_t i = 0; i < count; ++i) {
      Transfer next;
      next.file = static_cast<uint32_t>(random() % contents.size());
      next.offset = random() % contents[next.file].size();
      if (!group->request().transfers.empty() && random() % 2 == 0) {  // continues in the file
        const Transfer& last = group->request().transfers.back();
        next.file = last.file;
        next.offset = last.offset + last.length;
      }
      const uint64_t rest = contents[next.file].size() - next.offset;
      next.length = 1 + random() % longest;
      if (random() % 4 == 0) next.length = align_up(next.length, 4096);
      next.length = std::min(next.length, rest) / unit * unit;
      if (next.length == 0) continue;
      if (scattered || random() % 10 == 0) end += random() % 300;
      next.memory = reinterpret_cast<std::byte*>(end);
      end += next.length;
      group->edit().transfers.push_back(next);
    }
    memory = std::make_unique<Memory>(device, end + 4096);
    expected.assign(end + 4096, kUntouched);
    for (Transfer& transfer : group->edit().transfers) {
      std::byte* target = expected.data() + reinterpret_cast<uint64_t>(transfer.memory);
      convert(conversion, target, contents[transfer.file].data() + transfer.offset, transfer.length);
      transfer.memory = memory->data() + reinterpret_cast<uint64_t>(transfer.memory);
    }
    if (scattered) std::shuffle(group->edit().transfers.begin(), group->edit().transfers.end(), random);
  }

  uint64_t bytes() const {
    return std::accumulate(group->request().transfers.begin(), group->request().transfers.end(), uint64_t{0},
                           [](uint64_t sum, const Transfer& transfer) { return sum + transfer.length; });
  }
};

class StagedOverFaults : public Staged,
                         public ::testing::WithParamInterface<std::tuple<std::string, DirectMode, std::string>> {
 protected:
  Setting setting() const {
    const auto& [backend, direct, faults] = GetParam();
    return {direct, faults, backend, 2, 1 << 20};
  }
};

TEST_P(StagedOverFaults, ReadsManyGroupsAtOnceAndTouchesNothingBeside) {
  const TemporaryFolder folder;
  const std::vector<Bytes> contents = {random_bytes(3'000'001, 1), random_bytes(700, 2), random_bytes(400'000, 3)};
  std::vector<std::string> paths;
  for (size_t i = 0; i < contents.size(); ++i) paths.push_back(folder.write(std::to_string(i), contents[i]));
  const auto files = table_of(paths);
  const auto engine = make_engine(setting());
  std::mt19937_64 random(7);
  for (int round = 0; round < 4; ++round) {
    if (round % 2 == 1) std::for_each(paths.begin(), paths.end(), drop_from_page_cache);
    std::vector<Reads> jobs;
    for (int i = 0; i < 8; ++i) jobs.emplace_back(*device_, random, files, contents, Conversion::kNone, 30);
    Ended ended;
    for (Reads& job : jobs) {
      job.group->edit().on_done = ended.one();
      job.group->edit().checksum = round < 2 ? Checksum::kCrc32 : Checksum::kNone;
    }
    for (Reads& job : jobs) engine->submit(job.group);
    ASSERT_TRUE(ended.wait_for(jobs.size()));
    for (Reads& job : jobs) {
      ASSERT_FALSE(job.group->result().error) << job.group->result().error->message;
      for (const auto& copy : job.group->result().copies) copy->wait();
      ASSERT_TRUE(same(job.memory->content(), job.expected)) << "round " << round;
      for (size_t i = 0; round < 2 && i < job.group->request().transfers.size(); ++i) {
        const Transfer& transfer = job.group->request().transfers[i];
        ASSERT_EQ(job.group->checksums()[i], crc32(contents[transfer.file].data() + transfer.offset, transfer.length));
      }
      ASSERT_EQ(counted(job.group->result().bytes), job.bytes())
          << "every byte is counted once, by the route that served it";
    }
  }
}

TEST_P(StagedOverFaults, SwapsBytesOnTheWay) {
  const TemporaryFolder folder;
  const std::vector<Bytes> contents = {random_bytes(2'000'003, 4), random_bytes(701, 5)};
  const std::vector<std::string> paths = {folder.write("0", contents[0]), folder.write("1", contents[1])};
  const auto files = table_of(paths);
  const auto engine = make_engine(setting());
  std::mt19937_64 random(8);
  for (const Conversion conversion : {Conversion::kSwap2, Conversion::kSwap4, Conversion::kSwap8}) {
    for (const bool cold : {false, true}) {
      if (cold) std::for_each(paths.begin(), paths.end(), drop_from_page_cache);
      Reads job(*device_, random, files, contents, conversion, 30);
      ASSERT_TRUE(run(engine, job.group));
      ASSERT_FALSE(job.group->result().error) << job.group->result().error->message;
      ASSERT_TRUE(same(job.memory->content(), job.expected)) << "elements of " << element_bytes(conversion) << " bytes";
    }
  }
}

TEST_P(StagedOverFaults, WritesWhatTheDeviceHoldsBehindTheEventBefore) {
  const TemporaryFolder folder;
  const auto engine = make_engine(setting());
  set_delay_us(3000);
  std::mt19937_64 random(9);
  for (const uint64_t length : {0, 1, 511, 4096, 65537, 700'001}) {
    SCOPED_TRACE(std::to_string(length) + " bytes");
    const Bytes content = random_bytes(length, length + 1);
    const uint64_t askew = random() % 4096;
    Memory memory(*device_, askew + length + 1);
    Bytes filling(askew + length + 1, std::byte{0x11});
    std::copy(content.begin(), content.end(), filling.begin() + static_cast<ptrdiff_t>(askew));
    const auto write = [&](auto call) {
      memory.fill(Bytes(memory.size(), std::byte{0x22}));  // a write that does not wait would find this
      Caller caller;
      caller.memory = memory.data() + askew;
      const auto filled = memory.fill_later(filling);
      caller.before = {filled};
      call(caller);
      filled->wait();  // an empty write waits for nothing
    };
    const std::string whole = folder.file("whole");
    write([&](const Caller& caller) { write_whole(*engine, whole, length, caller); });
    ASSERT_TRUE(same(read_file(whole), content));
    drop_from_page_cache(whole);
    ASSERT_TRUE(same(read_file(whole), content)) << "on the disk";
    // Writes to the middle of a file, which keeps the rest.
    const uint64_t offset = random() % 10000;
    Bytes expected = random_bytes(1'000'000, 6);
    const std::string part = folder.write("part", expected);
    std::copy(content.begin(), content.end(), expected.begin() + static_cast<ptrdiff_t>(offset));
    write([&](const Caller& caller) { write_range(*engine, part, offset, length, caller); });
    drop_from_page_cache(part);
    ASSERT_TRUE(same(read_file(part), expected)) << "at offset " << offset;
  }
}

TEST_P(StagedOverFaults, WritesManyPartsFromAnywhereOnTheDevice) {
  const TemporaryFolder folder;
  Setting longer = setting();
  longer.segment_bytes = 3 * kSegmentBytes;  // a part is then several requests
  const auto engine = make_engine(longer);
  std::mt19937_64 random(10);
  Bytes expected = random_bytes(1'500'000, 7);
  const std::string path = folder.write("a", expected);
  const Bytes content = random_bytes(2'000'000, 8);
  Memory memory(*device_, content.size());
  auto group = std::make_shared<Group>();
  group->edit().files = std::make_shared<FileTable>(File::open_for_writing(path, /*create=*/false));
  group->edit().direction = Direction::kWrite;
  uint64_t from = 0;
  for (uint64_t offset = random() % 5000; group->request().transfers.size() < 60;) {
    const uint64_t length = 1 + random() % (random() % 4 == 0 ? 150'000 : 2000);
    if (offset + length > expected.size()) break;
    from += random() % 3 == 0 ? random() % 100 : 0;
    group->edit().transfers.push_back({0, offset, length, memory.data() + from});
    std::copy_n(content.begin() + static_cast<ptrdiff_t>(from), length,
                expected.begin() + static_cast<ptrdiff_t>(offset));
    from += length;
    offset += length + (random() % 3 == 0 ? random() % 10000 : 0);
  }
  std::shuffle(group->edit().transfers.begin(), group->edit().transfers.end(), random);
  set_delay_us(3000);
  group->edit().checksum = Checksum::kCrc32;
  group->edit().before = {memory.fill_later(content)};
  ASSERT_TRUE(run(engine, group));
  ASSERT_FALSE(group->result().error) << group->result().error->message;
  drop_from_page_cache(path);
  ASSERT_TRUE(same(read_file(path), expected));
  for (size_t i = 0; i < group->request().transfers.size(); ++i) {
    const Transfer& transfer = group->request().transfers[i];
    ASSERT_EQ(group->checksums()[i], crc32(expected.data() + transfer.offset, transfer.length)) << "transfer " << i;
  }
}

// As tensors have that were allocated one after the other.
TEST_P(StagedOverFaults, NoCopyUsesTwoAdjacentAllocations) {
  if (real_cuda()) GTEST_SKIP() << "a driver says nothing of where allocations lie";
  const TemporaryFolder folder;
  const auto engine = make_engine(setting());
  for (const uint64_t apart : {0, 4096}) {  // in the file
    for (const uint64_t each : {1000, 200'000}) {
      SCOPED_TRACE(std::to_string(each) + " bytes, " + std::to_string(apart) + " apart");
      const uint64_t whole = each % 4096 == 0 || apart == 0 ? each : each / 4096 * 4096 + 4096;
      const Bytes content = random_bytes(4 * whole, each);
      Memory memory(*device_, content.size());
      memory.fill(content);
      const std::string path = folder.write("a", Bytes(4 * (whole + apart)));
      for (const Direction direction : {Direction::kWrite, Direction::kRead}) {
        auto group = std::make_shared<Group>();
        group->edit().direction = direction;
        group->edit().files = direction == Direction::kRead
                                  ? table_of({path})
                                  : std::make_shared<FileTable>(File::open_for_writing(path, /*create=*/false));
        for (uint64_t i = 0; i < 4; ++i) {
          group->edit().transfers.push_back({0, i * (whole + apart), whole, memory.data() + i * whole});
        }
        for (const uint64_t tensor : {1, 3}) FAKE(cuda, fake_cuda_split)(memory.data() + tensor * whole);
        ASSERT_TRUE(run(engine, group));
        ASSERT_FALSE(group->result().error) << group->result().error->message;
        for (const auto& copy : group->result().copies) copy->wait();
        FAKE(cuda, fake_cuda_join)();
        ASSERT_TRUE(same(memory.content(), content));
        memory.fill(Bytes(content.size()));  // to be read
      }
    }
  }
}

TEST_P(StagedOverFaults, TheLeastStagingMemoryIsEnoughForReadsAndWritesTogether) {
  const TemporaryFolder folder;
  const std::vector<Bytes> contents = {random_bytes(1'500'001, 1)};
  const auto files = table_of({folder.write("a", contents[0])});
  Setting least = setting();
  least.staging_bytes = kLeastStagingBytes;
  const auto engine = make_engine(least);
  const Bytes source = random_bytes(600'000, 3);
  Memory memory(*device_, source.size());
  memory.fill(source);
  set_delay_us(1000);
  std::mt19937_64 random(11);
  drop_from_page_cache(files->path(0));
  std::vector<Reads> jobs;
  for (int i = 0; i < 5; ++i) jobs.emplace_back(*device_, random, files, contents, Conversion::kNone, 20);
  std::vector<std::shared_ptr<Group>> writes;
  Ended ended;
  for (int i = 0; i < 3; ++i) {
    writes.push_back(std::make_shared<Group>());
    writes[i]->edit().files =
        std::make_shared<FileTable>(File::open_for_writing(folder.file("w" + std::to_string(i)), true));
    writes[i]->edit().direction = Direction::kWrite;
    writes[i]->edit().transfers = {{0, 0, source.size(), memory.data()}};
    writes[i]->edit().on_done = ended.one();
  }
  for (Reads& job : jobs) job.group->edit().on_done = ended.one();
  for (size_t i = 0; i < jobs.size(); ++i) {
    engine->submit(jobs[i].group);
    if (i < writes.size()) engine->submit(writes[i]);
  }
  ASSERT_TRUE(ended.wait_for(jobs.size() + writes.size())) << "the workers wait for one another";
  for (Reads& job : jobs) {
    ASSERT_FALSE(job.group->result().error) << job.group->result().error->message;
    for (const auto& copy : job.group->result().copies) copy->wait();
    ASSERT_TRUE(same(job.memory->content(), job.expected));
  }
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(same(read_file(folder.file("w" + std::to_string(i))), source));
}

INSTANTIATE_TEST_SUITE_P(All, StagedOverFaults,
                         ::testing::Combine(::testing::Values("auto", "posix"),
                                            ::testing::Values(DirectMode::kAuto, DirectMode::kAlways,
                                                              DirectMode::kNever),
                                            ::testing::Values("", "seed=3,shorten=0.3,interrupt=0.2",
                                                              "seed=3,late=0.2,late_ms=1,reorder=0.5")));

TEST_F(Staged, PrepareRegistersMemoryBeforeTheFirstSegment) {
  if (real_cuda()) GTEST_SKIP() << "only the fake driver counts";
  const auto objects = [] { return FAKE(cuda, fake_cuda_live_objects)(); };
  TemporaryFolder folder;
  const Bytes content = random_bytes(3 * kSegmentBytes, 1);
  const auto engine = make_engine({.workers = 3});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(objects().registrations, before_.registrations) << "memory is taken before it is needed";
  engine->prepare();
  engine->prepare();
  for (int tries = 0; objects().registrations == before_.registrations && tries < 5000; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_GE(objects().registrations, before_.registrations + 1);
  Memory memory(*device_, content.size());
  auto group = std::make_shared<Group>();
  group->edit().files = table_of({folder.write("a", content)});
  group->edit().transfers.push_back({0, 0, content.size(), memory.data()});
  ASSERT_TRUE(run(engine, group));
  EXPECT_EQ(memory.content(), content);
  EXPECT_LE(objects().registrations, before_.registrations + 3 + 1) << "a worker has taken more than its own";
}

// The number of buffers that this process has registered with io_uring, as the kernel reports it.
size_t registered_pieces() {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fdinfo")) {
    std::ifstream file(entry.path());
    for (std::string line; std::getline(file, line);) {
      if (line.rfind("UserBufs:", 0) == 0) count += std::stoul(line.substr(9));
    }
  }
  return count;
}

TEST_F(Staged, IoUringKnowsEachPieceOfStagingMemoryFromItsFirstRequestOn) {
  TemporaryFolder folder;
  const Bytes content = random_bytes(3 << 20, 1);
  const auto files = table_of({folder.write("a", content)});
  const auto engine =
      make_engine({.direct = DirectMode::kAlways, .workers = 1, .staging_bytes = 8 << 20, .segment_bytes = 3 << 20});
  if (engine->selection().name != "uring") GTEST_SKIP() << "io_uring is refused here";
  Memory memory(*device_, content.size());
  std::vector<size_t> registered;
  for (const size_t bytes : {size_t{1} << 16, content.size()}) {
    auto group = std::make_shared<Group>();
    group->edit().files = files;
    group->edit().transfers.push_back({0, 0, bytes, memory.data()});
    ASSERT_TRUE(run(engine, group));
    registered.push_back(registered_pieces());
  }
  EXPECT_EQ(memory.content(), content);
  if (registered.front() == 0) GTEST_SKIP() << "no memory may be registered here";
  EXPECT_EQ(registered.back(), registered.front() + 1);
}

TEST_F(Staged, RefusesStagingMemoryThatHoldsNoSegment) {
  make_engine({.staging_bytes = kLeastStagingBytes});
  const Error error = error_of([&] { make_engine({.staging_bytes = kLeastStagingBytes - 1}); });
  EXPECT_EQ(error.code, ErrorCode::kInvalidArgument);
  EXPECT_NE(error.message.find("staging_bytes must be at least " + std::to_string(kLeastStagingBytes)),
            std::string::npos)
      << error.message;
}

TEST_F(Staged, TheLeastStagingMemoryOfDefaultSegmentsHoldsOneThatIsWrittenToo) {
  const std::string refusal = error_of([&] { make_engine({.staging_bytes = 1, .segment_bytes = 0}); }).message;
  std::smatch least;
  ASSERT_TRUE(std::regex_search(refusal, least, std::regex("staging_bytes must be at least (\\d+)"))) << refusal;
  const auto engine = make_engine({.workers = 1, .staging_bytes = std::stoull(least[1]), .segment_bytes = 0});
  const TemporaryFolder folder;
  const Bytes content = random_bytes(20'000'001, 1);
  Memory memory(*device_, content.size());
  memory.fill(content);
  Caller caller;
  caller.memory = memory.data();
  caller.stall_timeout = kPatience;
  write_whole(*engine, folder.file("x"), content.size(), caller);
  EXPECT_TRUE(same(read_file(folder.file("x")), content));
}

// Parts that are consecutive in the file and in staging memory, but not on the device, are read by
// one request. It does not own its pages.
TEST_F(Staged, ARequestOfPartsForDifferentPlacesLeavesTheirNeighborsAlone) {
  const TemporaryFolder folder;
  const Bytes warm = random_bytes(1000, 1), cold = random_bytes(1 << 20, 2);
  const auto files = table_of({folder.write("warm", warm), folder.write("cold", cold)});
  Bytes expected(1 << 20, kUntouched);
  Memory memory(*device_, expected.size());
  auto group = std::make_shared<Group>();
  group->edit().files = files;
  const auto read = [&](uint32_t file, uint64_t offset, uint64_t length, size_t to) {
    group->edit().transfers.push_back({file, offset, length, memory.data() + to});
    std::copy_n((file == 0 ? warm : cold).begin() + static_cast<ptrdiff_t>(offset), length,
                expected.begin() + static_cast<ptrdiff_t>(to));
  };
  read(0, 0, 1000, 800'000);  // from the page cache, on the page where the others begin
  read(1, 1024, 40960, 0);  // 24 bytes behind it, congruent to the file modulo a page
  read(1, 41984, 24576, 500'000);  // continues in the file, elsewhere on the device
  const auto engine = make_engine({.workers = 1, .segment_bytes = 1 << 17});
  for (int round = 0; round < 2; ++round) {
    memory.fill(Bytes(memory.size(), kUntouched));
    drop_from_page_cache(files->path(1));
    ASSERT_TRUE(run(engine, group));
    ASSERT_FALSE(group->result().error) << group->result().error->message;
    ASSERT_TRUE(same(memory.content(), expected));
  }
}

TEST_F(Staged, CountsTheTimeThatItWaitsForTheLink) {
  if (real_cuda()) GTEST_SKIP() << "the link's speed is its own";
  const TemporaryFolder folder;
  const Bytes content = random_bytes(4 << 20, 1);
  const auto files = table_of({folder.write("a", content)});
  const auto engine = make_engine({.workers = 1, .staging_bytes = 1 << 20, .segment_bytes = 1 << 18});
  Memory memory(*device_, content.size());
  const auto link_s = [&](uint64_t delay_us) {
    set_delay_us(delay_us);
    const double before = engine->statistics().worker_link_s;
    auto group = std::make_shared<Group>();
    group->edit().files = files;
    group->edit().transfers = {{0, 0, content.size(), memory.data()}};
    EXPECT_TRUE(run(engine, group));
    return engine->statistics().worker_link_s - before;
  };
  const double slow = link_s(20000), fast = link_s(0);
  EXPECT_GT(slow, 0.01) << "memory for a quarter of it, and each copy takes 10 ms on average";
  EXPECT_LT(fast, slow / 2);
}

TEST_F(Staged, CountsWaitsForTheDevicesOwnWorkApartFromThoseForTheLink) {
  SKIP_WITH_REAL_CUDA();
  const TemporaryFolder folder;
  const Bytes content = random_bytes(4 << 20, 1);
  const std::string path = folder.write("a", content);
  const auto engine = make_engine({.workers = 1, .staging_bytes = 1 << 20, .segment_bytes = 1 << 18});
  Memory memory(*device_, content.size());
  const auto behind_work = [&](uint64_t busy_us) -> Caller {
    FAKE(cuda, fake_cuda_keep_busy)(0, busy_us);
    return {memory.data(), {device_->foreign_stream(0)->record()}, Priority::kTraining, {}};
  };
  const auto device_s = [&](const auto& call) {
    const EngineStatistics before = engine->statistics();
    call();
    const EngineStatistics after = engine->statistics();
    EXPECT_LT(after.worker_link_s - before.worker_link_s, 0.05);
    return after.worker_device_s - before.worker_device_s;
  };
  EXPECT_GT(device_s([&] { read_range(*engine, path, 0, content.size(), behind_work(100'000)); }), 0.05);
  EXPECT_GT(device_s([&] { write_range(*engine, path, 0, content.size(), behind_work(100'000)); }), 0.05);
  EXPECT_LT(device_s([&] { read_range(*engine, path, 0, content.size(), behind_work(0)); }), 0.05);
}

TEST_F(Staged, SpansHoldTheWaitForTheLink) {
  if (real_cuda()) GTEST_SKIP() << "the link's speed is its own";
  const TemporaryFolder folder;
  const Bytes content = random_bytes(4 << 20, 1);
  const auto engine = make_engine({.workers = 1, .staging_bytes = 1 << 20, .segment_bytes = 1 << 18});
  Memory memory(*device_, content.size());
  auto group = std::make_shared<Group>();
  group->edit().files = table_of({folder.write("a", content)});
  group->edit().transfers = {{0, 0, content.size(), memory.data()}};
  set_delay_us(20000);
  const double before = engine->statistics().worker_link_s;
  engine->begin_spans(1000);
  ASSERT_TRUE(run(engine, group));
  int64_t link_ns = 0;
  uint64_t bytes = 0;
  const Spans kept = engine->end_spans().front();
  for (const gdsdata::Span& span : kept.spans) {
    if (span.work == Work::kLink) link_ns += span.end_ns - span.begin_ns;
    bytes += span.bytes;
  }
  EXPECT_NEAR(static_cast<double>(link_ns) / 1e9, engine->statistics().worker_link_s - before, 1e-6);
  EXPECT_GT(link_ns, 10'000'000);
  EXPECT_EQ(bytes, content.size());
}

TEST_F(Staged, ReadsWaitForWhatStillUsesTheMemory) {
  const TemporaryFolder folder;
  const Bytes content = random_bytes(500'000, 1);
  const auto files = table_of({folder.write("a", content)});
  const auto engine = make_engine({});
  const Bytes old = random_bytes(content.size(), 2);
  Memory memory(*device_, content.size());
  for (int round = 0; round < 10; ++round) {
    set_delay_us(200);
    memory.fill(old);
    set_delay_us(20000);
    auto group = std::make_shared<Group>();
    group->edit().files = files;
    group->edit().transfers = {{0, 0, content.size(), memory.data()}};
    const auto used = memory.read_later();
    group->edit().before = {used};
    ASSERT_TRUE(run(engine, group));
    ASSERT_TRUE(used->done()) << "the copies did not wait";
    ASSERT_TRUE(same(memory.result(), old)) << "the earlier work on the memory found it changed";
    set_delay_us(200);
    ASSERT_TRUE(same(memory.content(), content));
  }
}

TEST_F(Staged, EventsOfAGroupComeAfterAllOfItsBytes) {
  const TemporaryFolder folder;
  const Bytes content = random_bytes(1'000'000, 1);
  const auto files = table_of({folder.write("a", content)});
  const auto engine = make_engine({.workers = 4});
  set_delay_us(5000);
  for (int round = 0; round < 5; ++round) {
    Memory memory(*device_, content.size());
    auto group = std::make_shared<Group>();
    Ended ended;
    group->edit().files = files;
    group->edit().transfers = {{0, 0, content.size(), memory.data()}};
    group->edit().on_done = ended.one();
    engine->submit(group);
    ASSERT_TRUE(ended.wait_for(1));
    EXPECT_LE(group->result().copies.size(), 4u) << "one a stream is enough";
    const auto consumer = device_->make_stream();
    const auto result = device_->allocate_pinned(content.size());
    for (const auto& copy : group->result().copies) consumer->wait(*copy);
    consumer->copy_out(result->data(), memory.data(), content.size());
    consumer->record()->wait();
    ASSERT_TRUE(same({result->data(), result->data() + content.size()}, content));
  }
}

TEST_F(Staged, TwoDevicesWorkAtOnce) {
  const auto second = test_device(1);
  if (second == nullptr) GTEST_SKIP() << "one GPU";
  const TemporaryFolder folder;
  const std::vector<Bytes> contents = {random_bytes(1'000'000, 1)};
  const auto files = table_of({folder.write("a", contents[0])});
  std::mt19937_64 random(12);
  std::vector<Reads> jobs;
  std::vector<std::shared_ptr<Engine>> engines = {make_engine({}), make_engine({}, second)};
  Ended ended;
  for (int i = 0; i < 10; ++i) {
    jobs.emplace_back(*engines[i % 2]->device(), random, files, contents, Conversion::kNone, 20);
    jobs.back().group->edit().on_done = ended.one();
    engines[i % 2]->submit(jobs.back().group);
  }
  ASSERT_TRUE(ended.wait_for(jobs.size()));
  for (Reads& job : jobs) {
    for (const auto& copy : job.group->result().copies) copy->wait();
    ASSERT_TRUE(same(job.memory->content(), job.expected));
  }
}

// --- errors and ends -----------------------------------------------------------------------------

class StagedErrors : public Staged {
 protected:
  void SetUp() override {
    SKIP_WITH_REAL_CUDA();
    Staged::SetUp();
  }
  static constexpr int kOutOfMemory = 2, kLaunchFailed = 719;
  void fail_next(const char* name, int code) { FAKE(cuda, fake_cuda_fail_next)(name, code); }

  const TemporaryFolder folder_;
  const Bytes content_ = random_bytes(60'000, 1);
  const std::shared_ptr<FileTable> files_ = table_of({folder_.write("a", content_)});

  // One segment, with three copies to separate places.
  std::shared_ptr<Group> read_into(Memory& memory) {
    auto group = std::make_shared<Group>();
    group->edit().files = files_;
    for (uint64_t i = 0; i < 3; ++i)
      group->edit().transfers.push_back({0, i * 20000, 20000, memory.data() + i * 25000});
    return group;
  }
  Bytes expected_of_read() {
    Bytes expected(80'000, kUntouched);
    for (ptrdiff_t i = 0; i < 3; ++i) std::copy_n(content_.begin() + i * 20000, 20000, expected.begin() + i * 25000);
    return expected;
  }
};

TEST_F(StagedErrors, ACopyThatFailsIsItsGroupsErrorAndTheNextGroupsWork) {
  Memory memory(*device_, 80'000);
  const auto engine = make_engine({.workers = 1, .staging_bytes = kLeastStagingBytes});
  for (const char* call : {"cuMemcpyBatchAsync", "cuMemcpyHtoDAsync", "cuEventRecord"}) {
    SCOPED_TRACE(call);
    FAKE(cuda, fake_cuda_set_copy_batches)(call != std::string("cuMemcpyHtoDAsync"));
    for (int round = 0; round < 5; ++round) {  // more than fit if each leaked staging memory
      auto failing = read_into(memory);
      fail_next(call, kLaunchFailed);
      ASSERT_TRUE(run(engine, failing)) << "round " << round;
      ASSERT_TRUE(failing->result().error) << "round " << round;
      EXPECT_EQ(failing->result().error->code, ErrorCode::kDevice);
      EXPECT_NE(failing->result().error->message.find("CUDA_ERROR_LAUNCH_FAILED"), std::string::npos)
          << failing->result().error->message;
    }
    auto next = read_into(memory);
    ASSERT_TRUE(run(engine, next));
    ASSERT_FALSE(next->result().error) << next->result().error->message;
    ASSERT_TRUE(same(memory.content(), expected_of_read()));
  }
}

// Copies that were queued before the one that failed still happen.
TEST_F(StagedErrors, NoCopyOfAFailedReadComesBehindItsEvents) {
  const auto engine = make_engine({.workers = 1});
  FAKE(cuda, fake_cuda_set_copy_batches)(false);
  for (int round = 0; round < 10; ++round) {
    Memory memory(*device_, 80'000);
    set_delay_us(20000);
    auto failing = read_into(memory);
    FAKE(cuda, fake_cuda_fail_after)("cuMemcpyHtoDAsync", 2, kLaunchFailed);
    ASSERT_TRUE(run(engine, failing));
    ASSERT_TRUE(failing->result().error);
    set_delay_us(0);
    const Bytes mine = random_bytes(80'000, 5);
    memory.fill(mine);  // the next use of the memory, after all events of the group
    set_delay_us(200);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ASSERT_TRUE(same(memory.content(), mine)) << "a copy came late, in round " << round;
  }
}

// Staging memory that copies from the device still write must not serve the next segment.
TEST_F(StagedErrors, AWriteWhoseCopyFailsDisturbsNoLaterRead) {
  Memory memory(*device_, 200'000), source(*device_, 60'000, std::byte{0x77});
  const auto engine = make_engine({.workers = 1, .staging_bytes = kLeastStagingBytes});
  for (const char* call : {"cuMemcpyDtoHAsync", "cuEventRecord"}) {
    SCOPED_TRACE(call);
    for (int round = 0; round < 5; ++round) {
      set_delay_us(20000);
      auto write = std::make_shared<Group>();
      write->edit().files = std::make_shared<FileTable>(File::open_for_writing(folder_.file("w"), true));
      write->edit().direction = Direction::kWrite;
      for (uint64_t i = 0; i < 3; ++i) {
        write->edit().transfers.push_back({0, i * 20000, 19000, source.data() + i * 20000});
      }
      FAKE(cuda, fake_cuda_fail_after)(call, call == std::string("cuEventRecord") ? 0 : 2, kLaunchFailed);
      ASSERT_TRUE(run(engine, write));
      ASSERT_TRUE(write->result().error);
      EXPECT_EQ(write->result().error->code, ErrorCode::kDevice);
      auto read = read_into(memory);
      ASSERT_TRUE(run(engine, read));
      ASSERT_FALSE(read->result().error) << read->result().error->message;
      set_delay_us(200);
      Bytes content = memory.content();
      content.resize(80'000);
      ASSERT_TRUE(same(content, expected_of_read())) << "round " << round;
    }
  }
}

TEST_F(StagedErrors, ALostDeviceIsAnErrorOfEachGroupAndNoHang) {
  Memory memory(*device_, 80'000);
  const auto engine = make_engine({.workers = 2, .staging_bytes = kLeastStagingBytes});
  ASSERT_TRUE(run(engine, read_into(memory)));
  FAKE(cuda, fake_cuda_break)(700);
  for (int i = 0; i < 10 && !hung_; ++i) {
    auto group = read_into(memory);
    Ended ended;
    group->edit().on_done = ended.one();
    engine->submit(group);
    if (!ended.wait_for(1)) {
      leave(engine, group);
    } else {
      EXPECT_TRUE(group->result().error);
    }
  }
  FAKE(cuda, fake_cuda_break)(0);
  hung_ = true;  // a lost device's objects are not counted
}

TEST_F(StagedErrors, AWorkerWithoutPinnedMemoryOrStreamSaysSo) {
  for (const char* call : {"cuMemHostRegister", "cuStreamCreate", "cuCtxSetCurrent"}) {
    SCOPED_TRACE(call);
    Memory memory(*device_, 80'000);
    fail_next(call, kOutOfMemory);
    const auto engine = make_engine({.workers = 1});
    auto group = read_into(memory);
    ASSERT_TRUE(run(engine, group));
    ASSERT_TRUE(group->result().error);
    EXPECT_EQ(group->result().error->code, ErrorCode::kDevice);
    EXPECT_NE(group->result().error->message.find("CUDA_ERROR_OUT_OF_MEMORY"), std::string::npos)
        << group->result().error->message;
  }
}

TEST_F(StagedErrors, AnErrorOfStorageLeavesNoStagingMemoryTaken) {
  Memory memory(*device_, 80'000);
  const auto engine = make_engine({DirectMode::kAlways, "seed=1,fail=0.7", "auto", 1, kLeastStagingBytes});
  size_t failed = 0, right = 0;
  for (int i = 0; i < 60; ++i) {
    auto group = read_into(memory);
    ASSERT_TRUE(run(engine, group));
    ++(group->result().error ? failed : right);
    if (group->result().error) {
      EXPECT_EQ(group->result().error->code, ErrorCode::kIo);
    }
  }
  EXPECT_GT(failed, 0u);
  EXPECT_GT(right, 0u);
}

TEST_F(Staged, GroupsAreCanceledWithCopiesInFlight) {
  const TemporaryFolder folder;
  const Bytes content = random_bytes(2'000'000, 1);
  const auto files = table_of({folder.write("a", content)});
  const auto engine = make_engine({.staging_bytes = kLeastStagingBytes});
  Memory memory(*device_, content.size());
  set_delay_us(3000);
  std::mt19937_64 random(13);
  for (int round = 0; round < 30; ++round) {
    auto group = std::make_shared<Group>();
    Ended ended;
    group->edit().files = files;
    group->edit().direction = round % 3 == 0 ? Direction::kWrite : Direction::kRead;
    if (group->request().direction == Direction::kWrite) {
      group->edit().files = std::make_shared<FileTable>(File::open_for_writing(folder.file("w"), true));
    }
    group->edit().transfers = {{0, 0, content.size(), memory.data()}};
    group->edit().on_done = ended.one();
    engine->submit(group);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 5000));
    group->cancel();
    ASSERT_TRUE(ended.wait_for(1));
    for (const auto& copy : group->result().copies) copy->wait();
  }
  set_delay_us(200);
  auto group = std::make_shared<Group>();
  group->edit().files = files;
  group->edit().transfers = {{0, 0, content.size(), memory.data()}};
  ASSERT_TRUE(run(engine, group));
  ASSERT_TRUE(same(memory.content(), content));
}

TEST_F(Staged, AnEngineEndsWithCopiesInFlight) {
  const TemporaryFolder folder;
  const Bytes content = random_bytes(300'000, 1);
  const auto files = table_of({folder.write("a", content)});
  Memory memory(*device_, 10 * content.size());
  set_delay_us(10000);
  std::vector<std::shared_ptr<Group>> groups;
  Ended ended;
  for (int i = 0; i < 10; ++i) {
    groups.push_back(std::make_shared<Group>());
    groups[i]->edit().files = files;
    groups[i]->edit().transfers = {{0, 0, content.size(), memory.data() + i * content.size()}};
    groups[i]->edit().on_done = ended.one();
  }
  auto engine = make_engine({});
  for (const auto& group : groups) engine->submit(group);
  engine.reset();
  engines_.clear();
  ASSERT_TRUE(ended.wait_for(groups.size()));
  for (const auto& group : groups) {
    for (const auto& copy : group->result().copies) copy->wait();
  }
  set_delay_us(200);
  const Bytes got = memory.content();
  for (int i = 0; i < 10; ++i)
    EXPECT_EQ(std::memcmp(got.data() + i * content.size(), content.data(), content.size()), 0);
}

// --- storage that reaches devices ----------------------------------------------------------------

class StagedCufile : public StagedErrors {
 protected:
  void SetUp() override {
    StagedErrors::SetUp();
    if (device_ != nullptr && !real_cuda()) FAKE(cufile, fake_cufile_reset)();
  }
  void TearDown() override {
    if (!real_cuda()) FAKE(cufile, fake_cufile_reset)();
    Staged::TearDown();
  }

  std::shared_ptr<Engine> make_cufile_engine(bool strict = false, bool batch = false,
                                             DirectMode direct = DirectMode::kAuto) {
    EngineOptions options;
    options.backend = "cufile";
    options.workers = 2;
    options.segment_bytes = kSegmentBytes;
    options.staging_bytes = 1 << 20;
    options.io.request_bytes = 65536;
    options.io.bounce_bytes = 1 << 20;
    options.io.queue_depth = 16;
    options.io.direct = direct;
    options.io.strict = strict;
    options.io.cufile_batch = batch;
    engines_.push_back(std::make_shared<Engine>(options, device_));
    return engines_.back();
  }
};

TEST_F(StagedCufile, CachedBytesAreCopiedAndTheRestComesFromTheDisk) {
  const TemporaryFolder folder;
  const std::vector<Bytes> contents = {random_bytes(1'000'001, 1), random_bytes(300'000, 2)};
  const std::vector<std::string> paths = {folder.write("0", contents[0]), folder.write("1", contents[1])};
  const auto files = table_of(paths);
  std::mt19937_64 random(1);
  for (const bool batch : {false, true}) {
    const auto engine = make_cufile_engine(false, batch);
    for (int round = 0; round < 6; ++round) {
      drop_from_page_cache(paths[0]);
      Reads job(*device_, random, files, contents, Conversion::kNone, 30);
      ASSERT_TRUE(run(engine, job.group));
      ASSERT_FALSE(job.group->result().error) << job.group->result().error->message;
      ASSERT_TRUE(same(job.memory->content(), job.expected)) << "round " << round;
      ASSERT_EQ(counted(job.group->result().bytes), job.bytes());
    }
    EXPECT_GT(engine->statistics().bytes[Route::kGds] + engine->statistics().bytes[Route::kGdsCompat], 0u);
    EXPECT_EQ(engine->statistics().retries, 0u);
  }
}

// The link is busy, and its worker waits for the device. Earlier copies must still be reported.
TEST_F(StagedCufile, AGroupsEndDoesNotWaitForWhatStillUsesAnothersMemory) {
  const TemporaryFolder folder;
  const Bytes content = random_bytes(4 * kSegmentBytes, 1);
  const auto warm_files = table_of({folder.write("warm", content)}),
             cold_files = table_of({folder.write("cold", content)});
  const auto engine = make_cufile_engine();
  Memory memory(*device_, content.size()), other(*device_, 8 * content.size());
  FAKE(cuda, fake_cuda_set_link_bytes_per_s)(1 << 20);
  drop_from_page_cache(cold_files->path(0));
  FAKE(cuda, fake_cuda_keep_busy)(0, 2'000'000);
  const auto used = device_->foreign_stream(0)->record();
  Ended ended, others_ended;
  const auto warm = std::make_shared<Group>();
  warm->edit().files = warm_files;
  warm->edit().transfers = {{0, 0, content.size(), memory.data()}};
  warm->edit().on_done = ended.one();
  engine->submit(warm);
  std::vector<std::shared_ptr<Group>> others;
  for (size_t i = 0; i < 8; ++i) {  // the next segments of both workers
    others.push_back(std::make_shared<Group>());
    others.back()->edit().files = cold_files;
    others.back()->edit().before = {used};
    others.back()->edit().transfers = {{0, 0, content.size(), other.data() + i * content.size()}};
    others.back()->edit().on_done = others_ended.one();
    engine->submit(others.back());
  }
  if (!ended.wait_for(1)) return leave(engine, warm);
  EXPECT_FALSE(used->done());
  if (!others_ended.wait_for(8)) return leave(engine, others.back());
  for (const auto& copy : warm->result().copies) copy->wait();
  FAKE(cuda, fake_cuda_set_link_bytes_per_s)(0);
  ASSERT_TRUE(same(memory.content(), content));
}

TEST_F(StagedCufile, AReadThatItCannotDoGoesByWayOfTheHostOnce) {
  const auto engine = make_cufile_engine();
  for (int round = 0; round < 5; ++round) {
    Memory memory(*device_, 80'000);
    drop_from_page_cache(files_->path(0));
    FAKE(cufile, fake_cufile_fail_next)("cuFileRead", EIO);
    auto group = read_into(memory);
    ASSERT_TRUE(run(engine, group));
    ASSERT_FALSE(group->result().error) << group->result().error->message;
    ASSERT_TRUE(same(memory.content(), expected_of_read()));
    ASSERT_EQ(counted(group->result().bytes), 60'000u);
    EXPECT_EQ(engine->statistics().retries, static_cast<uint64_t>(round + 1));
  }
  EXPECT_EQ(engine->statistics().errors, 0u) << "it was none in the end";
}

TEST_F(StagedCufile, AWriteThatItCannotDoGoesByWayOfTheHost) {
  const auto engine = make_cufile_engine();
  const Bytes content = random_bytes(300'000, 3);
  Memory memory(*device_, content.size());
  for (const uint64_t offset : {0, 4096, 77}) {
    SCOPED_TRACE(offset);
    memory.fill(Bytes(content.size(), std::byte{0x22}));
    set_delay_us(3000);
    FAKE(cufile, fake_cufile_fail_after)("cuFileWrite", 1, EIO);
    Caller caller;
    caller.memory = memory.data();
    caller.before = {memory.fill_later(content)};
    const std::string path = folder_.file("w" + std::to_string(offset));
    write_range(*engine, path, offset, content.size(), caller);
    drop_from_page_cache(path);
    Bytes got = read_file(path);
    got.erase(got.begin(), got.begin() + static_cast<ptrdiff_t>(offset));
    ASSERT_TRUE(same(got, content));
  }
  EXPECT_EQ(engine->statistics().retries, 3u);
}

TEST_F(StagedCufile, StrictRaisesInstead) {
  const auto engine = make_cufile_engine(/*strict=*/true);
  Memory memory(*device_, 80'000);
  drop_from_page_cache(files_->path(0));
  FAKE(cufile, fake_cufile_fail_next)("cuFileRead", EIO);
  auto group = read_into(memory);
  ASSERT_TRUE(run(engine, group));
  ASSERT_TRUE(group->result().error);
  EXPECT_EQ(group->result().error->code, ErrorCode::kIo);
  EXPECT_EQ(engine->statistics().retries, 0u);
  ASSERT_TRUE(run(engine, read_into(memory)));
}

TEST_F(StagedCufile, AFileThatEndedIsAnErrorAndNoRetry) {
  const auto engine = make_cufile_engine();
  Memory memory(*device_, 80'000);
  drop_from_page_cache(files_->path(0));
  auto group = read_into(memory);
  group->edit().transfers.push_back({0, content_.size() - 10, 20, memory.data() + 79'000});
  ASSERT_TRUE(run(engine, group));
  ASSERT_TRUE(group->result().error);
  EXPECT_EQ(group->result().error->code, ErrorCode::kCorrupt);
  EXPECT_EQ(engine->statistics().retries, 0u);
}

TEST_F(StagedCufile, TroubleOfEveryKindAtOnceLosesNothing) {
  const TemporaryFolder folder;
  const std::vector<Bytes> contents = {random_bytes(700'001, 1), random_bytes(300'000, 2)};
  const std::vector<std::string> paths = {folder.write("0", contents[0]), folder.write("1", contents[1])};
  const auto files = table_of(paths);
  std::mt19937_64 random(2);
  for (const bool batch : {false, true}) {
    FAKE(cufile, fake_cufile_set_trouble)(0.2, 0.1);
    FAKE(cufile, fake_cufile_set_late_us)(500);
    FAKE(cufile, fake_cufile_set_route)(3);
    const auto engine = make_cufile_engine(false, batch);
    for (int round = 0; round < 6; ++round) {
      if (round % 2 == 0) std::for_each(paths.begin(), paths.end(), drop_from_page_cache);
      FAKE(cufile, fake_cufile_fail_after)(batch ? "entry" : "cuFileRead", random() % 20, EIO);
      std::vector<Reads> jobs;
      Ended ended;
      for (int i = 0; i < 4; ++i) {
        jobs.emplace_back(*device_, random, files, contents, Conversion::kNone, 20);
        jobs.back().group->edit().on_done = ended.one();
      }
      for (Reads& job : jobs) engine->submit(job.group);
      ASSERT_TRUE(ended.wait_for(jobs.size()));
      for (Reads& job : jobs) {
        ASSERT_FALSE(job.group->result().error) << job.group->result().error->message;
        for (const auto& copy : job.group->result().copies) copy->wait();
        ASSERT_TRUE(same(job.memory->content(), job.expected)) << "round " << round;
        ASSERT_EQ(counted(job.group->result().bytes), job.bytes());
      }
    }
  }
}

}  // namespace
}  // namespace gdsdata::testing
