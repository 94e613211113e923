// If memory runs out, or anything else is thrown inside, the batch or group fails, without a hang.
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <future>
#include <new>
#include <optional>
#include <thread>

#include "backend/cufile_memory.h"
#include "backend/range_read.h"
#include "backend/select.h"
#include "base/heads.h"
#include "base/remote_object.h"
#include "device/cuda_api.h"
#include "engine/pending.h"
#include "engine/prefetcher.h"
#include "engine/whole.h"
#include "fakes.h"
#include "python/lease.h"
#include "range_server.h"
#include "testing.h"

namespace {

// Makes one allocation, or a number of them in a row, fail on the threads that a test chooses.
std::atomic<int> allocations_left{-1};  // before the first failure; negative: none fails
std::atomic<int> failures_left{0};
std::atomic<bool> fails_in_others{false};  // true: on all threads except `armed_by`
std::atomic<std::thread::id> armed_by;

bool fails_now() {
  if (allocations_left.load(std::memory_order_relaxed) < 0) return false;
  if ((std::this_thread::get_id() != armed_by.load()) != fails_in_others.load()) return false;
  if (allocations_left.fetch_sub(1) > 0) return false;
  if (failures_left.fetch_sub(1) > 1) allocations_left.store(0);
  return true;
}

}  // namespace

// Not inlined, because the compiler would warn of malloc paired with delete. Without the nothrow
// one, AddressSanitizer's would give std::stable_partition memory that these deletes may not free.
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return fails_now() ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
}
[[gnu::noinline]] void* operator new(size_t bytes) {
  void* memory = operator new(bytes, std::nothrow);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace gdsdata::testing {
namespace {

constexpr std::chrono::seconds kPatience{10};

class FailingAllocations {
 public:
  FailingAllocations(int first, int count, bool in_others) {
    armed_by = std::this_thread::get_id();
    fails_in_others = in_others;
    failures_left = count;
    allocations_left = first;
  }
  // On one other thread alone.
  FailingAllocations(int first, int count, std::thread::id on) {
    armed_by = on;
    fails_in_others = false;
    failures_left = count;
    allocations_left = first;
  }
  ~FailingAllocations() { allocations_left = -1; }
};

class NoMemory : public ::testing::TestWithParam<const char*> {
 protected:
  static constexpr uint64_t kSample = 5000;
  static constexpr size_t kSamples = 300;

  void SetUp() override {
    if (GetParam() == std::string("uring") && !uring_refusal().empty()) GTEST_SKIP() << uring_refusal();
  }
  std::shared_ptr<Engine> make_engine(DirectMode direct) const {
    EngineOptions options;
    options.backend = GetParam();
    options.workers = 2;
    options.coalesce_gap_bytes = 0;
    options.io.direct = direct;
    return std::make_shared<Engine>(options, host_device());
  }

  const TemporaryFolder folder_;
  const Bytes content_ = random_bytes(kSample * kSamples, 1);
  const std::vector<std::string> paths_ = {folder_.write("a", content_), folder_.write("b", content_)};
};

TEST_P(NoMemory, OfAWorkerEndsEachGroupOnceAndTheNextOneIsRight) {
  for (const DirectMode direct : {DirectMode::kAuto, DirectMode::kNever}) {
    size_t errors = 0;
    for (int first = 0; first < 150; first += first < 40 ? 1 : 7) {
      const auto engine = make_engine(direct);
      for (const std::string& path : paths_) drop_from_page_cache(path);
      Bytes memory(content_.size());
      const auto group = std::make_shared<Group>();
      group->edit().files = table_of(paths_);
      for (uint64_t i = 0; i < kSamples; ++i) {
        group->edit().transfers.push_back(
            {static_cast<uint32_t>(i % 2), i * kSample, kSample, memory.data() + i * kSample});
      }
      std::atomic<int> ends{0};
      Pending pending(*engine, group, [&] { ++ends; });
      {
        const FailingAllocations failing(first, 1, /*in_others=*/true);
        const auto until = std::chrono::steady_clock::now() + kPatience;
        while (!pending.ended() && std::chrono::steady_clock::now() < until) std::this_thread::yield();
      }
      ASSERT_TRUE(pending.wait(kPatience)) << "it hangs when allocation " << first << " fails";
      if (group->result().error) {
        ++errors;
        EXPECT_NE(group->result().error->message.find("memory"), std::string::npos) << group->result().error->message;
      } else {
        ASSERT_EQ(std::memcmp(memory.data(), content_.data(), memory.size()), 0) << first;
      }
      std::memset(memory.data(), 0, memory.size());
      engine->run(group);
      ASSERT_EQ(std::memcmp(memory.data(), content_.data(), memory.size()), 0) << first;
      EXPECT_EQ(ends, 1) << first;
    }
    EXPECT_GT(errors, 3u) << "no allocation of a worker failed";
  }
}

TEST_P(NoMemory, OfAPrefetcherIsTheErrorOfItsBatchAndTheOthersCome) {
  constexpr size_t kBatch = 10, kBatches = 12;
  std::vector<int64_t> offsets;
  for (size_t i = 0; i < kBatch * kBatches; ++i) offsets.push_back(static_cast<int64_t>(i * 7 % kSamples * kSample));
  const std::vector<int32_t> files(offsets.size(), 0);
  const std::vector<int64_t> sizes(kBatches, kBatch);
  size_t errors = 0, refused = 0;
  for (int first = 0; first < 250; ++first) {
    for (const int count : {1, 4}) {
      const auto engine = make_engine(DirectMode::kAuto);
      PrefetchOptions options;
      options.slots = 3;
      options.sample_bytes = kSample;
      options.batch_samples = kBatch;
      options.stall_timeout = std::chrono::seconds(5);
      const auto pool =
          std::make_shared<BufferPool>(engine->device(), kSample * kBatch + Prefetcher::kPlacementBytes, 5);
      Prefetcher prefetcher(engine, table_of(paths_), pool, options);
      const FailingAllocations failing(first, count, /*in_others=*/false);
      try {
        prefetcher.plan(files, offsets, sizes);
      } catch (const std::bad_alloc&) {
        ++refused;
        allocations_left = -1;
        EXPECT_FALSE(prefetcher.next({})) << "a part of a plan that was refused is there";
        continue;
      }
      size_t taken = 0;
      while (true) {
        try {
          const auto batch = prefetcher.next({});
          if (!batch) break;
          for (size_t i = 0; i < kBatch; ++i) {
            const auto* expected = content_.data() + offsets[taken * kBatch + i];
            ASSERT_EQ(std::memcmp(batch->buffer->data() + batch->offset + i * kSample, expected, kSample), 0);
          }
        } catch (const Failure& failure) {
          ++errors;
          ASSERT_NE(failure.error().code, ErrorCode::kStalled) << first;
        } catch (const std::bad_alloc&) {  // no memory for its exception
          ++errors;
        }
        ++taken;
      }
      ASSERT_EQ(taken, kBatches) << "when allocation " << first << " fails";
    }
  }
  EXPECT_GT(errors, 3u);
  EXPECT_GT(refused, 0u);
}

// The error of a request takes memory too. Without it, the request ends all the same.
TEST_P(NoMemory, ForTheErrorOfARequestEndsItsGroup) {
  constexpr uint64_t kThere = kSample * 10;
  const std::string path = folder_.write("short", content_);
  for (int first = 0; first < 60; ++first) {
    const auto engine = make_engine(DirectMode::kAlways);
    const auto files = table_of({path});
    const auto file = files->get(0);
    ASSERT_EQ(::truncate(path.c_str(), static_cast<off_t>(kThere)), 0);
    Bytes memory(content_.size());
    const auto group = std::make_shared<Group>();
    group->edit().files = files;
    group->edit().transfers = {{0, 0, content_.size(), memory.data()}};
    Pending pending(*engine, group);
    {
      const FailingAllocations failing(first, 1, /*in_others=*/true);
      const auto until = std::chrono::steady_clock::now() + kPatience;
      while (!pending.ended() && std::chrono::steady_clock::now() < until) std::this_thread::yield();
    }
    ASSERT_TRUE(pending.wait(std::chrono::seconds(1))) << "it hangs when allocation " << first << " fails";
    EXPECT_TRUE(group->result().error);
    std::filesystem::resize_file(path, content_.size());
  }
}

// Its ring and its eventfd are closed if the rest of it cannot be made.
TEST_P(NoMemory, ForABackendLeavesNoDescriptorOpen) {
  const size_t before = count_descriptors();
  size_t failures = 0;
  for (int first = 0; first < 40; ++first) {
    std::unique_ptr<Backend> backend;
    try {
      const FailingAllocations failing(first, 1, /*in_others=*/false);
      backend = make_backend(GetParam(), BackendOptions(), *host_device());
    } catch (const std::bad_alloc&) {
      ++failures;
    }
    backend.reset();
    ASSERT_EQ(count_descriptors(), before) << "when allocation " << first << " fails";
  }
  EXPECT_GT(failures, 0u);
}

INSTANTIATE_TEST_SUITE_P(All, NoMemory, ::testing::Values("posix", "uring"),
                         [](const auto& info) { return std::string(info.param); });

TEST(NoMemoryOfHeads, LeavesNoFileOpen) {
  const TemporaryFolder folder;
  std::vector<std::string> paths;
  for (int i = 0; i < 5; ++i) paths.push_back(folder.write(std::to_string(i), random_bytes(10, 1)));
  const PathList list(paths);
  Bytes bytes(50);
  std::vector<int64_t> read_bytes(5), size_bytes(5), mtime_ns(5);
  const Heads heads{bytes.data(), read_bytes.data(), size_bytes.data(), mtime_ns.data()};
  const size_t before = count_descriptors();
  size_t failures = 0;
  for (int first = 0; first < 40; ++first) {
    try {
      const FailingAllocations failing(first, 1, /*in_others=*/false);
      EXPECT_EQ(read_heads(list, 10, 1, heads), std::nullopt);
    } catch (const std::bad_alloc&) {
      ++failures;
    }
    ASSERT_EQ(count_descriptors(), before) << "when allocation " << first << " fails";
  }
  EXPECT_GT(failures, 0u);
}

// A destructor cannot say that it failed, so the device has room for all of its events.
TEST(NoMemoryOfADevice, TakesAllEventsBack) {
  const auto device = test_device();
  if (device == nullptr) GTEST_SKIP() << "no GPU, and no replacement of its driver";
  const auto stream = device->make_stream();
  Events events;
  for (int i = 0; i < 100; ++i) events.push_back(stream->record());
  {
    const FailingAllocations failing(0, 1000, /*in_others=*/false);
    events.clear();
  }
  EXPECT_NO_THROW(stream->record()->wait());
}

TEST(NoMemoryOfALease, HasTheWorkOfItsStreamsNotedAllTheSame) {
  const auto device = test_device();
  if (device == nullptr) GTEST_SKIP() << "no GPU, and no replacement of its driver";
  device->bind_thread();
  CudaApi::Stream handle = nullptr;
  ASSERT_EQ(CudaApi::get().stream_create(&handle, CudaApi::kStreamNonBlocking), CudaApi::kSuccess);
  const auto count = std::make_shared<std::atomic<size_t>>(0);
  const std::vector<uintptr_t> streams(3, reinterpret_cast<uintptr_t>(handle));
  bool fails = true;
  for (int first = 0; fails; ++first) {
    const std::shared_ptr<DeviceBuffer> buffer = device->allocate(4096);
    auto lease = std::make_unique<Lease>(device, buffer, streams, count);
    {
      const FailingAllocations failing(first, 3, /*in_others=*/false);
      lease.reset();
      fails = allocations_left.load() <= 0;
    }
    EXPECT_TRUE(fails || first > 5);
    EXPECT_EQ(buffer->uses.size(), streams.size()) << "when allocation " << first << " fails";
    EXPECT_EQ(*count, 0u);
  }
  CudaApi::get().stream_destroy(handle);
}

// A device whose allocations throw something that is no std::exception.
class Unexpected final : public Device {
 public:
  explicit Unexpected(std::shared_ptr<Device> inner) : inner_(std::move(inner)) {}
  std::string name() const override { return inner_->name(); }
  int ordinal() const override { return inner_->ordinal(); }
  bool host_addressable() const override { return inner_->host_addressable(); }
  std::unique_ptr<DeviceBuffer> allocate(size_t bytes) override {
    if (throws.fetch_sub(1) == 1) throw std::out_of_range("nobody expects this");
    return inner_->allocate(bytes);
  }
  std::unique_ptr<PinnedBuffer> allocate_pinned(size_t bytes) override { return inner_->allocate_pinned(bytes); }
  std::unique_ptr<Registration> register_mapping(const std::byte* memory, size_t bytes) override {
    return inner_->register_mapping(memory, bytes);
  }
  AddressRange allocation_of(const std::byte* memory) override { return inner_->allocation_of(memory); }
  std::unique_ptr<Stream> make_stream() override { return inner_->make_stream(); }
  std::unique_ptr<Stream> foreign_stream(uintptr_t handle) override { return inner_->foreign_stream(handle); }
  void bind_thread() override { inner_->bind_thread(); }
  bool step_beside_captures() noexcept override { return inner_->step_beside_captures(); }
  void step_back() noexcept override { inner_->step_back(); }

  std::atomic<int> throws{0};  // which allocation from now on throws

 private:
  const std::shared_ptr<Device> inner_;
};

TEST(UnexpectedExceptions, OfABuffersMemoryAreTheErrorOfItsBatch) {
  constexpr uint64_t kSample = 4096;
  const TemporaryFolder folder;
  const Bytes content = random_bytes(kSample * 6, 1);
  const std::string path = folder.write("a", content);
  for (int nth = 1; nth <= 4; ++nth) {
    const auto device = std::make_shared<Unexpected>(host_device());
    const auto engine = std::make_shared<Engine>(EngineOptions{}, device);
    const auto pool = std::make_shared<BufferPool>(device, kSample + Prefetcher::kPlacementBytes, 3);
    PrefetchOptions options;
    options.slots = 2;
    options.sample_bytes = kSample;
    options.batch_samples = 1;
    options.stall_timeout = kPatience;
    Prefetcher prefetcher(engine, table_of({path}), pool, options);
    device->throws = nth;
    std::vector<int64_t> offsets;
    for (int64_t i = 0; i < 6; ++i) offsets.push_back(i * static_cast<int64_t>(kSample));
    prefetcher.plan(std::vector<int32_t>(6, 0), offsets, std::vector<int64_t>(6, 1));
    std::vector<std::shared_ptr<DeviceBuffer>> kept;  // each batch then needs a new buffer
    for (int i = 0; i < 6; ++i) {
      if (i + 1 == nth) {
        const Error error = error_of([&] { prefetcher.next({}); });
        EXPECT_NE(error.message.find("nobody expects this"), std::string::npos) << error.message;
        continue;
      }
      const auto batch = prefetcher.next({});
      ASSERT_TRUE(batch);
      EXPECT_EQ(std::memcmp(batch->buffer->data() + batch->offset, content.data() + offsets[i], kSample), 0);
      kept.push_back(batch->buffer);
    }
    EXPECT_FALSE(prefetcher.next({}));
  }
}

// A device that allocates its second buffer only when the test allows it.
class SlowToAllocate final : public Device {
 public:
  std::string name() const override { return inner_->name(); }
  int ordinal() const override { return 0; }
  bool host_addressable() const override { return true; }
  std::unique_ptr<DeviceBuffer> allocate(size_t bytes) override {
    if (allocations.fetch_add(1) == 1) allowed.wait(false);
    return inner_->allocate(bytes);
  }
  std::unique_ptr<PinnedBuffer> allocate_pinned(size_t bytes) override { return inner_->allocate_pinned(bytes); }
  std::unique_ptr<Registration> register_mapping(const std::byte* memory, size_t bytes) override {
    return inner_->register_mapping(memory, bytes);
  }
  AddressRange allocation_of(const std::byte* memory) override { return inner_->allocation_of(memory); }
  std::unique_ptr<Stream> make_stream() override { return inner_->make_stream(); }
  std::unique_ptr<Stream> foreign_stream(uintptr_t handle) override { return inner_->foreign_stream(handle); }
  void bind_thread() override {}
  bool step_beside_captures() noexcept override { return false; }
  void step_back() noexcept override {}
  void allow() {
    allowed = true;
    allowed.notify_all();
  }

  std::atomic<int> allocations{0};
  std::atomic<bool> allowed{false};

 private:
  const std::shared_ptr<Device> inner_ = host_device();
};

TEST(SlowAllocations, OfAPrefetcherKeepNoWorkerAndNoOtherCallWaiting) {
  constexpr uint64_t kSample = 4096;
  const TemporaryFolder folder;
  const Bytes content = random_bytes(kSample * 2, 1);
  const auto files = table_of({folder.write("a", content)});
  const auto device = std::make_shared<SlowToAllocate>();
  EngineOptions engine_options;
  engine_options.backend = "posix";
  engine_options.workers = 1;
  engine_options.io.direct = DirectMode::kNever;
  const auto engine = std::make_shared<Engine>(engine_options, device);
  const auto pool = std::make_shared<BufferPool>(device, kSample + Prefetcher::kPlacementBytes, 3);
  PrefetchOptions options;
  options.slots = 2;
  options.sample_bytes = kSample;
  options.batch_samples = 1;
  Prefetcher prefetcher(engine, files, pool, options);
  std::thread plans([&] {
    prefetcher.plan(std::vector<int32_t>(2, 0), std::vector<int64_t>{0, kSample}, std::vector<int64_t>(2, 1));
  });
  while (device->allocations < 2) std::this_thread::yield();
  // The first batch is in flight. The only worker ends it, and is then free for this group.
  Bytes memory(kSample);
  const auto group = std::make_shared<Group>();
  group->edit().files = files;
  group->edit().transfers = {{0, 0, kSample, memory.data()}};
  Pending pending(*engine, group);
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (!pending.ended() && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  EXPECT_TRUE(pending.ended()) << "the worker waits for the prefetcher's lock";
  std::atomic<bool> asked{false};
  std::thread asks([&] {
    EXPECT_EQ(prefetcher.statistics().batches, 0u);
    asked = true;
  });
  while (!asked && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  EXPECT_TRUE(asked) << "statistics wait for the prefetcher's lock";
  device->allow();
  asks.join();
  plans.join();
  for (int i = 0; i < 2; ++i) {
    const auto batch = prefetcher.next({});
    ASSERT_TRUE(batch);
    EXPECT_EQ(std::memcmp(batch->buffer->data() + batch->offset, content.data() + i * kSample, kSample), 0);
  }
}

TEST(SlowAllocations, DoNotKeepAPrefetcherFromBeingClosed) {
  constexpr uint64_t kSample = 4096;
  const TemporaryFolder folder;
  const auto files = table_of({folder.write("a", random_bytes(kSample * 2, 1))});
  const auto device = std::make_shared<SlowToAllocate>();
  const auto engine = std::make_shared<Engine>(EngineOptions{}, device);
  const auto pool = std::make_shared<BufferPool>(device, kSample + Prefetcher::kPlacementBytes, 3);
  PrefetchOptions options;
  options.slots = 2;
  options.sample_bytes = kSample;
  options.batch_samples = 1;
  Prefetcher prefetcher(engine, files, pool, options);
  std::thread plans([&] {
    prefetcher.plan(std::vector<int32_t>(2, 0), std::vector<int64_t>{0, kSample}, std::vector<int64_t>(2, 1));
  });
  while (device->allocations < 2) std::this_thread::yield();
  std::atomic<bool> closed{false};
  std::thread closes([&] {
    prefetcher.close();
    closed = true;
  });
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (!closed && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  EXPECT_TRUE(closed);
  device->allow();
  closes.join();
  plans.join();
  EXPECT_EQ(error_of([&] { prefetcher.next({}); }).code, ErrorCode::kClosed);
}

// The reactor's thread is libcurl's: an exception may not pass through it.
TEST(NoMemoryOfAReactor, EndsTheRangeAndTheNextOneIsRight) {
  if (CurlApi::get() == nullptr) GTEST_SKIP() << CurlApi::refusal();
  const RangeServer server(random_bytes(300'000, 1));
  HttpOptions options;
  options.reactors = 1;
  options.hedge = false;
  const auto client = std::make_shared<HttpClient>(options);
  std::promise<std::thread::id> reactor;
  client->next_shard().reactor.post([&] { reactor.set_value(std::this_thread::get_id()); });
  const std::thread::id thread = reactor.get_future().get();
  const auto object = std::make_shared<RemoteObject>(server.url(), 300'000, object_version("\"v1\""));
  object->grant({server.url(), {}, HttpReactor::Clock::now() + std::chrono::hours(1)});
  const auto begin = [&] {
    const auto ended = std::make_shared<std::promise<std::optional<Error>>>();
    RangeRead::begin(client, object, {0, 100'000}, {[](uint64_t, std::span<const std::byte>) {}},
                     [ended](std::optional<Error> error) { ended->set_value(std::move(error)); });
    return ended->get_future();
  };
  size_t errors = 0;
  for (int first = 0; first < 120; ++first) {
    // libcurl receives the responses to requests with this header.
    std::vector<std::string> headers;
    if (first % 2 == 1) headers.emplace_back("Accept: */*");
    object->grant({server.url(), headers, HttpReactor::Clock::now() + std::chrono::hours(1)});
    std::optional<FailingAllocations> failing(std::in_place, first / 2, 1, thread);
    auto reading = begin();
    ASSERT_EQ(reading.wait_for(kPatience), std::future_status::ready)
        << "it hangs when allocation " << first << " fails";
    failing.reset();
    if (const auto error = reading.get()) {
      ++errors;
      EXPECT_NE(error->message.find("memory"), std::string::npos) << error->message;
    }
    reading = begin();
    ASSERT_EQ(reading.wait_for(kPatience), std::future_status::ready) << first;
    EXPECT_FALSE(reading.get()) << first;
  }
  EXPECT_GT(errors, 5u) << "too few allocations of the reactor failed";  // libc++ makes fewer of them
  client->stop();
}

// A caller that waits for an access and gets no answer would wait forever.
TEST(NoMemoryOfARemoteObject, AnswersAllWhoWaitForAnAccess) {
  constexpr size_t kWaiting = 4;
  size_t failures = 0;
  for (int first = 0; first < 30; ++first) {
    const auto object = std::make_shared<RemoteObject>("s3://bucket/key", 1000, 1);
    std::vector<std::unique_ptr<int>> answers;
    for (size_t i = 0; i < kWaiting; ++i) {
      object->access_or_request([&](auto, auto) { answers.push_back(std::make_unique<int>(1)); });
    }
    access_desk().take(1, std::chrono::milliseconds(0));
    ObjectAccess access{"http://host/key", {}, std::chrono::steady_clock::now() + std::chrono::hours(1)};
    try {
      const FailingAllocations failing(first, 1, /*in_others=*/false);
      object->grant(std::move(access));
    } catch (const std::bad_alloc&) {
      ++failures;
      object->refuse({ErrorCode::kIo, "no memory"});
    }
    EXPECT_EQ(answers.size(), kWaiting) << first;
  }
  EXPECT_GT(failures, 0u);
}

TEST(NoMemoryOfCufile, LeavesNoMemoryRegistered) {
  SKIP_WITH_REAL_CUDA();
  const auto device = test_device();
  ASSERT_TRUE(cufile_refusal(*device).empty());
  device->bind_thread();
  const auto buffer = device->allocate(1 << 20);
  const auto registered = [] { return FAKE(cufile, fake_cufile_counts)().buffers; };
  for (const bool is_shared : {false, true}) {
    size_t failures = 0;
    for (int first = 0; first < 2; ++first) {  // later ones are the library's own
      auto other = is_shared ? register_cufile_memory({buffer->data(), 1 << 20}) : nullptr;
      std::shared_ptr<void> user;
      try {
        const FailingAllocations failing(first, 1, /*in_others=*/false);
        user = register_cufile_memory({buffer->data(), 1 << 20});
      } catch (const std::bad_alloc&) {
        ++failures;
      }
      user.reset();
      other.reset();
      EXPECT_EQ(registered(), 0u) << first;
    }
    EXPECT_GT(failures, 0u);
  }
}

// A request that was taken uses the memory of its caller until it is reaped.
TEST(NoMemoryOfCufile, EndsEachRequestThatWasTakenOnce) {
  SKIP_WITH_REAL_CUDA();
  constexpr uint64_t kBytes = 200'000;
  constexpr size_t kRequests = 4;
  const auto device = test_device();
  ASSERT_TRUE(cufile_refusal(*device).empty());
  const TemporaryFolder folder;
  const std::string path = folder.write("a", random_bytes(kBytes, 1));
  const auto buffer = device->allocate(kRequests * kBytes);
  for (const bool is_batch : {false, true}) {
    size_t failures = 0;
    for (int first = 0; first < 60; ++first) {
      FAKE(cufile, fake_cufile_reset)();
      BackendOptions options;
      options.cufile_batch = is_batch;
      const auto backend = make_cufile_backend(options, *device);
      const auto file = File::open_for_reading(path);
      std::vector<Piece> pieces;
      std::vector<Request> requests;
      for (size_t i = 0; i < kRequests; ++i) pieces.push_back({0, kBytes, buffer->data() + i * kBytes});
      for (size_t i = 0; i < kRequests; ++i) {
        requests.push_back({i, Direction::kRead, Conversion::kNone, file.get(), 0, kBytes, {&pieces[i], 1}});
      }
      std::vector<Completion> reaped(kRequests);
      ASSERT_EQ(backend->submit({requests.data(), 1}), 1u);  // batches are for files that are known to go by DMA
      ASSERT_EQ(backend->reap(reaped, 1, kPatience), 1u);
      if (first % 2 == 1) FAKE(cufile, fake_cufile_fail_next)(is_batch ? "entry" : "cuFileRead", EIO);
      size_t taken = 0, ended = 0;
      {
        const FailingAllocations failing(first / 2, 1, /*in_others=*/false);
        try {
          taken = backend->submit(requests);
        } catch (const std::bad_alloc&) {
          ++failures;
        }
        while (ended < taken) {
          const size_t count = backend->reap(std::span(reaped).subspan(ended), 1, kPatience);
          ASSERT_GT(count, 0u) << first;
          ended += count;
        }
      }
      for (size_t i = 0; i < ended; ++i) failures += reaped[i].error ? 1 : 0;
      EXPECT_EQ(ended, taken) << first;
      Completion later;
      EXPECT_EQ(backend->reap({&later, 1}, 1, std::chrono::milliseconds(1)), 0u) << first;
    }
    EXPECT_GT(failures, 0u);
  }
}

// If a backend throws, the groups of its worker fail, and the worker continues with the next ones.
TEST(UnexpectedExceptions, OfABackendAreTheErrorOfItsGroupsAndTheOthersEnd) {
  constexpr uint64_t kBytes = 3'000'000;
  const TemporaryFolder folder;
  const Bytes content = random_bytes(kBytes, 1);
  const auto files = table_of({folder.write("a", content)});
  for (const auto& device : {host_device(), test_device()}) {
    if (device == nullptr) continue;
    for (const char* faults :
         {"seed=1,submit_throws=0.3", "seed=2,reap_throws=0.2", "seed=3,late=0.3,reap_throws=0.1"}) {
      EngineOptions options;
      options.backend = "posix";
      options.workers = 2;
      options.io.direct = DirectMode::kAlways;
      options.io.faults = faults;
      std::atomic<int> ends{0};
      const auto memory = device->allocate(kBytes);
      const auto group = std::make_shared<Group>();
      group->edit().files = files;
      group->edit().transfers = {{0, 0, kBytes, memory->data()}};
      std::optional<Engine> engine(std::in_place, options, device);
      size_t errors = 0, sound = 0;
      for (int i = 0; i < 60; ++i) {
        Pending pending(*engine, group, [&] { ++ends; });
        ASSERT_TRUE(pending.wait(kPatience)) << faults;
        for (const auto& copy : group->result().copies) copy->wait();
        if (const auto& error = group->result().error) {
          ++errors;
          EXPECT_NE(error->message.find("does not know why"), std::string::npos) << error->message;
        } else {
          ++sound;
          ASSERT_TRUE(!device->host_addressable() || std::memcmp(memory->data(), content.data(), kBytes) == 0);
        }
      }
      EXPECT_GT(errors, 0u) << faults;
      EXPECT_GT(sound, 0u) << faults;
      engine.reset();
      EXPECT_EQ(ends, 60) << faults;
    }
  }
}

}  // namespace
}  // namespace gdsdata::testing
