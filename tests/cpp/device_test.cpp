// The engine's expectations of a GPU: bytes arrive where and when streams and events say, errors
// have the driver's name, and no object is left. Runs with the fake driver or a GPU (fakes.h).
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>

#include "device/cuda_api.h"
#include "device/gather_kernel.h"
#include "fakes.h"
#include "testing.h"

namespace gdsdata::testing {
namespace {

constexpr size_t kRoomBytes = 1 << 20;

class OnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    device_ = test_device();
    if (device_ == nullptr) GTEST_SKIP() << "no GPU";
    if (!real_cuda()) before_ = FAKE(cuda, fake_cuda_live_objects)();
    stream_ = device_->make_stream();
    buffer_ = device_->allocate(kRoomBytes);
    in_ = device_->allocate_pinned(kRoomBytes);
    out_ = device_->allocate_pinned(kRoomBytes);
  }

  void TearDown() override {
    if (device_ == nullptr) return;
    if (stream_ != nullptr) stream_->record()->wait();
    stream_.reset();
    buffer_.reset();
    in_.reset();
    out_.reset();
    if (real_cuda()) return;
    FAKE(cuda, fake_cuda_set_delay_us)(200);
    // Events are not compared, because they are kept for reuse.
    const FakeCudaObjects after = FAKE(cuda, fake_cuda_live_objects)();
    EXPECT_EQ(after.streams, before_.streams);
    EXPECT_EQ(after.allocations, before_.allocations);
    EXPECT_EQ(after.registrations, before_.registrations);
  }

  void fill_input(uint64_t seed) {
    const Bytes bytes = random_bytes(kRoomBytes, seed);
    std::memcpy(in_->data(), bytes.data(), kRoomBytes);
  }

  // Returns the content of device memory, by a separate copy.
  Bytes on_device(size_t bytes, size_t offset = 0) {
    stream_->copy_out(out_->data(), buffer_->data() + offset, bytes);
    stream_->record()->wait();
    return Bytes(out_->data(), out_->data() + bytes);
  }

  std::shared_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<DeviceBuffer> buffer_;
  std::unique_ptr<PinnedBuffer> in_, out_;
  FakeCudaObjects before_{};
};

TEST_F(OnGpu, CopiesOfAnySizeAndAlignmentComeBackAsTheyWent) {
  fill_input(1);
  std::mt19937_64 random(1);
  for (const size_t bytes : {0, 1, 2, 15, 16, 17, 511, 512, 513, 4095, 4096, 4097, 300001}) {
    for (const size_t askew : {0, 1, 7, 511}) {
      const size_t from = random() % 1000;
      stream_->copy_in(buffer_->data() + askew, in_->data() + from, bytes);
      const Bytes result = on_device(bytes, askew);
      ASSERT_TRUE(std::equal(result.begin(), result.end(), in_->data() + from))
          << bytes << " bytes, askew by " << askew;
    }
  }
}

TEST_F(OnGpu, WorkOfOneStreamHappensInItsOrder) {
  for (int round = 0; round < 50; ++round) {
    for (int i = 0; i < 8; ++i) {
      in_->data()[i * 64] = static_cast<std::byte>(round + i);
      stream_->copy_in(buffer_->data(), in_->data() + i * 64, 1);
    }
    ASSERT_EQ(on_device(1)[0], static_cast<std::byte>(round + 7));
  }
}

TEST_F(OnGpu, AnEventEndsAfterAllThatWasPutInBeforeIt) {
  fill_input(2);
  const auto second = device_->make_stream();
  for (int round = 0; round < 50; ++round) {
    in_->data()[0] = static_cast<std::byte>(round);
    stream_->copy_in(buffer_->data(), in_->data(), kRoomBytes);
    const auto copied = stream_->record();
    second->wait(*copied);
    second->copy_out(out_->data(), buffer_->data(), kRoomBytes);
    const auto back = second->record();
    back->wait();
    ASSERT_TRUE(back->done());
    ASSERT_TRUE(copied->done()) << "the second stream did not wait for the copy";
    ASSERT_EQ(std::memcmp(in_->data(), out_->data(), kRoomBytes), 0) << "round " << round;
  }
}

TEST_F(OnGpu, AWaitIsForWhatTheEventStoodForThen) {
  SKIP_WITH_REAL_CUDA();
  FAKE(cuda, fake_cuda_set_delay_us)(0);
  const auto second = device_->make_stream();
  auto first = stream_->record();
  second->wait(*first);
  first.reset();  // the next record reuses the driver's event
  FAKE(cuda, fake_cuda_set_delay_us)(20000);
  for (int i = 0; i < 6; ++i) stream_->copy_in(buffer_->data(), in_->data(), 1);
  const auto later = stream_->record();
  second->record()->wait();
  EXPECT_FALSE(later->done()) << "the second stream waited for a later recording";
}

TEST_F(OnGpu, AStreamRefusesAnEventOfAnotherKindOfDevice) {
  class Foreign final : public Event {
   public:
    bool done() override { return true; }
    void wait() override {}
  } foreign;
  const Error error = error_of([&] { stream_->wait(foreign); });
  EXPECT_EQ(error.code, ErrorCode::kInvalidArgument);
  EXPECT_NE(error.message.find("of another kind"), std::string::npos) << error.message;
}

TEST_F(OnGpu, CopiesAreNotDoneWhenTheirCallReturns) {
  SKIP_WITH_REAL_CUDA();
  FAKE(cuda, fake_cuda_set_delay_us)(20000);
  size_t late = 0;
  for (int round = 0; round < 10; ++round) {
    stream_->copy_in(buffer_->data(), in_->data(), 4096);
    late += stream_->record()->done() ? 0 : 1;
  }
  EXPECT_GT(late, 0u) << "the fake driver is too fast to show a missing wait";
}

TEST_F(OnGpu, AnEventIsAwaitedByManyThreads) {
  fill_input(3);
  stream_->copy_in(buffer_->data(), in_->data(), kRoomBytes);
  stream_->copy_out(out_->data(), buffer_->data(), kRoomBytes);
  const auto event = stream_->record();
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      event->wait();
      right += std::memcmp(in_->data(), out_->data(), kRoomBytes) == 0 ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 4);
}

TEST_F(OnGpu, AForeignStreamIsUsedAndNotDestroyed) {
  device_->bind_thread();
  const CudaApi& api = CudaApi::get();
  CudaApi::Stream theirs = nullptr;
  api.check(api.stream_create(&theirs, CudaApi::kStreamNonBlocking), "making a stream");
  fill_input(4);
  for (const uintptr_t handle : {reinterpret_cast<uintptr_t>(theirs), uintptr_t{0}}) {
    const auto foreign = device_->foreign_stream(handle);
    stream_->copy_in(buffer_->data(), in_->data(), 4097);
    foreign->wait(*stream_->record());
    foreign->copy_out(out_->data(), buffer_->data(), 4097);
    foreign->record()->wait();
    EXPECT_EQ(std::memcmp(in_->data(), out_->data(), 4097), 0);
    std::memset(out_->data(), 0, 4097);
  }
  EXPECT_EQ(api.stream_destroy(theirs), CudaApi::kSuccess) << "the stream went with the object";
}

TEST_F(OnGpu, WorkGoesOnWhenItsStreamIsGone) {
  fill_input(5);
  std::shared_ptr<Event> event;
  {
    const auto passing = device_->make_stream();
    passing->copy_in(buffer_->data(), in_->data(), kRoomBytes);
    event = passing->record();
  }
  event->wait();
  EXPECT_EQ(std::memcmp(on_device(kRoomBytes).data(), in_->data(), kRoomBytes), 0);
}

TEST_F(OnGpu, TheThreadsOwnContextIsAsBefore) {
  const auto second = real_cuda() ? nullptr : test_device(1);
  if (second == nullptr) GTEST_SKIP() << "one GPU";
  second->bind_thread();
  const CudaApi& api = CudaApi::get();
  CudaApi::Context before = nullptr, after = nullptr;
  ASSERT_EQ(api.context_pop(&before), CudaApi::kSuccess);
  ASSERT_EQ(api.context_push(before), CudaApi::kSuccess);
  stream_->copy_in(buffer_->data(), in_->data(), 1);
  stream_->record()->wait();
  ASSERT_EQ(api.context_pop(&after), CudaApi::kSuccess);
  EXPECT_EQ(before, after);
  ASSERT_EQ(api.context_push(before), CudaApi::kSuccess);
}

TEST_F(OnGpu, EachDeviceHasStreamsAndMemoryOfItsOwn) {
  const auto second = test_device(1);
  if (second == nullptr) GTEST_SKIP() << "one GPU";
  EXPECT_EQ(second->name(), "cuda:1");
  EXPECT_EQ(second->ordinal(), 1);
  EXPECT_EQ(cuda_device(1), second);
  EXPECT_FALSE(second->host_addressable());
  fill_input(6);
  const auto buffer = second->allocate(4097);
  const auto stream = second->make_stream();
  stream->copy_in(buffer->data(), in_->data(), 4097);  // pinned by the first one, but portable
  const auto copied = stream->record();
  stream->copy_out(out_->data(), buffer->data(), 4097);
  stream->record()->wait();
  EXPECT_TRUE(copied->done());
  EXPECT_EQ(std::memcmp(in_->data(), out_->data(), 4097), 0);
}

// A file mapped as the engine maps files, and registered.
class Mapped {
 public:
  explicit Mapped(const std::string& path, size_t bytes) : bytes_(bytes) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    void* memory = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
    ::close(fd);
    if (memory == MAP_FAILED) std::abort();
    memory_ = static_cast<std::byte*>(memory);
  }
  ~Mapped() { ::munmap(memory_, bytes_); }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;
  const std::byte* data() const { return memory_; }

 private:
  size_t bytes_;
  std::byte* memory_;
};

TEST_F(OnGpu, ACaptureOfAnotherThreadGoesOn) {
  SKIP_WITH_REAL_CUDA();
  const TemporaryFolder folder;
  const Mapped mapped(folder.write("a", random_bytes(4096, 1)), 4096);
  FAKE(cuda, fake_cuda_begin_capture)();
  const auto work = [&] {
    const auto stream = device_->make_stream();
    const auto buffer = device_->allocate(4096);
    const auto pinned = device_->allocate_pinned(4096);
    const auto registration = device_->register_mapping(mapped.data(), 4096);
    stream->copy_in(buffer->data(), pinned->data(), 4096);
    stream->record()->wait();
    auto* sources = reinterpret_cast<uint64_t*>(pinned->data());
    sources[0] = reinterpret_cast<uint64_t>(registration->on_device());
    stream->gather(buffer->data(), sources, 1, 4096);
    stream->record()->wait();
    EXPECT_NE(device_->allocation_of(buffer->data()).begin, nullptr);
  };
  // A new thread, because its mode is the strictest.
  std::thread([&] { EXPECT_NO_THROW(work()); }).join();
  EXPECT_EQ(FAKE(cuda, fake_cuda_end_capture)(), 1);
}

TEST_F(OnGpu, AThreadsOwnCaptureModeIsAsBefore) {
  std::thread([&] {
    const CudaApi& api = CudaApi::get();
    const auto mode_now = [&] {
      int mode = CudaApi::kCaptureModeRelaxed, last = 0;
      EXPECT_EQ(api.exchange_capture_mode(&mode), CudaApi::kSuccess);
      last = mode;
      EXPECT_EQ(api.exchange_capture_mode(&mode), CudaApi::kSuccess);
      return last;
    };
    for (const int own : {0, 1, 2}) {
      int mode = own;
      ASSERT_EQ(api.exchange_capture_mode(&mode), CudaApi::kSuccess);
      {
        const BesideCaptures outer(*device_), inner(*device_);
        EXPECT_EQ(mode_now(), CudaApi::kCaptureModeRelaxed);
        stream_->copy_in(buffer_->data(), in_->data(), 1);
        EXPECT_EQ(mode_now(), CudaApi::kCaptureModeRelaxed);
      }
      EXPECT_EQ(mode_now(), own);
      stream_->record()->wait();
      (void)device_->allocate(100);
      EXPECT_EQ(mode_now(), own);
    }
  }).join();
}

TEST_F(OnGpu, AThreadOfTheDeviceLetsLibrariesWorkBesideCaptures) {
  std::thread([&] {
    device_->bind_thread();
    int mode = 0;
    ASSERT_EQ(CudaApi::get().exchange_capture_mode(&mode), CudaApi::kSuccess);
    EXPECT_EQ(mode, CudaApi::kCaptureModeRelaxed);
  }).join();
}

TEST_F(OnGpu, GathersRecordsOfAnySizeFromAnywhereInARegisteredFile) {
  const TemporaryFolder folder;
  constexpr size_t kFileBytes = 256 * 1024 + 77;
  const Bytes content = random_bytes(kFileBytes, 7);
  const Mapped mapped(folder.write("a", content), kFileBytes);
  std::unique_ptr<Registration> registration;
  try {
    registration = device_->register_mapping(mapped.data(), kFileBytes);
  } catch (const Failure& failure) {
    if (!real_cuda()) throw;
    GTEST_SKIP() << failure.what();
  }
  const auto addresses = device_->allocate_pinned(64 * sizeof(uint64_t));
  auto* sources = reinterpret_cast<uint64_t*>(addresses->data());
  std::mt19937_64 random(7);
  for (const size_t bytes : {1, 2, 15, 16, 17, 2050, 4095, 4096, 4097}) {
    for (const size_t step : {1, 2, 4, 8, 16, 4096}) {  // between the sources, which decides their alignment
      for (const size_t target : {0, 1, 2, 8, 16}) {
        const size_t count = 1 + random() % 64;
        for (size_t i = 0; i < count; ++i) {
          const size_t offset = random() % ((kFileBytes - bytes) / step + 1) * step;
          sources[i] = reinterpret_cast<uint64_t>(registration->on_device()) + offset;
        }
        sources[0] = reinterpret_cast<uint64_t>(registration->on_device()) + (kFileBytes - bytes) / step * step;
        stream_->gather(buffer_->data() + target, sources, count, bytes);
        const Bytes result = on_device(count * bytes, target);
        for (size_t i = 0; i < count; ++i) {
          const size_t offset = sources[i] - reinterpret_cast<uint64_t>(registration->on_device());
          ASSERT_EQ(std::memcmp(result.data() + i * bytes, content.data() + offset, bytes), 0)
              << "record " << i << " of " << bytes << " bytes at " << offset << ", target askew by " << target;
        }
      }
    }
  }
}

TEST_F(OnGpu, AGatherTouchesNothingBesideItsRows) {
  std::memset(in_->data(), 0x11, kRoomBytes);
  stream_->copy_in(buffer_->data(), in_->data(), kRoomBytes);
  const auto addresses = device_->allocate_pinned(sizeof(uint64_t));
  const auto records = device_->allocate_pinned(8192);
  std::memset(records->data(), 0x22, 8192);
  reinterpret_cast<uint64_t*>(addresses->data())[0] = reinterpret_cast<uint64_t>(records->data() + 3);
  stream_->gather(buffer_->data() + 101, reinterpret_cast<uint64_t*>(addresses->data()), 1, 2050);
  const Bytes result = on_device(4096);
  for (size_t i = 0; i < result.size(); ++i) {
    ASSERT_EQ(result[i], std::byte{static_cast<unsigned char>(i >= 101 && i < 101 + 2050 ? 0x22 : 0x11)}) << i;
  }
}

TEST_F(OnGpu, NothingIsGatheredWhereNothingIsAsked) {
  stream_->gather(buffer_->data(), nullptr, 0, 100);
  stream_->gather(buffer_->data(), nullptr, 5, 0);
  stream_->record()->wait();
}

TEST(GatherUnit, DividesEverythingItIsGiven) {
  EXPECT_EQ(gather_unit_bytes(0), 16u);
  EXPECT_EQ(gather_unit_bytes(4096), 16u);
  EXPECT_EQ(gather_unit_bytes(2050), 2u);
  EXPECT_EQ(gather_unit_bytes(4096 | 8), 8u);
  EXPECT_EQ(gather_unit_bytes(4097), 1u);
}

TEST_F(OnGpu, FreedMemoryWaitsForItsCopies) {
  fill_input(8);
  for (int round = 0; round < 20; ++round) {
    const auto passing = device_->allocate(kRoomBytes);
    stream_->copy_in(passing->data(), in_->data(), kRoomBytes);
  }
}

TEST_F(OnGpu, AForkedChildHasNoPinnedMemory) {
  const auto has = [](const std::byte* memory) {
    unsigned char resident = 0;
    return ::mincore(const_cast<std::byte*>(memory), 1, &resident) == 0;
  };
  auto pinned = device_->allocate_pinned(3 << 20);
  std::byte* const memory = pinned->data();
  ASSERT_TRUE(has(memory));
  const pid_t child = ::fork();
  if (child == 0) {
    bool right = !has(memory);
    void* const other = ::mmap(memory, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    pinned.reset();
    right = right && other == memory && has(memory);  // what the child has there is its own
    ::_exit(right ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  std::memset(memory, 1, 3 << 20);
}

TEST_F(OnGpu, AnErrorCarriesTheDriversNameAndWhatWasTried) {
  SKIP_WITH_REAL_CUDA();
  const auto fail_next = FAKE(cuda, fake_cuda_fail_next);
  const auto expect = [](const Error& error, const std::string& tried, const std::string& name) {
    EXPECT_EQ(error.code, ErrorCode::kDevice);
    EXPECT_NE(error.message.find(tried), std::string::npos) << error.message;
    EXPECT_NE(error.message.find(name), std::string::npos) << error.message;
  };
  fail_next("cuMemAlloc", 2);
  expect(error_of([&] { device_->allocate(12345); }), "allocating 12345 bytes on cuda:0",
         "CUDA_ERROR_OUT_OF_MEMORY (out of memory)");
  fail_next("cuMemHostRegister", 2);
  expect(error_of([&] { device_->allocate_pinned(12345); }), "pinning 12345 bytes", "CUDA_ERROR_OUT_OF_MEMORY");
  fail_next("cuStreamCreate", 2);
  expect(error_of([&] { device_->make_stream(); }), "making a stream on cuda:0", "CUDA_ERROR_OUT_OF_MEMORY");
  fail_next("cuMemcpyHtoDAsync", 700);
  expect(error_of([&] { stream_->copy_in(buffer_->data(), in_->data(), 10); }), "copying 10 bytes to cuda:0",
         "CUDA_ERROR_ILLEGAL_ADDRESS");
  fail_next("cuMemcpyDtoHAsync", 700);
  expect(error_of([&] { stream_->copy_out(out_->data(), buffer_->data(), 10); }), "copying 10 bytes from cuda:0",
         "CUDA_ERROR_ILLEGAL_ADDRESS");
  fail_next("cuEventRecord", 719);
  expect(error_of([&] { stream_->record(); }), "recording an event", "CUDA_ERROR_LAUNCH_FAILED");
  const auto event = stream_->record();
  fail_next("cuEventQuery", 719);
  expect(error_of([&] { event->done(); }), "asking for an event", "CUDA_ERROR_LAUNCH_FAILED");
  fail_next("cuEventQuery", 719);
  expect(error_of([&] { event->wait(); }), "asking for an event", "CUDA_ERROR_LAUNCH_FAILED");
  fail_next("cuStreamWaitEvent", 719);
  expect(error_of([&] { stream_->wait(*event); }), "making a stream wait", "CUDA_ERROR_LAUNCH_FAILED");
  fail_next("cuCtxSetCurrent", 201);
  expect(error_of([&] { device_->bind_thread(); }), "using cuda:0", "CUDA_ERROR_INVALID_CONTEXT");
  fail_next("cuCtxPushCurrent", 12345);  // a code without a name in this driver
  expect(error_of([&] { device_->allocate(1); }), "using cuda:0", "CUDA error 12345");
  fail_next("cuLaunchKernel", 719);
  expect(error_of([&] {
           auto* address = reinterpret_cast<uint64_t*>(out_->data());
           *address = reinterpret_cast<uint64_t>(in_->data());
           stream_->gather(buffer_->data(), address, 1, 16);
         }),
         "gathering 1 records on cuda:0", "CUDA_ERROR_LAUNCH_FAILED");
}

TEST_F(OnGpu, ARegistrationThatFailsHalfwayLeavesNothing) {
  SKIP_WITH_REAL_CUDA();
  const TemporaryFolder folder;
  const Mapped mapped(folder.write("a", random_bytes(10000, 1)), 10000);
  FAKE(cuda, fake_cuda_fail_next)("cuMemHostGetDevicePointer", 1);
  Error error = error_of([&] { device_->register_mapping(mapped.data(), 10000); });
  EXPECT_NE(error.message.find("CUDA_ERROR_INVALID_VALUE"), std::string::npos) << error.message;
  FAKE(cuda, fake_cuda_set_read_only_register)(0);
  error = error_of([&] { device_->register_mapping(mapped.data(), 10000); });
  FAKE(cuda, fake_cuda_set_read_only_register)(1);
  EXPECT_EQ(error.code, ErrorCode::kUnavailable);
  EXPECT_NE(error.message.find("mapped read-only"), std::string::npos) << error.message;
  const auto twice = device_->register_mapping(mapped.data(), 10000);
  error = error_of([&] { device_->register_mapping(mapped.data(), 10000); });
  EXPECT_NE(error.message.find("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"), std::string::npos) << error.message;
}

TEST_F(OnGpu, EventsAreUsedAgain) {
  SKIP_WITH_REAL_CUDA();
  for (int i = 0; i < 10; ++i) stream_->record()->wait();
  const uint64_t events = FAKE(cuda, fake_cuda_live_objects)().events;
  for (int i = 0; i < 100; ++i) stream_->record()->wait();
  EXPECT_EQ(FAKE(cuda, fake_cuda_live_objects)().events, events);
}

TEST_F(OnGpu, ADriverThatHasShutDownIsLeftInPeace) {
  SKIP_WITH_REAL_CUDA();
  auto stream = device_->make_stream();
  auto known = stream->record(), asked_for = stream->record();
  known->wait();
  const FakeCudaObjects before = FAKE(cuda, fake_cuda_live_objects)();
  FAKE(cuda, fake_cuda_break)(4);
  EXPECT_NE(error_of([&] { asked_for->wait(); }).message.find("CUDA_ERROR_DEINITIALIZED"), std::string::npos);
  EXPECT_NO_THROW(known->wait());  // the result is known, so the driver is not asked
  known.reset();
  asked_for.reset();
  stream.reset();  // as at the interpreter's exit: no error
  FAKE(cuda, fake_cuda_break)(0);
  EXPECT_EQ(FAKE(cuda, fake_cuda_live_objects)().streams, before.streams);
  before_.streams += 1;  // the driver keeps that one
}

TEST_F(OnGpu, SaysWhichGpusThereAre) {
  for (const int ordinal : {-1, 64}) {
    const Error error = error_of([&] { cuda_device(ordinal); });
    EXPECT_EQ(error.code, ErrorCode::kUnavailable);
    EXPECT_NE(error.message.find("there is no cuda:" + std::to_string(ordinal)), std::string::npos) << error.message;
    EXPECT_NE(error.message.find("CUDA_VISIBLE_DEVICES"), std::string::npos) << error.message;
  }
}

TEST_F(OnGpu, AForkedChildGetsAnErrorWithARemedy) {
  int channel[2];
  ASSERT_EQ(::pipe(channel), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    std::string said = "nothing was thrown";
    try {
      cuda_device(0);
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
  EXPECT_NE(std::string(text).find("forked"), std::string::npos) << text;
  EXPECT_NE(std::string(text).find("'spawn'"), std::string::npos) << text;
}

// The library is looked up once, so each of these tests runs in a new process.
class WithoutGpu : public ::testing::Test {
 protected:
  void SetUp() override { ::testing::FLAGS_gtest_death_test_style = "threadsafe"; }
  [[noreturn]] static void ask(const char* library) {
    ::setenv("GDSDATA_LIBCUDA", library, 1);
    try {
      cuda_device(0);
    } catch (const Failure& failure) {
      std::fprintf(stderr, "%d: %s\n", static_cast<int>(failure.error().code), failure.what());
    }
    ::_exit(7);
  }
};

TEST_F(WithoutGpu, SaysThatThereIsNoDriver) {
  EXPECT_EXIT(ask("/nowhere/libcuda.so.1"), ::testing::ExitedWithCode(7),
              "2: no CUDA driver was found \\(/nowhere/libcuda.so.1.*install NVIDIA's driver, or use device=\"cpu\"");
}

TEST_F(WithoutGpu, SaysThatADriverIsTooOld) {
  EXPECT_EXIT(ask("libdl.so.2"), ::testing::ExitedWithCode(7), "2: the CUDA driver has no cuInit; .*CUDA 11.0");
}

TEST_F(WithoutGpu, SaysThatADriverDoesNotStart) {
  SKIP_WITH_REAL_CUDA();
  EXPECT_EXIT(
      {
        FAKE(cuda, fake_cuda_fail_next)("cuInit", 2);
        ask(fake_library("cuda").c_str());
      },
      ::testing::ExitedWithCode(7), "2: the CUDA driver does not start: CUDA_ERROR_OUT_OF_MEMORY.*nvidia-smi");
}

// Tests of the fake itself: the tests above, and the engine's, rely on it to detect misuse.
class FakeDriver : public OnGpu {
 protected:
  void SetUp() override {
    SKIP_WITH_REAL_CUDA();
    OnGpu::SetUp();
    api_ = &CudaApi::get();
    device_->bind_thread();
    ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  }
  const CudaApi* api_ = nullptr;
};

TEST_F(FakeDriver, AsksForAContext) {
  std::thread([&] {
    CudaApi::Address memory = 0;
    EXPECT_EQ(api_->memory_allocate(&memory, 100), 201);
    device_->bind_thread();
    ASSERT_EQ(api_->memory_allocate(&memory, 100), 0);
    EXPECT_EQ(api_->memory_free(memory), 0);
    EXPECT_EQ(api_->memory_free(memory), 1) << "a second time";
  }).join();
}

TEST_F(FakeDriver, EndsTheCaptureOfAnotherThreadAtAnUnsafeCall) {
  std::thread([&] {
    CudaApi::Context context = nullptr;
    ASSERT_EQ(api_->primary_context_retain(&context, 0), 0);
    ASSERT_EQ(api_->context_set(context), 0);
    FAKE(cuda, fake_cuda_begin_capture)();
    CudaApi::Address memory = 0;
    EXPECT_EQ(api_->memory_allocate(&memory, 100), 900);
    EXPECT_EQ(FAKE(cuda, fake_cuda_end_capture)(), 0);
  }).join();
}

TEST_F(FakeDriver, CopiesBetweenRegisteredMemoryAndItsOwnOnly) {
  Bytes pageable(100);
  EXPECT_NE(error_of([&] { stream_->copy_in(buffer_->data(), pageable.data(), 100); }).message.find("INVALID_VALUE"),
            std::string::npos);
  const Error beyond = error_of([&] { stream_->copy_in(buffer_->data() + kRoomBytes - 99, in_->data(), 100); });
  EXPECT_NE(beyond.message.find("INVALID_VALUE"), std::string::npos);
  EXPECT_EQ(api_->host_unregister(pageable.data()), 713);
  EXPECT_EQ(api_->host_register(in_->data(), 4096, 0), 712);
}

TEST_F(FakeDriver, EndsAProcessThatReleasesMemoryInUse) {
  EXPECT_DEATH(
      {
        FAKE(cuda, fake_cuda_set_delay_us)(1'000'000'000);
        for (int i = 0; i < 4; ++i) stream_->copy_in(buffer_->data(), in_->data(), 100);
        in_.reset();
      },
      "released while work in flight uses it");
}

TEST_F(FakeDriver, EndsAProcessThatGathersFromMemoryTheDeviceDoesNotReach) {
  EXPECT_DEATH(
      {
        const Bytes pageable(100);
        auto* address = reinterpret_cast<uint64_t*>(out_->data());
        *address = reinterpret_cast<uint64_t>(pageable.data());
        stream_->gather(buffer_->data(), address, 1, 16);
      },
      "not registered");
}

}  // namespace
}  // namespace gdsdata::testing
