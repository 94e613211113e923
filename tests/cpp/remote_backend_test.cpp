// Files on a server beside files of this machine: each request completes once, with right bytes,
// and blocks of the local cache are fetched once.
#include <sys/wait.h>

#include <array>
#include <set>
#include <thread>

#include "backend/http_client.h"
#include "backend/remote.h"
#include "base/block_cache.h"
#include "base/file.h"
#include "range_server.h"

namespace gdsdata::testing {
namespace {

using namespace std::chrono_literals;
using Asked = RangeServer::Asked;
using Answer = RangeServer::Answer;
using Then = RangeServer::Then;

constexpr size_t kSize = 2'000'000;
constexpr uint64_t kBlock = BlockCache::kLeastBlockBytes;

class RemoteBackendTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (CurlApi::get() == nullptr) GTEST_SKIP() << CurlApi::refusal();
    HttpOptions options;
    options.reactors = 1;
    options.connections = 16;
    options.least_backoff = 1ms;
    options.most_backoff = 20ms;
    options.stall_timeout = 5s;
    configure_http_client(options);
    local_file_ = File::open_for_reading(folder_.write("local", local_));
  }
  void TearDown() override {
    use_cache(nullptr);
    configure_http_client({});  // its connections close
  }

  void serve(std::function<Answer(const RangeServer&, const Asked&)> choose) {
    // Threads of the server before this one may still run, so they must not read `server_`.
    const auto self = std::make_shared<std::atomic<const RangeServer*>>(nullptr);
    auto server = std::make_unique<RangeServer>(
        random_bytes(kSize, 28), [self, choose](const Asked& asked) { return choose(*self->load(), asked); });
    *self = server.get();
    server_ = std::move(server);
    remote_file_ = open_remote();
  }
  void serve() {
    serve([](const RangeServer& server, const Asked& asked) { return server.usual(asked); });
  }
  std::shared_ptr<File> open_remote() {
    auto file = File::open_for_reading(server_->url(), FileIdentity{kSize, object_version("\"v1\"")});
    file->remote()->grant({server_->url(), {}, HttpReactor::Clock::now() + 1h});
    return file;
  }
  void cache_blocks(uint64_t most_bytes = 1 << 30) {
    use_cache(BlockCache::open(folder_.file("cache"), most_bytes, kBlock));
    remote_file_ = open_remote();
  }

  // A request for one range, and the memory it is read into.
  struct Reading {
    Piece piece;
    Bytes memory;
    Request request;
  };
  std::unique_ptr<Reading> reading(uint64_t tag, bool remote, uint64_t offset, uint64_t length) {
    auto made = std::make_unique<Reading>();
    made->memory.resize(length);
    made->piece = {.offset = offset, .length = length, .memory = made->memory.data()};
    made->request = {.tag = tag,
                     .file = (remote ? remote_file_ : local_file_).get(),
                     .offset = offset,
                     .length = length,
                     .pieces = {&made->piece, 1},
                     .remote = remote};
    return made;
  }
  std::span<const std::byte> expected(const Reading& one) const {
    return std::span(one.request.remote ? server_->object() : local_).subspan(one.request.offset, one.request.length);
  }

  std::unique_ptr<Backend> make_backend(size_t queue_depth = tuning::kQueueDepth) {
    BackendOptions options;
    options.queue_depth = queue_depth;
    return make_remote_backend(make_posix_backend(options));
  }

  // Submits and reaps until all have ended. Returns the completions by tag.
  std::vector<Completion> run(Backend& backend, const std::vector<std::unique_ptr<Reading>>& all) {
    std::vector<Request> requests;
    for (const auto& one : all) requests.push_back(one->request);
    std::vector<Completion> ended(all.size());
    std::set<uint64_t> tags;
    std::vector<Completion> some(7);
    size_t submitted = 0;
    const auto begun = HttpReactor::Clock::now();
    while (tags.size() < all.size() && HttpReactor::Clock::now() - begun < 60s) {
      submitted += backend.submit(std::span(requests).subspan(submitted));
      const size_t count = backend.reap(some, 1, 100ms);
      for (size_t i = 0; i < count; ++i) {
        EXPECT_TRUE(tags.insert(some[i].tag).second) << "completed twice";
        ended[some[i].tag] = std::move(some[i]);
      }
    }
    EXPECT_EQ(tags.size(), all.size());
    EXPECT_EQ(backend.reap(some, 0, 0ms), 0U);
    return ended;
  }
  void expect_right(const std::vector<Completion>& ended, const std::vector<std::unique_ptr<Reading>>& all) {
    for (const auto& one : all) {
      const Completion& completion = ended[one->request.tag];
      ASSERT_FALSE(completion.error) << completion.error->message;
      ASSERT_EQ(completion.bytes.total(), one->request.length);
      ASSERT_TRUE(std::ranges::equal(one->memory, expected(*one))) << one->request.offset;
    }
  }
  static uint64_t bytes_by(Route route, const std::vector<Completion>& ended) {
    uint64_t bytes = 0;
    for (const Completion& one : ended) bytes += one.bytes[route];
    return bytes;
  }

  const TemporaryFolder folder_;
  const Bytes local_ = random_bytes(500'000, 7);
  std::shared_ptr<File> local_file_, remote_file_;
  std::unique_ptr<RangeServer> server_;
};

TEST_F(RemoteBackendTest, MixedRequestsCompleteOnceEach) {
  serve();
  const auto backend = make_backend(4);
  std::mt19937_64 random(1);
  std::vector<std::unique_ptr<Reading>> all;
  for (uint64_t tag = 0; tag < 400; ++tag) {
    const bool remote = random() % 2 == 0;
    const size_t size = remote ? kSize : local_.size();
    const uint64_t offset = random() % (size - 1);
    all.push_back(reading(tag, remote, offset, 1 + random() % std::min<uint64_t>(size - offset, 30'000)));
  }
  const auto ended = run(*backend, all);
  expect_right(ended, all);
  uint64_t remote_bytes = 0;
  for (const auto& one : all) remote_bytes += one->request.remote ? one->request.length : 0;
  EXPECT_EQ(bytes_by(Route::kRemote, ended), remote_bytes);
}

TEST_F(RemoteBackendTest, NoMoreRemoteRequestsAreTakenThanTheQueueHas) {
  serve([](const RangeServer& server, const Asked& asked) {
    Answer answer = server.usual(asked);
    answer.delay = 20ms;
    return answer;
  });
  const auto backend = make_backend();
  std::vector<std::unique_ptr<Reading>> all;
  std::vector<Request> requests;
  for (uint64_t tag = 0; tag < 100; ++tag) {
    all.push_back(reading(tag, true, tag * 1000, 1000));
    requests.push_back(all.back()->request);
  }
  EXPECT_EQ(backend->submit(requests), tuning::kRemoteQueueDepth);
  EXPECT_EQ(backend->submit(std::span(requests).subspan(tuning::kRemoteQueueDepth)), 0U);
  std::vector<Completion> ended(100);
  EXPECT_EQ(backend->reap(ended, tuning::kRemoteQueueDepth, 60s), tuning::kRemoteQueueDepth);
}

TEST_F(RemoteBackendTest, AnInterruptEndsTheWait) {
  serve([](const RangeServer& server, const Asked& asked) {
    Answer answer = server.usual(asked);
    answer.delay = 500ms;
    return answer;
  });
  const auto backend = make_backend();
  const auto one = reading(0, true, 0, 1000);
  ASSERT_EQ(backend->submit({&one->request, 1}), 1U);
  std::vector<Completion> ended(4);
  std::thread interrupting([&] {
    std::this_thread::sleep_for(30ms);
    backend->interrupt();
  });
  const auto begun = HttpReactor::Clock::now();
  EXPECT_EQ(backend->reap(ended, 1, 60s), 0U);
  EXPECT_LT(HttpReactor::Clock::now() - begun, 450ms);
  interrupting.join();
  EXPECT_EQ(backend->reap(ended, 1, 60s), 1U);
}

TEST_F(RemoteBackendTest, ATimeoutEndsTheWait) {
  serve([](const RangeServer& server, const Asked& asked) {
    Answer answer = server.usual(asked);
    answer.delay = 300ms;
    return answer;
  });
  const auto backend = make_backend();
  const auto one = reading(0, true, 0, 1000);
  ASSERT_EQ(backend->submit({&one->request, 1}), 1U);
  std::vector<Completion> ended(4);
  EXPECT_EQ(backend->reap(ended, 1, 20ms), 0U);
  EXPECT_EQ(backend->reap(ended, 1, 60s), 1U);
}

TEST_F(RemoteBackendTest, ATimeoutReturnsFewerThanTheWaitWasFor) {
  serve([](const RangeServer& server, const Asked& asked) {
    Answer answer = server.usual(asked);
    if (asked.begin > 0) answer.delay = 600ms;
    return answer;
  });
  const auto backend = make_backend();
  const auto quick = reading(1, true, 0, 1000), slow = reading(2, true, 1000, 1000);
  const std::array requests = {quick->request, slow->request};
  ASSERT_EQ(backend->submit(requests), 2U);
  std::vector<Completion> ended(4);
  EXPECT_EQ(backend->reap(ended, 2, 300ms), 1U);
  EXPECT_EQ(ended[0].tag, 1U);
  EXPECT_EQ(backend->reap(ended, 1, 60s), 1U);
  EXPECT_EQ(ended[0].tag, 2U);
}

TEST_F(RemoteBackendTest, AFailedRangeIsAnErrorAndTheOthersAreRight) {
  serve([](const RangeServer& server, const Asked& asked) {
    return asked.begin == 5000 ? RangeServer::refusal(404) : server.usual(asked);
  });
  const auto backend = make_backend();
  std::vector<std::unique_ptr<Reading>> all;
  for (uint64_t tag = 0; tag < 10; ++tag) all.push_back(reading(tag, true, tag * 1000, 1000));
  auto ended = run(*backend, all);
  ASSERT_TRUE(ended[5].error);
  EXPECT_EQ(ended[5].error->code, ErrorCode::kNotFound);
  EXPECT_EQ(ended[5].bytes.total(), 0U);
  all.erase(all.begin() + 5);
  expect_right(ended, all);
}

TEST_F(RemoteBackendTest, RequestsThatWereCanceledEndWithTheAttemptInFlight) {
  HttpOptions options;
  options.reactors = 1;
  options.stall_timeout = 200ms;
  options.hedge = false;
  configure_http_client(options);
  for (const bool is_cached : {false, true}) {
    serve([](const RangeServer&, const Asked&) { return Answer{"", {}, Then::kStall}; });
    if (is_cached) cache_blocks();
    const auto backend = make_backend();
    std::atomic<bool> canceled{false};
    const auto one = reading(0, true, 0, 3 * kBlock);
    one->request.canceled = &canceled;
    ASSERT_EQ(backend->submit({&one->request, 1}), 1U);
    while (server_->requests() == 0) std::this_thread::sleep_for(1ms);
    canceled = true;
    std::vector<Completion> ended(4);
    size_t count = 0;
    for (int turn = 0; turn < 600 && count == 0; ++turn) count = backend->reap(ended, 1, 100ms);
    ASSERT_EQ(count, 1U);
    ASSERT_TRUE(ended[0].error);
    EXPECT_EQ(ended[0].error->code, ErrorCode::kClosed);
    EXPECT_LE(server_->requests(), 3U);  // it is canceled before the attempt in flight ends, or the next one
  }
}

TEST_F(RemoteBackendTest, ASubmitThatCannotBeginReportsWhatItTookBefore) {
  serve();
  const auto first = reading(0, false, 0, 1000), second = reading(1, true, 0, 1000);
  const std::vector<Request> requests = {first->request, second->request};
  // In a child, because a client that is closed stays closed.
  const pid_t child = ::fork();
  if (child == 0) {
    close_http_client();
    const auto backend = make_backend();
    const bool took_one = backend->submit(requests) == 1;
    const bool is_closed = error_of([&] { backend->submit({&second->request, 1}); }).code == ErrorCode::kClosed;
    std::vector<Completion> ended(4);
    const bool completed = backend->reap(ended, 1, 60s) == 1 && !ended[0].error;
    ::_exit(took_one && is_closed && completed ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST_F(RemoteBackendTest, BlocksAreFetchedOnceAndThenReadFromTheCache) {
  serve();
  cache_blocks();
  const auto backend = make_backend();
  std::vector<std::unique_ptr<Reading>> all;
  for (uint64_t tag = 0; tag < 20; ++tag) all.push_back(reading(tag, true, tag * 70'000 + 13, 60'001));
  auto ended = run(*backend, all);
  expect_right(ended, all);
  EXPECT_GT(bytes_by(Route::kCacheFill, ended), 0U);
  const size_t requests = server_->requests();
  for (auto& one : all) std::ranges::fill(one->memory, std::byte{});
  ended = run(*backend, all);
  expect_right(ended, all);
  EXPECT_EQ(bytes_by(Route::kLocalCache, ended), 20U * 60'001);
  EXPECT_EQ(server_->requests(), requests);
}

TEST_F(RemoteBackendTest, BackendsThatRaceForTheSameBlocksFetchEachOnce) {
  serve([](const RangeServer& server, const Asked& asked) {
    Answer answer = server.usual(asked);
    answer.delay = 3ms;
    return answer;
  });
  cache_blocks();
  std::vector<std::thread> threads;
  for (uint64_t seed = 0; seed < 3; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937_64 random(seed);
      const auto backend = make_backend();
      std::vector<std::unique_ptr<Reading>> all;
      for (uint64_t tag = 0; tag < 60; ++tag) {
        const uint64_t offset = random() % (kSize - 100'000);
        all.push_back(reading(tag, true, offset, 1 + random() % 100'000));
      }
      expect_right(run(*backend, all), all);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<int> fetched(kSize / kBlock + 1);
  for (const Asked& asked : server_->log()) {
    for (uint64_t block = asked.begin / kBlock; block * kBlock < asked.end; ++block) ++fetched[block];
  }
  for (const int times : fetched) EXPECT_LE(times, 1);
}

TEST_F(RemoteBackendTest, AFailureReleasesItsClaims) {
  std::atomic<bool> fails{true};
  serve([&](const RangeServer& server, const Asked& asked) {
    return fails ? RangeServer::refusal(404) : server.usual(asked);
  });
  cache_blocks();
  const auto backend = make_backend();
  std::vector<std::unique_ptr<Reading>> all;
  for (uint64_t tag = 0; tag < 8; ++tag) all.push_back(reading(tag, true, tag * 100'000, 90'000));
  for (const Completion& one : run(*backend, all)) EXPECT_TRUE(one.error);
  fails = false;
  expect_right(run(*backend, all), all);
}

TEST_F(RemoteBackendTest, ABackendThatIsGivenUpReleasesItsClaims) {
  std::atomic<bool> waits{true};
  serve([&](const RangeServer& server, const Asked& asked) {
    Answer answer = server.usual(asked);
    if (waits) answer.delay = 200ms;
    return answer;
  });
  cache_blocks();
  const auto one = reading(0, true, 0, 3 * kBlock);
  {
    const auto backend = make_backend();
    ASSERT_EQ(backend->submit({&one->request, 1}), 1U);
  }
  waits = false;
  std::vector<std::unique_ptr<Reading>> all;
  all.push_back(reading(0, true, 0, 3 * kBlock));
  const auto backend = make_backend();
  expect_right(run(*backend, all), all);
}

TEST_F(RemoteBackendTest, ABlockThatAnotherHoldsForTooLongIsFetchedForThisReadAlone) {
  HttpOptions options;
  options.stall_timeout = 200ms;
  configure_http_client(options);
  serve();
  cache_blocks();
  CachedObject& held = *remote_file_->cached();
  ASSERT_EQ(held.claim(1), CachedObject::Claim::kClaimed);  // as a process that is stopped
  const auto backend = make_backend();
  std::vector<std::unique_ptr<Reading>> all;
  all.push_back(reading(0, true, 0, 2 * kBlock - 1000));
  const auto ended = run(*backend, all);
  expect_right(ended, all);
  EXPECT_EQ(bytes_by(Route::kRemote, ended), kBlock - 1000);
  EXPECT_EQ(bytes_by(Route::kCacheFill, ended), kBlock);
  held.release(1);
}

TEST_F(RemoteBackendTest, WithoutRoomInTheCacheBytesArePassedOn) {
  serve();
  cache_blocks(8 * kBlock);
  const auto backend = make_backend();
  std::vector<std::unique_ptr<Reading>> all;
  for (uint64_t tag = 0; tag < 25; ++tag) all.push_back(reading(tag, true, tag * 70'000, 65'000));
  const auto ended = run(*backend, all);
  expect_right(ended, all);
  EXPECT_GT(bytes_by(Route::kRemote, ended), 0U);
  EXPECT_GT(bytes_by(Route::kCacheFill, ended), 0U);
}

TEST_F(RemoteBackendTest, MemoryForBlocksIsBounded) {
  serve([](const RangeServer& server, const Asked& asked) {
    Answer answer = server.usual(asked);
    answer.delay = 20ms;
    return answer;
  });
  cache_blocks();
  const auto backend = make_backend();
  std::vector<std::unique_ptr<Reading>> all;
  std::vector<Request> requests;
  const uint64_t length = kSize - kBlock;
  for (uint64_t tag = 0; tag < 40; ++tag) {
    all.push_back(reading(tag, true, 0, length));
    requests.push_back(all.back()->request);
  }
  const size_t taken = backend->submit(requests);
  EXPECT_EQ(taken, tuning::kCacheFillBytes / (length + 2 * kBlock));
  std::vector<Completion> ended(40);
  EXPECT_EQ(backend->reap(ended, taken, 60s), taken);
}

}  // namespace
}  // namespace gdsdata::testing
