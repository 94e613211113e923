// One suite for all backends, direct modes and faults: right bytes, or an error that says why not.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <thread>

#include "backend/bounce.h"
#include "backend/faulty.h"
#include "backend/select.h"
#include "base/crc32.h"
#include "device/anonymous_memory.h"
#include "testing.h"

namespace gdsdata::testing {
namespace {

constexpr std::chrono::milliseconds kLong{5000};

struct Case {
  std::string backend;
  DirectMode direct;
  std::string faults;
};

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  static const std::map<std::string, std::string> kFaults = {
      {"", "sound"}, {"seed=7,shorten=0.5,interrupt=0.3", "short"}, {"seed=7,late=0.3,late_ms=2,reorder=0.5", "late"}};
  const std::string direct[] = {"auto", "always", "never"};
  return info.param.backend + "_" + direct[static_cast<int>(info.param.direct)] + "_" + kFaults.at(info.param.faults);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const std::string backend : {"posix", "uring"}) {
    if (backend == "uring" && !uring_refusal().empty()) continue;
    for (const DirectMode direct : {DirectMode::kAuto, DirectMode::kAlways, DirectMode::kNever}) {
      for (const std::string faults :
           {"", "seed=7,shorten=0.5,interrupt=0.3", "seed=7,late=0.3,late_ms=2,reorder=0.5"}) {
        all.push_back({backend, direct, faults});
      }
    }
  }
  return all;
}

class OverEveryBackend : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    options_.direct = GetParam().direct;
    options_.faults = GetParam().faults;
    options_.queue_depth = 8;
    options_.request_bytes = 256 * 1024;
    options_.bounce_bytes = 2 << 20;
    device_ = host_device();
    backend_ = make_backend(GetParam().backend, options_, *device_);
  }

  // Submits and reaps all requests. Returns the completions by tag.
  std::map<uint64_t, Completion> run(const std::vector<Request>& requests) {
    std::map<uint64_t, Completion> completions;
    size_t submitted = 0;
    std::vector<Completion> room(16);
    while (completions.size() < requests.size()) {
      if (submitted < requests.size()) submitted += backend_->submit(std::span(requests).subspan(submitted));
      const size_t given = backend_->reap(room, 1, kLong);
      EXPECT_GT(given, 0u) << "nothing came within " << kLong.count() << " ms";
      if (given == 0) break;
      for (size_t i = 0; i < given; ++i) {
        EXPECT_EQ(completions.count(room[i].tag), 0u) << "two completions for one request";
        completions[room[i].tag] = std::move(room[i]);
      }
    }
    return completions;
  }

  TemporaryFolder folder_;
  BackendOptions options_;
  std::shared_ptr<Device> device_;
  std::unique_ptr<Backend> backend_;
};

// The rules of backend.h that also hold for backends that move no bytes.
class ProtocolConformance : public OverEveryBackend {};

// Bytes arrive where they belong, and errors name their place. For backends that move bytes.
class BytesConformance : public OverEveryBackend {};

TEST_P(ProtocolConformance, TakesAnyNumberOfRequestsAndGivesEachOneCompletion) {
  constexpr uint64_t kCount = 200, kLength = 700;
  const auto file = File::open_for_reading(folder_.write("a", random_bytes(kCount * kLength, 1)));
  Bytes memory(kCount * kLength);
  std::vector<Piece> pieces;
  std::vector<Request> requests;
  for (uint64_t i = 0; i < kCount; ++i) pieces.push_back({i * kLength, kLength, memory.data() + i * kLength});
  for (uint64_t i = 0; i < kCount; ++i) {
    requests.push_back(
        {i, Direction::kRead, Conversion::kNone, file.get(), i * kLength, kLength, std::span(pieces).subspan(i, 1)});
  }
  const auto completions = run(requests);
  ASSERT_EQ(completions.size(), kCount);
  for (const auto& [tag, completion] : completions) {
    EXPECT_LT(tag, kCount) << "nobody submitted this request";
    EXPECT_FALSE(completion.error) << completion.error->message;
  }
  std::vector<Completion> room(16);
  EXPECT_EQ(backend_->reap(room, 0, kLong), 0u) << "more completions than requests";
}

TEST_P(BytesConformance, DeliversAnyRangeOfAFileOfAnySize) {
  for (const size_t size : {1, 511, 512, 513, 4095, 4096, 4097, 300001}) {
    const Bytes content = random_bytes(size, size);
    const auto file = File::open_for_reading(folder_.write(std::to_string(size), content));
    std::mt19937_64 random(size);
    std::vector<std::pair<uint64_t, uint64_t>> extents = {{0, size}, {size - 1, 1}, {0, 1}};
    for (int i = 0; i < 60; ++i) {
      const uint64_t offset = random() % size;
      extents.push_back({offset, 1 + random() % std::min<uint64_t>(size - offset, options_.request_bytes)});
    }
    std::vector<Bytes> results;
    std::vector<Piece> pieces;
    std::vector<Request> requests;
    for (auto& [offset, length] : extents) {
      length = std::min(length, options_.request_bytes);
      results.emplace_back(length);
    }
    for (size_t i = 0; i < extents.size(); ++i)
      pieces.push_back({extents[i].first, extents[i].second, results[i].data()});
    for (size_t i = 0; i < extents.size(); ++i) {
      requests.push_back({i, Direction::kRead, Conversion::kNone, file.get(), extents[i].first, extents[i].second,
                          std::span(pieces).subspan(i, 1)});
    }
    for (auto& [tag, completion] : run(requests)) {
      ASSERT_FALSE(completion.error) << completion.error->message;
      const auto [offset, length] = extents[tag];
      ASSERT_EQ(std::memcmp(results[tag].data(), content.data() + offset, length), 0)
          << "size " << size << " offset " << offset << " length " << length;
      const Route expected = options_.direct == DirectMode::kNever ? Route::kBuffered : Route::kDirect;
      ASSERT_EQ(completion.bytes[expected], length) << "counted as another route";
    }
  }
}

TEST_P(BytesConformance, DeliversThePiecesOfACoalescedRequestConverted) {
  const Bytes content = random_bytes(100000, 3);
  const auto file = File::open_for_reading(folder_.write("a", content));
  std::vector<int64_t> first(100), second(50);
  const std::vector<Piece> pieces = {{1001, 200, reinterpret_cast<std::byte*>(first.data())},
                                     {50000, 100, reinterpret_cast<std::byte*>(second.data())}};
  const auto completions = run({{0, Direction::kRead, Conversion::kU16ToI64, file.get(), 1001, 50100 - 1001, pieces}});
  ASSERT_FALSE(completions.at(0).error);
  for (size_t i = 0; i < first.size(); ++i) {
    uint16_t token;
    std::memcpy(&token, content.data() + 1001 + 2 * i, 2);
    ASSERT_EQ(first[i], token);
  }
  uint16_t token;
  std::memcpy(&token, content.data() + 50000 + 98, 2);
  ASSERT_EQ(second[49], token);
}

TEST_P(BytesConformance, SaysWhereAFileEndsTooEarly) {
  const std::string path = folder_.write("a", random_bytes(5000, 1));
  const auto file = File::open_for_reading(path);
  Bytes memory(10000);
  for (const auto& [offset, length] : {std::pair<uint64_t, uint64_t>{0, 5001}, {4999, 2}, {5000, 1}, {9000, 1000}}) {
    const std::vector<Piece> pieces = {{offset, length, memory.data()}};
    const auto completions = run({{0, Direction::kRead, Conversion::kNone, file.get(), offset, length, pieces}});
    const auto& error = completions.at(0).error;
    ASSERT_TRUE(error) << offset;
    EXPECT_EQ(error->code, ErrorCode::kCorrupt) << error->message;
    EXPECT_EQ(error->path, path);
    EXPECT_EQ(error->offset, offset);
    EXPECT_EQ(error->length, length);
    EXPECT_NE(error->message.find("ends at 5000 bytes"), std::string::npos) << error->message;
  }
}

TEST_P(BytesConformance, WritesAnyRangeAndTouchesNoNeighbor) {
  std::mt19937_64 random(4);
  Bytes expected = random_bytes(600000, 4);
  const std::string path = folder_.write("a", expected);
  for (int round = 0; round < 40; ++round) {
    const auto file = File::open_for_writing(path, false);
    const uint64_t offset = random() % 500000;
    const uint64_t length = 1 + random() % 90000;
    // Every other time from memory that is congruent to the file, which needs no bounce.
    Bytes source = random_bytes(length + 8192, round);
    std::byte* memory = source.data();
    if (round % 2 == 0) memory += 4096 - (reinterpret_cast<uintptr_t>(memory) - offset) % 4096;
    std::memcpy(expected.data() + offset, memory, length);
    uint32_t checksum = 0;
    const std::vector<Piece> pieces = {{offset, length, memory, &checksum}};
    const auto completions = run({{0, Direction::kWrite, Conversion::kNone, file.get(), offset, length, pieces}});
    ASSERT_FALSE(completions.at(0).error) << completions.at(0).error->message;
    ASSERT_EQ(read_file(path), expected) << "round " << round << " offset " << offset << " length " << length;
    ASSERT_EQ(checksum, crc32(memory, length)) << "round " << round << " offset " << offset << " length " << length;
  }
}

// Pieces of any length, in separate places or, every other time, in one congruent to the file.
TEST_P(BytesConformance, WritesARequestOfManyPiecesAndTakesTheChecksumOfEach) {
  std::mt19937_64 random(8);
  Bytes expected = random_bytes(700000, 8);
  const std::string path = folder_.write("a", expected);
  for (int round = 0; round < 40; ++round) {
    const auto file = File::open_for_writing(path, false);
    const uint64_t begin = round % 4 < 2 ? random() % 500000 : random() % 100 * 4096;
    const size_t count = 1 + random() % 12;
    Bytes source = random_bytes(count * 8192 + 8192, round);
    std::byte* in_one_place = source.data() + 4096 - (reinterpret_cast<uintptr_t>(source.data()) - begin) % 4096;
    std::vector<Bytes> places;
    std::vector<Piece> pieces;
    std::vector<uint32_t> checksums(count);
    uint64_t end = begin;
    for (size_t i = 0; i < count; ++i) {
      const uint64_t length = random() % 3 == 0 ? 4096 : 1 + random() % 8192;
      std::byte* memory = in_one_place + (end - begin);
      if (round % 2 == 1) {
        places.emplace_back(memory, memory + length);
        memory = places.back().data();
      }
      std::memcpy(expected.data() + end, memory, length);
      pieces.push_back({end, length, memory, i % 5 == 4 ? nullptr : &checksums[i]});
      end += length;
    }
    const auto completions = run({{0, Direction::kWrite, Conversion::kNone, file.get(), begin, end - begin, pieces}});
    ASSERT_FALSE(completions.at(0).error) << completions.at(0).error->message;
    ASSERT_TRUE(read_file(path) == expected) << "round " << round;
    ASSERT_EQ(completions.at(0).bytes.total(), end - begin);
    for (size_t i = 0; i < count; ++i) {
      ASSERT_EQ(checksums[i], i % 5 == 4 ? 0 : crc32(expected.data() + pieces[i].offset, pieces[i].length));
    }
  }
}

// More than fit at a time: some are prepared while others are written.
TEST_P(BytesConformance, WritesManyRequestsWhoseChecksumsGoOnFromOneToTheNext) {
  options_.bounce_bytes = 3 * options_.request_bytes;  // some find no room, and are tried again
  backend_ = make_backend(GetParam().backend, options_, *device_);
  const Bytes content = random_bytes(10'000'001, 5);
  const std::string path = folder_.write("a", Bytes(content.size()));
  const auto file = File::open_for_writing(path, false);
  std::vector<Piece> pieces;
  std::mt19937_64 random(6);
  uint32_t checksums[2] = {0, 0};  // of even and odd requests
  for (uint64_t offset = 0; offset < content.size(); offset += pieces.back().length) {
    const uint64_t length = std::min(1 + random() % options_.request_bytes, content.size() - offset);
    std::byte* memory = const_cast<std::byte*>(content.data()) + offset;
    pieces.push_back({offset, length, memory, &checksums[pieces.size() % 2]});
  }
  std::vector<Request> requests;
  Bytes turns[2];
  for (size_t i = 0; i < pieces.size(); ++i) {
    requests.push_back({i, Direction::kWrite, Conversion::kNone, file.get(), pieces[i].offset, pieces[i].length,
                        std::span(pieces).subspan(i, 1)});
    turns[i % 2].insert(turns[i % 2].end(), pieces[i].memory, pieces[i].memory + pieces[i].length);
  }
  for (auto& [tag, completion] : run(requests)) ASSERT_FALSE(completion.error) << completion.error->message;
  ASSERT_TRUE(read_file(path) == content);
  for (size_t i = 0; i < 2; ++i) ASSERT_EQ(checksums[i], crc32(turns[i].data(), turns[i].size()));
}

TEST_P(BytesConformance, ReportsAnErrorOfTheSystemWithPathAndExtent) {
  const std::string path = folder_.write("a", random_bytes(8192, 1));
  const auto file = File::open_for_reading(path);  // not opened for writing
  Bytes memory(4096);
  const std::vector<Piece> pieces = {{100, 1000, memory.data()}};
  const auto completions = run({{0, Direction::kWrite, Conversion::kNone, file.get(), 100, 1000, pieces}});
  const auto& error = completions.at(0).error;
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code, ErrorCode::kIo);
  EXPECT_EQ(error->system_errno, EBADF);
  EXPECT_EQ(error->path, path);
}

INSTANTIATE_TEST_SUITE_P(All, ProtocolConformance, ::testing::ValuesIn(cases()), name_of);
INSTANTIATE_TEST_SUITE_P(All, BytesConformance, ::testing::ValuesIn(cases()), name_of);

// A pipe replaces the file, so the read waits for bytes.
TEST(Uring, AReapThatWaitsIsInterruptedFromAnotherThread) {
  if (const std::string refusal = uring_refusal(); !refusal.empty()) GTEST_SKIP() << refusal;
  BackendOptions options;
  options.direct = DirectMode::kNever;
  const auto backend = make_uring_backend(options);
  const TemporaryFolder folder;
  const auto file = File::open_for_reading(folder.write("a", Bytes(5)));
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  ASSERT_EQ(::dup2(ends[0], file->buffered()), file->buffered());
  Bytes memory(5);
  const Piece piece{0, 5, memory.data()};
  const Request request{7, Direction::kRead, Conversion::kNone, file.get(), 0, 5, {&piece, 1}};
  ASSERT_EQ(backend->submit({&request, 1}), 1u);
  std::vector<Completion> room(32);
  for (const size_t min : {1, 4, 2, 8, 1, 20}) {
    const auto began = std::chrono::steady_clock::now();
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      backend->interrupt();
    });
    EXPECT_EQ(backend->reap(room, min, kLong), 0u);
    other.join();
    EXPECT_LT(std::chrono::steady_clock::now() - began, kLong / 2);
  }
  backend->interrupt();
  EXPECT_EQ(backend->reap(room, 1, kLong), 0u) << "the interrupt found no waiter, so the next reap returns";
  ASSERT_EQ(::write(ends[1], "bytes", 5), 5);
  EXPECT_EQ(backend->reap(room, 1, kLong), 1u);
  EXPECT_EQ(std::memcmp(memory.data(), "bytes", 5), 0);
  ::close(ends[0]);
  ::close(ends[1]);
}

// The number of entries that the kernel has taken from the only ring of this process.
std::optional<uint64_t> asked_of_kernel() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (std::filesystem::read_symlink(entry, gone).string().find("io_uring") == std::string::npos) continue;
    std::ifstream info("/proc/self/fdinfo/" + entry.path().filename().string());
    std::string key;
    for (uint64_t value = 0; info >> key;) {
      if (key == "SqHead:" && info >> value) return value;
    }
  }
  return std::nullopt;  // an older kernel does not report it
}

// The pipe is full, so no write completes before the pipe is read.
TEST(Uring, HasHalfOfItsWritesReadyWhileTheKernelHasTheOthers) {
  if (const std::string refusal = uring_refusal(); !refusal.empty()) GTEST_SKIP() << refusal;
  constexpr size_t kRequests = 6, kLength = 128 * 1024;
  BackendOptions options;
  options.direct = DirectMode::kNever;
  options.request_bytes = kLength;
  options.bounce_bytes = 4 * kLength;
  const auto backend = make_uring_backend(options);
  const TemporaryFolder folder;
  const auto file = File::open_for_writing(folder.file("w"), true);
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const Bytes full(static_cast<size_t>(::fcntl(ends[1], F_GETPIPE_SZ)));
  ASSERT_EQ(::write(ends[1], full.data(), full.size()), static_cast<ssize_t>(full.size()));
  ASSERT_EQ(::dup2(ends[1], file->buffered()), file->buffered());
  const Bytes content = random_bytes(kLength, 1);
  uint32_t checksums[kRequests] = {};
  Piece pieces[kRequests];
  std::vector<Request> requests;
  for (size_t i = 0; i < kRequests; ++i) {
    pieces[i] = {0, kLength, const_cast<std::byte*>(content.data()), &checksums[i]};
    requests.push_back({i, Direction::kWrite, Conversion::kNone, file.get(), 0, kLength, {&pieces[i], 1}});
  }
  ASSERT_EQ(backend->submit(requests), kRequests);
  if (const auto asked = asked_of_kernel()) {
    EXPECT_EQ(*asked, 2u);
  }
  for (const uint32_t checksum : checksums) EXPECT_EQ(checksum, crc32(content.data(), kLength)) << "it is not ready";
  std::thread reader([&] {
    Bytes rest(full.size() + kRequests * kLength);
    for (size_t done = 0; done < rest.size();) {
      const ssize_t moved = ::read(ends[0], rest.data(), rest.size() - done);
      if (moved <= 0) return;
      done += static_cast<size_t>(moved);
    }
  });
  std::vector<Completion> room(kRequests);
  EXPECT_EQ(backend->reap(room, kRequests, kLong), kRequests);
  for (const Completion& completion : room) EXPECT_FALSE(completion.error) << completion.error->message;
  ::dup2(ends[0], file->buffered());  // closes the last writing end, so that the reader ends in any case
  ::close(ends[1]);
  reader.join();
  ::close(ends[0]);
}

TEST(Faulty, FailsEachCompletionInTurnAndOnlyThat) {
  TemporaryFolder folder;
  const std::string path = folder.write("a", random_bytes(80000, 1));
  const auto file = File::open_for_reading(path);
  const auto device = host_device();
  constexpr size_t kRequests = 8;
  for (size_t failing = 0; failing < kRequests; ++failing) {
    BackendOptions options;
    options.faults = "fail_at=" + std::to_string(failing) + ",error=28";
    const auto backend = make_backend("posix", options, *device);
    std::vector<Bytes> results(kRequests, Bytes(1000));
    std::vector<Completion> room(1);
    for (size_t i = 0; i < kRequests; ++i) {
      const std::vector<Piece> pieces = {{i * 1000, 1000, results[i].data()}};
      const std::vector<Request> requests = {
          {i, Direction::kRead, Conversion::kNone, file.get(), i * 1000, 1000, pieces}};
      ASSERT_EQ(backend->submit(requests), 1u);
      ASSERT_EQ(backend->reap(room, 1, kLong), 1u);
      ASSERT_EQ(room[0].error.has_value(), i == failing);
      if (i != failing) continue;
      EXPECT_EQ(room[0].error->system_errno, ENOSPC);
      EXPECT_EQ(room[0].error->path, path);
      EXPECT_EQ(room[0].error->offset, failing * 1000);
    }
  }
}

TEST(Faulty, RefusesAFaultItDoesNotKnow) {
  const Error error = error_of([] { FaultPlan::parse("seed=1,explode=1"); });
  EXPECT_EQ(error.code, ErrorCode::kInvalidArgument);
  EXPECT_NE(error.message.find("explode"), std::string::npos);
}

TEST(Select, RefusesAnUnknownBackendByName) {
  const Error error = error_of([] { select_backend("spdk", BackendOptions{}, *host_device()); });
  EXPECT_EQ(error.code, ErrorCode::kInvalidArgument);
  EXPECT_NE(error.message.find("spdk"), std::string::npos);
}

TEST(BounceArena, AllocatesDisjointMemoryAndIsWholeAgainOnceAllIsReleased) {
  const auto device = host_device();
  constexpr uint64_t kBytes = 1 << 20;
  BounceArena arena(*device, kBytes);
  std::mt19937_64 random(5);
  std::map<std::byte*, uint64_t> taken;
  for (int step = 0; step < 20000; ++step) {
    if (random() % 2 == 0) {
      const uint64_t bytes = 1 + random() % 100000;
      std::byte* memory = arena.take(bytes);
      if (memory == nullptr) continue;
      ASSERT_GE(memory, arena.data());
      ASSERT_LE(memory + bytes, arena.data() + kBytes);
      ASSERT_EQ((memory - arena.data()) % 4096, 0);
      const auto next = taken.lower_bound(memory);
      if (next != taken.end()) {
        ASSERT_LE(memory + bytes, next->first);
      }
      if (next != taken.begin()) {
        ASSERT_LE(std::prev(next)->first + std::prev(next)->second, memory);
      }
      taken[memory] = bytes;
    } else if (!taken.empty()) {
      auto entry = std::next(taken.begin(), static_cast<ptrdiff_t>(random() % taken.size()));
      arena.release(entry->first, entry->second);
      taken.erase(entry);
    }
  }
  for (const auto& [memory, bytes] : taken) arena.release(memory, bytes);
  EXPECT_NE(arena.take(kBytes), nullptr) << "memory was lost or left in pieces";
}

TEST(BounceArena, GivesMemoryThatWasNeverTouchedOnceItIsThere) {
  constexpr uint64_t kMiB = 1 << 20, kAll = 16 * kMiB;
  AnonymousMemory probe(4096);
  if (!populate_pages(probe.data(), 4096)) GTEST_SKIP() << "the system populates memory only when it is touched";
  BounceArena arena(*host_device(), kAll, 4 * kMiB);
  const auto resident_bytes = [&] {
    std::vector<unsigned char> there(kAll / 4096);
    EXPECT_EQ(::mincore(arena.data(), kAll, there.data()), 0);
    return 4096 * std::count_if(there.begin(), there.end(), [](unsigned char page) { return (page & 1) != 0; });
  };
  std::byte* ready = arena.take(4 * kMiB);
  EXPECT_EQ(ready, arena.data());
  EXPECT_EQ(resident_bytes(), 0) << "no page was touched or waited for";
  EXPECT_EQ(arena.take(kMiB), nullptr);
  const auto until = std::chrono::steady_clock::now() + kLong;
  std::byte* more = nullptr;
  while ((more = arena.take(12 * kMiB)) == nullptr && std::chrono::steady_clock::now() < until)
    std::this_thread::yield();
  ASSERT_EQ(more, arena.data() + 4 * kMiB);
  EXPECT_GE(resident_bytes(), static_cast<ptrdiff_t>(12 * kMiB));
  arena.release(ready, 4 * kMiB);
  arena.release(more, 12 * kMiB);
  EXPECT_EQ(arena.take(kAll), arena.data());
}

TEST(BounceArena, AllocatesUntouchedMemoryAtOnceIfThatIsAskedFor) {
  constexpr uint64_t kMiB = 1 << 20;
  BounceArena arena(*host_device(), 8 * kMiB, kMiB);
  EXPECT_EQ(arena.take_untouched(8 * kMiB), arena.data());
}

TEST(BounceArena, IsDestroyedWhileItsMemoryIsPopulated) {
  constexpr uint64_t kBytes = 256 << 20;
  for (int round = 0; round < 3; ++round) {
    BounceArena arena(*host_device(), kBytes, 0);
    EXPECT_EQ(arena.take(4096), nullptr);
  }
}

TEST(Uring, TakesAsMuchBounceMemoryAsItsOnlyRequestNeeds) {
  constexpr uint64_t kLong = 24 << 20;
  const TemporaryFolder folder;
  BackendOptions options;
  options.request_bytes = kLong;
  options.bounce_bytes = 64 << 20;
  options.queue_depth = 4;
  std::unique_ptr<Backend> backend;
  try {
    backend = make_backend("uring", options, *host_device());
  } catch (const Failure& failure) {
    GTEST_SKIP() << failure.what();
  }
  const auto file = File::open_for_writing(folder.file("w"), true);
  if (file->direct() < 0) GTEST_SKIP() << "no O_DIRECT in " << folder.file("w");
  const Bytes content = random_bytes(kLong + 64, 1);
  Piece piece{0, kLong, const_cast<std::byte*>(content.data()) + 64};
  const Request request{0, Direction::kWrite, Conversion::kNone, file.get(), 0, kLong, std::span(&piece, 1)};
  ASSERT_EQ(backend->submit(std::span(&request, 1)), 1u);
  std::vector<Completion> room(1);
  ASSERT_EQ(backend->reap(room, 1, std::chrono::seconds(20)), 1u);
  ASSERT_FALSE(room[0].error) << room[0].error->message;
}

}  // namespace
}  // namespace gdsdata::testing
