// The cuFile backend: for any answer of the library, the bytes are right or an error says why not,
// and bytes that count as DMA went by DMA. Uses the fake library. The conformance tests can also
// use the real one (fakes.h).
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <thread>

#include "backend/backend.h"
#include "backend/cufile_api.h"
#include "backend/cufile_memory.h"
#include "backend/faulty.h"
#include "base/fallbacks.h"
#include "fakes.h"
#include "testing.h"

namespace gdsdata::testing {
namespace {

constexpr std::chrono::milliseconds kLong{5000};
constexpr uint64_t kRequestBytes = 256 * 1024;  // four entries of the fake's buffers
constexpr size_t kRoomBytes = 2 << 20;

// A GPU, a piece of its memory, and copies to and from it.
class OnCufile : public ::testing::Test {
 protected:
  void SetUp() override {
    device_ = test_device();
    if (device_ == nullptr) GTEST_SKIP() << "no GPU";
    if (const std::string refusal = cufile_refusal(*device_); !refusal.empty()) {
      if (!real_cuda()) ADD_FAILURE() << refusal;
      GTEST_SKIP() << refusal;
    }
    if (!real_cuda()) FAKE(cufile, fake_cufile_reset)();
    options_.queue_depth = 8;
    options_.request_bytes = kRequestBytes;
    stream_ = device_->make_stream();
    buffer_ = device_->allocate(kRoomBytes);
    host_ = device_->allocate_pinned(kRoomBytes);
    set_up_ = true;
  }

  void TearDown() override {
    if (!set_up_) return;
    backend_.reset();
    if (real_cuda()) return;
    FAKE(cufile, fake_cufile_reset)();
    const FakeCufileCounts counts = FAKE(cufile, fake_cufile_counts)();
    EXPECT_EQ(counts.opens, 1u);
    EXPECT_EQ(counts.handles, 0u) << "a File outlives its test, or its handle outlives the File";
    EXPECT_EQ(counts.buffers, 0u);
    EXPECT_EQ(counts.batches, 0u);
  }

  Backend& backend() {
    if (backend_ == nullptr) backend_ = make_cufile_backend(options_, *device_);
    return *backend_;
  }

  std::byte* memory() { return buffer_->data(); }

  void put(const Bytes& bytes, size_t at = 0) {
    std::memcpy(host_->data(), bytes.data(), bytes.size());
    stream_->copy_in(memory() + at, host_->data(), bytes.size());
    stream_->record()->wait();
  }

  Bytes get(size_t bytes, size_t at = 0) {
    stream_->copy_out(host_->data(), memory() + at, bytes);
    stream_->record()->wait();
    return Bytes(host_->data(), host_->data() + bytes);
  }

  // Submits and reaps all requests. Returns the completions by tag.
  std::map<uint64_t, Completion> run(const std::vector<Request>& requests) {
    std::map<uint64_t, Completion> completions;
    size_t submitted = 0;
    std::vector<Completion> room(16);
    while (completions.size() < requests.size()) {
      if (submitted < requests.size()) submitted += backend().submit(std::span(requests).subspan(submitted));
      const size_t given = backend().reap(room, 1, kLong);
      EXPECT_GT(given, 0u) << "nothing came within " << kLong.count() << " ms";
      if (given == 0) break;
      for (size_t i = 0; i < given; ++i) {
        EXPECT_EQ(completions.count(room[i].tag), 0u) << "two completions for one request";
        completions[room[i].tag] = std::move(room[i]);
      }
    }
    return completions;
  }

  Completion run_one(File& file, uint64_t offset, uint64_t length, Direction direction = Direction::kRead,
                     size_t at = 0) {
    const std::vector<Piece> pieces = {{offset, length, memory() + at}};
    return run({{0, direction, Conversion::kNone, &file, offset, length, pieces}})[0];
  }

  // Batches serve only files that are known to use DMA. One transfer finds that out.
  void learn_route(File& file) { EXPECT_FALSE(run_one(file, 0, 1).error); }

  void expect_bytes(const Bytes& content, uint64_t offset, uint64_t length, size_t at = 0) {
    const Bytes result = get(length, at);
    EXPECT_TRUE(std::equal(result.begin(), result.end(), content.begin() + static_cast<ptrdiff_t>(offset)))
        << "offset " << offset << " length " << length;
  }

  TemporaryFolder folder_;
  BackendOptions options_;
  std::shared_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<DeviceBuffer> buffer_;
  std::unique_ptr<PinnedBuffer> host_;
  std::unique_ptr<Backend> backend_;
  bool set_up_ = false;
};

// --- conformance, as in backend_test.cpp ---------------------------------------------------------

struct Case {
  bool batch;
  std::string trouble;  // "sound", "short", "late"
  uint64_t seed;
};

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  return std::string(info.param.batch ? "batch" : "blocking") + "_" + info.param.trouble + "_seed" +
         std::to_string(info.param.seed);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const bool batch : {false, true}) {
    for (const std::string trouble : {"sound", "short", "late"}) {
      for (const uint64_t seed : {7, 8}) all.push_back({batch, trouble, seed});
    }
  }
  return all;
}

class CufileConformance : public OnCufile, public ::testing::WithParamInterface<Case> {
 protected:
  void SetUp() override {
    OnCufile::SetUp();
    if (!set_up_) return;
    options_.cufile_batch = GetParam().batch;
    if (real_cuda()) return;
    FAKE(cufile, fake_cufile_set_seed)(GetParam().seed);
    if (GetParam().trouble == "short") FAKE(cufile, fake_cufile_set_trouble)(0.5, 0.3);
    if (GetParam().trouble == "late") FAKE(cufile, fake_cufile_set_late_us)(2000);
  }
};

TEST_P(CufileConformance, DeliversAnyRangeOfAFileOfAnySize) {
  for (const size_t size : {1, 511, 512, 513, 4095, 4096, 4097, 300001}) {
    const Bytes content = random_bytes(size, size);
    const auto file = File::open_for_reading(folder_.write(std::to_string(size), content));
    std::mt19937_64 random(size + GetParam().seed);
    std::vector<std::pair<uint64_t, uint64_t>> extents = {{0, std::min<uint64_t>(size, kRequestBytes)}, {size - 1, 1}};
    for (int i = 0; i < 14; ++i) {
      const uint64_t offset = random() % size;
      extents.push_back({offset, 1 + random() % std::min<uint64_t>(size - offset, kRequestBytes)});
    }
    learn_route(*file);
    std::vector<Piece> pieces;
    std::vector<Request> requests;
    size_t room = 0;
    std::vector<size_t> places;
    for (const auto& [offset, length] : extents) {
      if (room + length > kRoomBytes) break;
      places.push_back(room);
      pieces.push_back({offset, length, memory() + room});
      room += length + random() % 5;  // with any alignment
    }
    for (size_t i = 0; i < pieces.size(); ++i) {
      requests.push_back({i, Direction::kRead, Conversion::kNone, file.get(), extents[i].first, extents[i].second,
                          std::span(pieces).subspan(i, 1)});
    }
    for (auto& [tag, completion] : run(requests)) {
      ASSERT_FALSE(completion.error) << completion.error->message;
      const auto [offset, length] = extents[tag];
      expect_bytes(content, offset, length, places[tag]);
      ASSERT_EQ(completion.bytes[Route::kGds] + completion.bytes[Route::kGdsCompat], length);
      if (!real_cuda()) {
        ASSERT_EQ(completion.bytes[Route::kGds], length);
        ASSERT_EQ(completion.storage_bytes, length);
      }
    }
    if (HasFailure()) return;
  }
  if (real_cuda()) return;
  const FakeCufileCounts counts = FAKE(cufile, fake_cufile_counts)();
  EXPECT_EQ(counts.longest_entry > 0, GetParam().batch);
  EXPECT_LE(counts.longest_entry, 64u * 1024);
  EXPECT_LE(counts.most_entries_in_flight, 8u);
}

TEST_P(CufileConformance, SaysWhereAFileEndsTooEarly) {
  const std::string path = folder_.write("a", random_bytes(5000, 1));
  const auto file = File::open_for_reading(path);
  learn_route(*file);
  for (const auto& [offset, length] :
       {std::pair<uint64_t, uint64_t>{0, 5001}, {4999, 2}, {5000, 1}, {9000, 1000}, {0, 200000}}) {
    const Completion completion = run_one(*file, offset, length);
    const auto& error = completion.error;
    ASSERT_TRUE(error) << offset;
    EXPECT_EQ(error->code, ErrorCode::kCorrupt) << error->message;
    EXPECT_EQ(error->path, path);
    EXPECT_EQ(error->offset, offset);
    EXPECT_EQ(error->length, length);
    EXPECT_NE(error->message.find("ends at 5000 bytes"), std::string::npos) << error->message;
    EXPECT_EQ(RouteBytes(completion.bytes).bytes, RouteBytes().bytes);
  }
}

TEST_P(CufileConformance, WritesAnyRangeAndTouchesNoNeighbor) {
  std::mt19937_64 random(GetParam().seed);
  Bytes expected = random_bytes(600000, 4);
  const std::string path = folder_.write("a", expected);
  for (int round = 0; round < 20; ++round) {
    const auto file = File::open_for_writing(path, false);
    learn_route(*file);
    const uint64_t offset = random() % 500000;
    const uint64_t length = 1 + random() % 90000;
    const size_t at = random() % 5000;
    const Bytes source = random_bytes(length, round);
    put(source, at);
    std::copy(source.begin(), source.end(), expected.begin() + static_cast<ptrdiff_t>(offset));
    const Completion completion = run_one(*file, offset, length, Direction::kWrite, at);
    ASSERT_FALSE(completion.error) << completion.error->message;
    ASSERT_EQ(read_file(path), expected) << "round " << round << " offset " << offset << " length " << length;
  }
}

TEST_P(CufileConformance, LengthensAFile) {
  const std::string path = folder_.file("a");
  const Bytes content = random_bytes(4097, 5);
  put(content);
  const auto file = File::open_for_writing(path, true);
  const Completion completion = run_one(*file, 0, content.size(), Direction::kWrite);
  ASSERT_FALSE(completion.error) << completion.error->message;
  EXPECT_EQ(read_file(path), content);
}

TEST_P(CufileConformance, TakesAnyNumberOfRequestsAndGivesEachOneCompletion) {
  constexpr size_t kRequests = 100, kLength = 20000;
  const Bytes content = random_bytes(kRequests * kLength, 6);
  const auto file = File::open_for_reading(folder_.write("a", content));
  learn_route(*file);
  std::vector<Piece> pieces;
  std::vector<Request> requests;
  for (size_t i = 0; i < kRequests; ++i) pieces.push_back({i * kLength, kLength, memory() + i * kLength});
  for (size_t i = 0; i < kRequests; ++i) {
    requests.push_back(
        {i, Direction::kRead, Conversion::kNone, file.get(), i * kLength, kLength, std::span(pieces).subspan(i, 1)});
  }
  for (auto& [tag, completion] : run(requests)) ASSERT_FALSE(completion.error) << completion.error->message;
  expect_bytes(content, 0, content.size());
}

INSTANTIATE_TEST_SUITE_P(All, CufileConformance, ::testing::ValuesIn(cases()), name_of);

// --- every branch, with the fake -----------------------------------------------------------------

class FakeCufile : public OnCufile {
 protected:
  void SetUp() override {
    SKIP_WITH_REAL_CUDA();
    OnCufile::SetUp();
    content_ = random_bytes(300000, 1);
    path_ = folder_.write("content", content_);
  }

  static void expect_error(const Completion& completion, ErrorCode code, const std::vector<std::string>& parts) {
    ASSERT_TRUE(completion.error);
    EXPECT_EQ(completion.error->code, code) << completion.error->message;
    for (const std::string& part : parts) {
      EXPECT_NE(completion.error->message.find(part), std::string::npos) << completion.error->message;
    }
    EXPECT_EQ(RouteBytes(completion.bytes).bytes, RouteBytes().bytes);
  }

  Bytes content_;
  std::string path_;
};

TEST_F(FakeCufile, SaysWhatItCan) {
  const Capabilities blocking = backend().capabilities();
  EXPECT_STREQ(blocking.name, "cufile");
  EXPECT_EQ(blocking.queue_depth, 1u);
  EXPECT_EQ(blocking.max_request_bytes, kRequestBytes);
  EXPECT_TRUE(blocking.reaches_device);
  options_.cufile_batch = true;
  options_.queue_depth = 64;
  EXPECT_EQ(make_cufile_backend(options_, *device_)->capabilities().queue_depth, 16u)
      << "the driver's batches end there";
  options_.queue_depth = 1;
  EXPECT_EQ(make_cufile_backend(options_, *device_)->capabilities().queue_depth, 1u);
}

TEST_F(FakeCufile, RefusesADeviceThatIsNoGpu) {
  const auto cpu = host_device();
  EXPECT_NE(cufile_refusal(*cpu).find("batches are on cpu"), std::string::npos);
  const Error error = error_of([&] { make_cufile_backend(options_, *cpu); });
  EXPECT_EQ(error.code, ErrorCode::kUnavailable);
}

TEST_F(FakeCufile, AThreadNeedsNoDeviceOfItsOwn) {
  const auto file = File::open_for_reading(path_);
  Completion completion;
  std::thread([&] {
    completion = run_one(*file, 1, 5000);
    backend_.reset();
  }).join();
  ASSERT_FALSE(completion.error) << completion.error->message;
  expect_bytes(content_, 1, 5000);
}

TEST_F(FakeCufile, CountsAsDmaWhatTheStatisticsSawGoByDmaAndNothingElse) {
  const auto file = File::open_for_reading(path_);
  const std::pair<int, Route> routes[] = {
      {0, Route::kGdsCompat}, {1, Route::kGds}, {2, Route::kGds}, {4, Route::kGdsCompat}};
  for (const bool batch : {false, true}) {
    options_.cufile_batch = batch;
    backend_.reset();
    for (const auto& [route, expected] : routes) {
      FAKE(cufile, fake_cufile_set_route)(route);
      for (const Direction direction : {Direction::kRead, Direction::kRead, Direction::kWrite}) {
        const auto writable = File::open_for_writing(folder_.file("b"), true);
        File& used = direction == Direction::kRead ? *file : *writable;
        Completion completion = run_one(used, 10, 200000, direction);
        ASSERT_FALSE(completion.error) << completion.error->message;
        EXPECT_EQ(completion.bytes[expected], 200000u) << "route " << route;
      }
    }
  }
  const auto noted = noted_fallbacks();
  EXPECT_EQ(std::count_if(noted.begin(), noted.end(),
                          [](const std::string& line) {
                            return line.find("cuFile copies through host memory") != std::string::npos &&
                                   line.find("gdscheck -p") != std::string::npos;
                          }),
            1);
}

TEST_F(FakeCufile, AMixtureIsNotCountedAsDma) {
  FAKE(cufile, fake_cufile_set_route)(3);
  FAKE(cufile, fake_cufile_set_trouble)(0.9, 0);  // many calls for each request
  const auto file = File::open_for_reading(path_);
  uint64_t compat = 0;
  for (int i = 0; i < 20; ++i) {
    Completion completion = run_one(*file, 0, 200000);
    compat += completion.bytes[Route::kGdsCompat];
  }
  EXPECT_GT(compat, 10u * 200000);
}

TEST_F(FakeCufile, StrictTakesNothingButDma) {
  options_.strict = true;
  const auto file = File::open_for_reading(path_);
  EXPECT_FALSE(run_one(*file, 0, 5000).error);
  FAKE(cufile, fake_cufile_set_route)(0);
  expect_error(run_one(*file, 0, 5000), ErrorCode::kUnavailable, {"through host memory", path_, "strict", "gdscheck"});
}

TEST_F(FakeCufile, BatchesAreForFilesThatAreKnownToGoByDma) {
  options_.cufile_batch = true;
  const auto file = File::open_for_reading(path_);
  const auto entries = [] { return FAKE(cufile, fake_cufile_counts)().entries; };
  const uint64_t before = entries();
  FAKE(cufile, fake_cufile_set_route)(0);
  run_one(*file, 0, 200000);
  run_one(*file, 0, 200000);
  EXPECT_EQ(entries(), before) << "a copy through host memory can hang in a batch";
  FAKE(cufile, fake_cufile_set_route)(2);
  run_one(*file, 0, 200000);
  EXPECT_EQ(entries(), before);
  Completion completion = run_one(*file, 0, 200000);
  EXPECT_EQ(entries(), before + 4) << "200000 bytes are four entries of at most 64 KiB";
  EXPECT_EQ(completion.bytes[Route::kGds], 200000u);
  FAKE(cufile, fake_cufile_set_route)(0);
  completion = run_one(*file, 0, 200000);
  EXPECT_EQ(completion.bytes[Route::kGdsCompat], 200000u);
  const uint64_t then = entries();
  run_one(*file, 0, 200000);
  EXPECT_EQ(entries(), then);
}

TEST_F(FakeCufile, AllThreadsShareAFilesHandleWhichIsReleasedWithTheFile) {
  const uint64_t before = FAKE(cufile, fake_cufile_counts)().handles;
  {
    std::vector<std::shared_ptr<File>> files;
    for (int i = 0; i < 5; ++i) files.push_back(File::open_for_reading(path_));
    std::vector<std::thread> threads;
    for (size_t i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] {
        const auto own = make_cufile_backend(options_, *device_);
        std::vector<Completion> room(1);
        for (int round = 0; round < 20; ++round) {
          for (const auto& file : files) {
            const std::vector<Piece> pieces = {{0, 1000, memory() + i * 1000}};
            own->submit(std::vector<Request>{{0, Direction::kRead, Conversion::kNone, file.get(), 0, 1000, pieces}});
            EXPECT_EQ(own->reap(room, 1, kLong), 1u);
            EXPECT_FALSE(room[0].error);
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(FAKE(cufile, fake_cufile_counts)().handles, before + files.size());
  }
  EXPECT_EQ(FAKE(cufile, fake_cufile_counts)().handles, before);
}

TEST_F(FakeCufile, FilesThatATableClosesTakeTheirHandlesWithThem) {
  std::vector<std::string> paths;
  for (int i = 0; i < 40; ++i) paths.push_back(folder_.write("f" + std::to_string(i), random_bytes(1000, i)));
  const size_t limit = count_descriptors() + 60;  // tables keep a quarter of it open: their files have two each
  const DescriptorLimit low(limit);
  const auto table = table_of(paths);
  for (int round = 0; round < 2; ++round) {
    for (uint32_t i = 0; i < paths.size(); ++i) {
      const auto file = table->get(i);
      ASSERT_FALSE(run_one(*file, 0, 1000).error);
      expect_bytes(random_bytes(1000, i), 0, 1000);
      EXPECT_LE(FAKE(cufile, fake_cufile_counts)().handles, limit / 4 + 1);
    }
  }
  EXPECT_LT(limit / 4 + 1, paths.size());
}

TEST_F(FakeCufile, AHandleThatIsRefusedIsAnErrorWithItsRemedyAndAskedForOnce) {
  const auto file = File::open_for_reading(path_);
  FAKE(cufile, fake_cufile_fail_next)("cuFileHandleRegister", 5027);
  for (int i = 0; i < 2; ++i) {
    expect_error(run_one(*file, 0, 1000), ErrorCode::kUnavailable,
                 {"could not register with cuFile '" + path_, "CU_FILE_HANDLE_NOT_REGISTERED (5027)", "/run/udev"});
  }
  const auto again = File::open_for_reading(path_);
  EXPECT_FALSE(run_one(*again, 0, 1000).error);
}

TEST_F(FakeCufile, EveryCodeHasANameAndARemedyWhereThereIsOne) {
  const std::pair<int, const char*> codes[] = {{5001, "CU_FILE_DRIVER_NOT_INITIALIZED"},
                                               {5008, "ext4 or xfs"},
                                               {5011, "CUDA_ERROR_INVALID_CONTEXT"},
                                               {5016, "max_device_pinned_mem_size_kb"},
                                               {5020, "refuses O_DIRECT"},
                                               {5028, "ALREADY_REGISTERED"},
                                               {5030, "/run/udev"},
                                               {5037, "io_batchsize"},
                                               {5049, "CU_FILE_BATCH_NOCOMPAT_ERROR"},
                                               {5999, "cuFile error 5999"}};
  for (const auto& [code, text] : codes) {
    const std::string said = CufileApi::describe({code, 201});
    EXPECT_NE(said.find(text), std::string::npos) << said;
    EXPECT_NE(said.find(std::to_string(code)), std::string::npos) << said;
  }
}

TEST_F(FakeCufile, ACallThatFailsIsAnErrorOfItsRequestAlone) {
  const auto file = File::open_for_reading(path_);
  FAKE(cufile, fake_cufile_fail_next)("cuFileRead", EIO);
  const Completion completion = run_one(*file, 100, 1000);
  expect_error(completion, ErrorCode::kIo,
               {"could not read with cuFile '" + path_ + "' (offset 100, length 1000 bytes)", "kernel's log"});
  EXPECT_EQ(completion.error->system_errno, EIO);
  FAKE(cufile, fake_cufile_fail_next)("cuFileRead", 5010);
  expect_error(run_one(*file, 100, 1000), ErrorCode::kDevice, {path_, "CU_FILE_NVFS_DRIVER_ERROR (5010)"});
  FAKE(cufile, fake_cufile_fail_next)("cuFileRead", 5043);  // "try again"
  EXPECT_FALSE(run_one(*file, 100, 1000).error);
  expect_bytes(content_, 100, 1000);
}

TEST_F(FakeCufile, AFileThatWasTruncatedIsTheErrorWhateverTheLibrarySays) {
  const auto file = File::open_for_reading(path_);
  ASSERT_EQ(::truncate(path_.c_str(), 1000), 0);
  FAKE(cufile, fake_cufile_fail_next)("cuFileRead", 5044);
  expect_error(run_one(*file, 0, 2000), ErrorCode::kCorrupt, {"ends at 1000 bytes"});
}

TEST_F(FakeCufile, AWriteToAFileOpenForReadingIsTheSystemsError) {
  const auto file = File::open_for_reading(path_);
  const Completion completion = run_one(*file, 0, 1000, Direction::kWrite);
  expect_error(completion, ErrorCode::kIo, {"could not write with cuFile"});
  EXPECT_EQ(completion.error->system_errno, EBADF);
}

TEST_F(FakeCufile, ACallThatNeverGetsAnywhereEnds) {
  const auto file = File::open_for_reading(path_);
  FAKE(cufile, fake_cufile_set_trouble)(0, 1);
  expect_error(run_one(*file, 0, 1000), ErrorCode::kIo, {path_});
}

TEST_F(FakeCufile, EachEntryOfABatchIsLookedAt) {
  options_.cufile_batch = true;
  const auto file = File::open_for_reading(path_);
  learn_route(*file);
  for (uint64_t failing = 0; failing < 4; ++failing) {
    FAKE(cufile, fake_cufile_fail_after)("entry", failing, EIO);
    const Completion completion = run_one(*file, 0, 200000);
    expect_error(completion, ErrorCode::kIo, {"could not read with cuFile '" + path_, "kernel's log"});
    FAKE(cufile, fake_cufile_reset)();
    ASSERT_FALSE(run_one(*file, 0, 200000).error);
    expect_bytes(content_, 0, 200000);
  }
  FAKE(cufile, fake_cufile_fail_next)("entry", 5010);
  expect_error(run_one(*file, 0, 1000), ErrorCode::kDevice, {"CU_FILE_NVFS_DRIVER_ERROR"});
  const std::pair<int, int> statuses[] = {
      {CufileApi::kTimeout, ETIMEDOUT}, {CufileApi::kCanceled, ECANCELED}, {CufileApi::kInvalid, EINVAL}, {64, EIO}};
  for (const auto& [status, system_errno] : statuses) {
    FAKE(cufile, fake_cufile_end_next_entry)(status);
    const Completion completion = run_one(*file, 0, 1000);
    ASSERT_TRUE(completion.error) << "status " << status;
    EXPECT_EQ(completion.error->system_errno, system_errno) << completion.error->message;
  }
}

TEST_F(FakeCufile, AFailedEntryHarmsNoOtherRequest) {
  options_.cufile_batch = true;
  const auto file = File::open_for_reading(path_);
  learn_route(*file);
  FAKE(cufile, fake_cufile_set_late_us)(1000);
  for (uint64_t failing = 0; failing < 8; ++failing) {
    FAKE(cufile, fake_cufile_fail_after)("entry", failing, EIO);
    std::vector<Piece> pieces;
    std::vector<Request> requests;
    for (size_t i = 0; i < 8; ++i) pieces.push_back({i * 30000, 30000, memory() + i * 30000});
    for (size_t i = 0; i < 8; ++i) {
      requests.push_back(
          {i, Direction::kRead, Conversion::kNone, file.get(), i * 30000, 30000, std::span(pieces).subspan(i, 1)});
    }
    size_t failed = 0;
    for (const auto& [tag, completion] : run(requests)) {
      if (completion.error) {
        ++failed;
      } else {
        expect_bytes(content_, tag * 30000, 30000, tag * 30000);
      }
    }
    EXPECT_EQ(failed, 1u);
  }
}

TEST_F(FakeCufile, ABatchThatIsRefusedGoesByCalls) {
  options_.cufile_batch = true;
  const auto file = File::open_for_reading(path_);
  learn_route(*file);
  for (const char* name : {"cuFileBatchIOSetUp", "cuFileBatchIOSubmit"}) {
    backend_.reset();  // the next one must set up a batch
    FAKE(cufile, fake_cufile_fail_next)(name, 5037);
    const uint64_t before = FAKE(cufile, fake_cufile_counts)().entries;
    Completion completion = run_one(*file, 3, 100000);
    ASSERT_FALSE(completion.error) << completion.error->message;
    EXPECT_EQ(FAKE(cufile, fake_cufile_counts)().entries, before);
    EXPECT_EQ(completion.bytes[Route::kGds], 100000u);
    expect_bytes(content_, 3, 100000);
    ASSERT_FALSE(run_one(*file, 3, 100000).error);
    EXPECT_EQ(FAKE(cufile, fake_cufile_counts)().entries, before + 2);
  }
  const auto noted = noted_fallbacks();
  EXPECT_TRUE(std::any_of(noted.begin(), noted.end(), [](const std::string& line) {
    return line.find("cuFile refused a batch") != std::string::npos && line.find("5037") != std::string::npos;
  }));
}

TEST_F(FakeCufile, ABatchWhoseEndIsUnknownIsGivenUp) {
  options_.cufile_batch = true;
  const auto file = File::open_for_reading(path_);
  learn_route(*file);
  FAKE(cufile, fake_cufile_fail_next)("cuFileBatchIOGetStatus", 5041);  // "try again"
  ASSERT_FALSE(run_one(*file, 0, 1000).error);
  FAKE(cufile, fake_cufile_set_late_us)(1000000);
  FAKE(cufile, fake_cufile_fail_next)("cuFileBatchIOGetStatus", 5006);
  expect_error(run_one(*file, 0, 1000), ErrorCode::kDevice,
               {"learn from cuFile what became of a transfer of '" + path_, "CU_FILE_DRIVER_CLOSING"});
  FAKE(cufile, fake_cufile_set_late_us)(0);
  ASSERT_FALSE(run_one(*file, 0, 1000).error);
  expect_bytes(content_, 0, 1000);
}

TEST_F(FakeCufile, ReapWaitsNoLongerThanItsTimeout) {
  options_.cufile_batch = true;
  const auto file = File::open_for_reading(path_);
  learn_route(*file);
  FAKE(cufile, fake_cufile_set_late_us)(2000000);
  const std::vector<Piece> pieces = {{0, 200000, memory()}};
  const std::vector<Request> requests = {{9, Direction::kRead, Conversion::kNone, file.get(), 0, 200000, pieces}};
  ASSERT_EQ(backend().submit(requests), 1u);
  std::vector<Completion> room(1);
  const auto before = std::chrono::steady_clock::now();
  EXPECT_EQ(backend().reap(room, 0, kLong), 0u);
  EXPECT_EQ(backend().reap(room, 1, std::chrono::milliseconds(20)), 0u);
  EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(1));
  ASSERT_EQ(backend().reap(room, 1, kLong), 1u);
  EXPECT_EQ(room[0].tag, 9u);
}

TEST_F(FakeCufile, TakesOneUnconvertedPieceARequest) {
  const auto file = File::open_for_reading(path_);
  const std::vector<Piece> two = {{0, 100, memory()}, {200, 100, memory() + 100}};
  expect_error(run({{0, Direction::kRead, Conversion::kNone, file.get(), 0, 300, two}})[0], ErrorCode::kInvalidArgument,
               {"one unconverted piece"});
  const std::vector<Piece> gap = {{10, 100, memory()}};
  expect_error(run({{0, Direction::kRead, Conversion::kNone, file.get(), 0, 110, gap}})[0], ErrorCode::kInvalidArgument,
               {"one unconverted piece"});
  const std::vector<Piece> one = {{0, 100, memory()}};
  expect_error(run({{0, Direction::kRead, Conversion::kU16ToI64, file.get(), 0, 100, one}})[0],
               ErrorCode::kInvalidArgument, {"one unconverted piece"});
}

// Runs in a process of its own, because a refusal is remembered for the file system.
TEST_F(FakeCufile, WithoutODirectItUsesTheOtherDescriptorUnlessThatIsForbidden) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        const auto file = File::open_for_reading(path_);
        file->refuse_direct("a test says so");
        const bool moved = !run_one(*file, 0, 1000).error;
        options_.direct = DirectMode::kAlways;
        backend_.reset();
        const Completion refused = run_one(*file, 0, 1000);
        std::fprintf(stderr, "%d %s", moved, refused.error ? refused.error->message.c_str() : "");
        ::_exit(7);
      },
      ::testing::ExitedWithCode(7), "1 O_DIRECT was asked for, but the file system of '.*content' refuses it");
}

TEST_F(FakeCufile, RegisteredMemoryIsNamedByItsBeginAndSharedByItsUsers) {
  const auto counts = [] { return FAKE(cufile, fake_cufile_counts)(); };
  const std::span<std::byte> all(memory(), kRoomBytes);
  backend().expect_memory(all);
  const auto second = register_cufile_memory(all);
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(counts().buffers, 1u);
  const auto file = File::open_for_reading(path_);
  const uint64_t before = counts().registered_bases;
  for (const bool batch : {false, true}) {
    options_.cufile_batch = batch;
    backend_ = make_cufile_backend(options_, *device_);  // the old one releases the memory; `second` keeps it
    for (int i = 0; i < 2; ++i) {
      ASSERT_FALSE(run_one(*file, 5, 200000, Direction::kRead, 4097).error);
      expect_bytes(content_, 5, 200000, 4097);
    }
  }
  EXPECT_EQ(counts().registered_bases, before + 2 + 2 * 4) << "two calls, two batches of four";
  EXPECT_EQ(counts().buffers, 1u);
}

TEST_F(FakeCufile, MemoryThatIsNotRegisteredServesAsWell) {
  device_->bind_thread();
  const std::span<std::byte> all(memory(), kRoomBytes);
  FAKE(cufile, fake_cufile_fail_next)("cuFileBufRegister", 5016);
  EXPECT_EQ(register_cufile_memory(all), nullptr);
  FAKE(cufile, fake_cufile_fail_next)("cuFileBufRegister", 5036);
  backend().expect_memory(all);
  const auto noted = noted_fallbacks();
  EXPECT_TRUE(std::any_of(noted.begin(), noted.end(), [](const std::string& line) {
    return line.find("could not register memory") != std::string::npos &&
           line.find("CU_FILE_INVALID_MAPPING_SIZE (5016)") != std::string::npos;
  }));
  const auto file = File::open_for_reading(path_);
  ASSERT_FALSE(run_one(*file, 5, 200000).error);
  expect_bytes(content_, 5, 200000);
}

TEST_F(FakeCufile, RegisteredBytesHaveALimit) {
  device_->bind_thread();
  std::vector<std::unique_ptr<DeviceBuffer>> buffers;
  std::vector<std::shared_ptr<void>> users;
  for (int i = 0; i < 5; ++i) {  // of 2 MiB each; the fake's driver pins 8 MiB
    buffers.push_back(device_->allocate(kRoomBytes));
    users.push_back(register_cufile_memory({buffers.back()->data(), kRoomBytes}));
    EXPECT_EQ(users.back() != nullptr, i < 4);
  }
  users.front().reset();
  users.back() = register_cufile_memory({buffers.back()->data(), kRoomBytes});
  EXPECT_NE(users.back(), nullptr);
  EXPECT_EQ(register_cufile_memory({}), nullptr);
  users.clear();
}

TEST_F(FakeCufile, FaultsWrapItLikeTheOthers) {
  options_.faults = "fail_at=0,error=28";
  backend_ =
      std::make_unique<FaultyBackend>(make_cufile_backend(options_, *device_), FaultPlan::parse(options_.faults));
  EXPECT_TRUE(backend().capabilities().reaches_device);
  backend().expect_memory({memory(), kRoomBytes});
  EXPECT_EQ(FAKE(cufile, fake_cufile_counts)().buffers, 1u);
  const auto file = File::open_for_reading(path_);
  EXPECT_EQ(run_one(*file, 0, 1000).error->system_errno, ENOSPC);
  EXPECT_FALSE(run_one(*file, 0, 1000).error);
}

TEST_F(FakeCufile, AForkedChildGetsAnErrorWithARemedyAndReleasesNothing) {
  auto file = File::open_for_reading(path_);
  learn_route(*file);
  backend().expect_memory({memory(), kRoomBytes});
  int channel[2];
  ASSERT_EQ(::pipe(channel), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    file.reset();
    std::string said = "nothing was thrown";
    try {
      CufileApi::get();
    } catch (const Failure& failure) {
      said = failure.what();
    }
    const bool written = ::write(channel[1], said.data(), said.size()) == static_cast<ssize_t>(said.size());
    ::_exit(written ? 0 : 1);
  }
  ::close(channel[1]);
  char text[1000] = {};
  EXPECT_GT(::read(channel[0], text, sizeof(text) - 1), 0);
  ::close(channel[0]);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_NE(std::string(text).find("'spawn'"), std::string::npos) << text;
}

// --- in a process of its own, where the library is not loaded yet --------------------------------

class FreshCufile : public ::testing::Test {
 protected:
  void SetUp() override {
    SKIP_WITH_REAL_CUDA();
    ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  }
  [[noreturn]] static void ask(bool strict = false) {
    try {
      const auto device = cuda_device(0);
      std::fprintf(stderr, "refusal: '%s'\n", cufile_refusal(*device).c_str());
      BackendOptions options;
      options.strict = strict;
      make_cufile_backend(options, *device);
    } catch (const Failure& failure) {
      std::fprintf(stderr, "%d: %s\n", static_cast<int>(failure.error().code), failure.what());
    }
    ::_exit(7);
  }
};

bool machine_has_cufile() {
  const auto loads = [](const char* name) { return ::dlopen(name, RTLD_LAZY | RTLD_LOCAL) != nullptr; };
  return loads("libcufile.so.0") || loads("libcufile.so") || loads("/usr/local/cuda/lib64/libcufile.so.0");
}

TEST_F(FreshCufile, SaysThatThereIsNoLibraryAndWhereItLooked) {
  EXPECT_EXIT(
      {
        ::setenv("GDSDATA_LIBCUFILE", "/nowhere/libcufile.so.0", 1);
        ask();
      },
      ::testing::ExitedWithCode(7), "2: cuFile: no libcufile was found \\(/nowhere/libcufile.so.0");
  if (machine_has_cufile()) GTEST_SKIP() << "this machine has one";
  EXPECT_EXIT(
      {
        ::unsetenv("GDSDATA_LIBCUFILE");
        set_cufile_search_path({"/nowhere/nvidia/cu13/lib/libcufile.so.0"});
        ask();
      },
      ::testing::ExitedWithCode(7), "2: cuFile: no libcufile was found .*/nowhere/nvidia.*pip install nvidia-cufile");
}

TEST_F(FreshCufile, FindsALibraryOnTheSearchPath) {
  if (machine_has_cufile()) GTEST_SKIP() << "this machine has one, which comes first";
  EXPECT_EXIT(
      {
        const std::string path = fake_library("cufile");
        ::unsetenv("GDSDATA_LIBCUFILE");
        set_cufile_search_path({"/nowhere/libcufile.so.0", path});
        ask();
      },
      ::testing::ExitedWithCode(7), "refusal: ''");
}

TEST_F(FreshCufile, SaysThatALibraryIsTooOld) {
  EXPECT_EXIT(
      {
        ::setenv("GDSDATA_LIBCUFILE", "libdl.so.2", 1);
        ask();
      },
      ::testing::ExitedWithCode(7), "2: cuFile: the library has no cuFileDriverOpen; .*CUDA 12.1");
}

TEST_F(FreshCufile, SaysThatTheDriverDoesNotOpen) {
  EXPECT_EXIT(
      {
        FAKE(cufile, fake_cufile_fail_next)("cuFileDriverOpen", 5001);
        ask();
      },
      ::testing::ExitedWithCode(7),
      "2: cuFile: its driver does not open: CU_FILE_DRIVER_NOT_INITIALIZED \\(5001\\); load nvidia-fs");
  EXPECT_EXIT(
      {
        FAKE(cufile, fake_cufile_fail_next)("cuFileDriverGetProperties", 5002);
        ask();
      },
      ::testing::ExitedWithCode(7), "2: cuFile: its driver has no properties: CU_FILE_DRIVER_INVALID_PROPS");
}

TEST_F(FreshCufile, ALibraryWithoutStatisticsIsNotTrustedByStrict) {
  for (const char* name : {"cuFileSetStatsLevel", "cuFileStatsStart", "cuFileGetStatsL3"}) {
    EXPECT_EXIT(
        {
          FAKE(cufile, fake_cufile_fail_next)(name, 5022);
          ask(true);
        },
        ::testing::ExitedWithCode(7), "refusal: ''\n2: cuFile: bytes cannot be seen to go by DMA");
  }
}

}  // namespace
}  // namespace gdsdata::testing
