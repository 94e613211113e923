// How many requests a server gets at a time, which of them are slow, and exchanges that a caller
// waits for.
#include "backend/http_client.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <future>
#include <set>
#include <string>
#include <system_error>
#include <thread>

#include "backend/http_exchange.h"
#include "range_server.h"

namespace gdsdata::testing {
namespace {

using namespace std::chrono_literals;

TEST(HttpWindow, RequestsAboveTheLimitWaitInTheirOrder) {
  HttpRoom room(2);
  HttpWindow window(room, 2);
  std::vector<int> begun;
  for (int i = 0; i < 5; ++i) window.enter([&begun, i] { begun.push_back(i); });
  EXPECT_EQ(begun, (std::vector<int>{0, 1}));
  EXPECT_FALSE(window.try_enter());
  window.leave(false);
  window.leave(false);
  EXPECT_EQ(begun, (std::vector<int>{0, 1, 2, 3}));
  for (int i = 0; i < 3; ++i) window.leave(false);
  EXPECT_EQ(begun.size(), 5U);
  EXPECT_EQ(window.in_flight(), 0U);
}

TEST(HttpWindow, AStormHalvesTheLimitOnceForAllThatWereInFlight) {
  HttpRoom room(64);
  HttpWindow window(room, 64);
  for (int i = 0; i < 64; ++i) window.enter([] {});
  for (int i = 0; i < 64; ++i) window.leave(true);
  EXPECT_EQ(window.limit(), 32U);
  for (int i = 0; i < 32; ++i) window.enter([] {});
  for (int i = 0; i < 32; ++i) window.leave(true);
  EXPECT_EQ(window.limit(), 16U);
}

TEST(HttpWindow, TheLimitNeverFallsBelowOneAndGrowsAgainByOneAWindow) {
  HttpRoom room(8);
  HttpWindow window(room, 8);
  for (int i = 0; i < 20; ++i) {
    window.enter([] {});
    window.leave(true);
  }
  EXPECT_EQ(window.limit(), 1U);
  size_t requests = 0;
  for (; window.limit() < 8 && requests < 1000; ++requests) {
    window.enter([] {});
    window.leave(false);
  }
  EXPECT_EQ(window.limit(), 8U);
  EXPECT_EQ(requests, 2U + 3 + 4 + 5 + 6 + 7 + 8);
}

TEST(HttpWindow, ARequestThatBeginsAndEndsAnotherKeepsTheCount) {
  HttpRoom room(1);
  HttpWindow window(room, 1);
  int begun = 0;
  window.enter([] {});
  for (int i = 0; i < 3; ++i) {
    window.enter([&] {
      ++begun;
      window.leave(false);
    });
  }
  window.leave(false);
  EXPECT_EQ(begun, 3);
  EXPECT_EQ(window.in_flight(), 0U);
}

// As when a loader is closed: all of its ranges that wait are canceled.
TEST(HttpWindow, AnyNumberOfRequestsMayEndWhenTheyBegin) {
  constexpr int kRequests = 300'000;
  HttpRoom room(1);
  HttpWindow window(room, 1);
  int begun = 0;
  window.enter([] {});
  for (int i = 0; i < kRequests; ++i) {
    window.enter([&] {
      ++begun;
      window.leave(false);
    });
  }
  window.leave(false);
  EXPECT_EQ(begun, kRequests);
  EXPECT_EQ(window.in_flight(), 0U);
  EXPECT_EQ(room.in_flight(), 0U);
}

TEST(HttpWindow, HostsShareTheRoomInTurns) {
  HttpRoom room(4);
  HttpWindow one(room, 4), other(room, 4);
  std::string begun;
  for (int i = 0; i < 8; ++i) one.enter([&] { begun += 'a'; });
  for (int i = 0; i < 8; ++i) other.enter([&] { begun += 'b'; });
  EXPECT_EQ(begun, "aaaab");  // a host may always have one request
  EXPECT_EQ(room.in_flight(), 5U);
  one.leave(false);  // the room is as full as it may be
  EXPECT_EQ(begun, "aaaab");
  for (int i = 0; i < 2; ++i) one.leave(false);
  while (one.in_flight() + other.in_flight() > 0) {
    if (one.in_flight() > 0) one.leave(false);
    if (other.in_flight() > 0) other.leave(false);
    EXPECT_LE(room.in_flight(), 5U);
  }
  EXPECT_EQ(std::count(begun.begin(), begun.end(), 'a'), 8);
  EXPECT_EQ(std::count(begun.begin(), begun.end(), 'b'), 8);
  EXPECT_LT(begun.find('b', 5), 8U);  // it does not wait for all of the first host's
  EXPECT_EQ(room.in_flight(), 0U);
}

TEST(HttpWindow, AHostThatStallsLeavesAnotherOneOneRequest) {
  HttpRoom room(4);
  HttpWindow stalled(room, 4), other(room, 4);
  for (int i = 0; i < 8; ++i) stalled.enter([] {});
  int begun = 0;
  for (int i = 0; i < 5; ++i) other.enter([&] { ++begun; });
  for (int i = 1; i <= 5; ++i) {
    EXPECT_EQ(begun, i);
    other.leave(false);
  }
}

TEST(FirstByteTimes, TheSlowestPercentIsKnownAfterSomeRequests) {
  FirstByteTimes times;
  for (int i = 0; i < 31; ++i) times.add(100ms);
  EXPECT_EQ(times.slow(), std::nullopt);
  times.add(100ms);
  EXPECT_EQ(times.slow(), 300ms);  // three medians: the times are much alike
  for (int i = 0; i < 256; ++i) times.add(i % 50 == 0 ? 900ms : 100ms);
  EXPECT_EQ(times.slow(), 900ms);
  for (int i = 0; i < 256; ++i) times.add(1ms);
  EXPECT_EQ(times.slow(), 50ms);  // a fast server's requests are never slow before that
}

TEST(HttpShard, AHostHasOneWindow) {
  if (CurlApi::get() == nullptr) GTEST_SKIP() << CurlApi::refusal();
  HttpShard shard(4);
  EXPECT_EQ(&shard.window_of("http://a/x?y"), &shard.window_of("https://a/z"));
  EXPECT_NE(&shard.window_of("http://a/x"), &shard.window_of("http://a:81/x"));
  EXPECT_EQ(shard.window_of("http://b?x").limit(), 4U);
}

TEST(HttpShard, EachHasPausesOfItsOwn) {
  if (CurlApi::get() == nullptr) GTEST_SKIP() << CurlApi::refusal();
  std::set<uint64_t> first;
  for (int i = 0; i < 4; ++i) first.insert(HttpShard(1).random());
  EXPECT_GT(first.size(), 1U);
}

TEST(HttpClient, ItsReactorsShareAllConnections) {
  if (CurlApi::get() == nullptr) GTEST_SKIP() << CurlApi::refusal();
  HttpOptions options;
  options.reactors = 4;
  for (const size_t connections : {3, 4, 7, 8}) {
    options.connections = connections;
    HttpClient client(options);
    size_t sum = 0;
    for (size_t i = 0; i < std::min<size_t>(4, connections); ++i) sum += client.next_shard().most;
    EXPECT_EQ(sum, connections);
  }
}

// A thread ends a replaced client, because its own cannot wait for themselves.
TEST(HttpClient, IsReplacedEvenIfNoThreadIsLeft) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need more memory than the limit allows";
#endif
  if (CurlApi::get() == nullptr) GTEST_SKIP() << CurlApi::refusal();
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        http_client();
        uint64_t pages = 0;
        std::ifstream("/proc/self/statm") >> pages;
        rlimit limit{};
        limit.rlim_cur = limit.rlim_max = pages * static_cast<uint64_t>(::getpagesize()) + (1 << 20);
        ::setrlimit(RLIMIT_AS, &limit);
        bool has_thread = true;
        try {
          std::thread([] {}).join();
        } catch (const std::system_error&) {
          has_thread = false;
        }
        configure_http_client({});
        ::_exit(has_thread ? 1 : 0);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST(HttpClient, AForkedChildHasItsParentsOptions) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "TSan starts no thread in a forked child";
#endif
  if (CurlApi::get() == nullptr) GTEST_SKIP() << CurlApi::refusal();
  HttpOptions options;
  options.connections = 3;
  configure_http_client(options);
  const pid_t child = ::fork();
  if (child == 0) ::_exit(static_cast<int>(http_client()->options().connections));
  int status = 0;
  ::waitpid(child, &status, 0);
  configure_http_client({});
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 3);
}

TEST(HttpReactor, ABrokenPipeDoesNotEndTheProgram) {
  if (CurlApi::get() == nullptr) GTEST_SKIP() << CurlApi::refusal();
  HttpReactor reactor(1);
  std::promise<void> goes_on;
  reactor.post([&] {
    ::pthread_kill(::pthread_self(), SIGPIPE);
    goes_on.set_value();
  });
  goes_on.get_future().get();
}

class HttpExchange : public ::testing::Test {
 protected:
  void SetUp() override {
    if (CurlApi::get() == nullptr) GTEST_SKIP() << CurlApi::refusal();
    configure_http_client({});
  }
  void TearDown() override { configure_http_client({}); }  // its connections close
  static HttpRequest get(const std::string& url) {
    HttpRequest request;
    request.url = url;
    return request;
  }
};

TEST_F(HttpExchange, AResponseIsReturnedWhole) {
  const RangeServer server(random_bytes(100'000, 1));
  const HttpResponse response = http_exchange(get(server.url()), 1 << 20, nullptr);
  EXPECT_EQ(response.head.status, 206);
  EXPECT_EQ(response.body, server.object());
}

TEST_F(HttpExchange, AResponseThatIsTooLongIsCut) {
  const RangeServer server(random_bytes(100'000, 1));
  const HttpResponse response = http_exchange(get(server.url()), 50'000, nullptr);
  EXPECT_TRUE(std::ranges::equal(response.body, std::span(server.object()).first(50'000)));
}

TEST_F(HttpExchange, AFailureHasNoQuery) {
  RangeServer* self = nullptr;
  RangeServer server(Bytes(1000),
                     [&](const RangeServer::Asked& asked) { return self->cut(asked, 10, RangeServer::Then::kReset); });
  self = &server;
  const Error error = error_of([&] { http_exchange(get(server.url("?sig=a-secret")), 1 << 20, nullptr); });
  EXPECT_EQ(error.path, server.url());
  EXPECT_NE(error.message.find("GET " + server.url() + ": "), std::string::npos) << error.message;
  EXPECT_EQ(error.message.find("secret"), std::string::npos) << error.message;
}

TEST_F(HttpExchange, ACallerThatIsInterruptedCancelsIt) {
  RangeServer* self = nullptr;
  RangeServer server(Bytes(1000), [&](const RangeServer::Asked& asked) {
    auto answer = self->usual(asked);
    answer.delay = 1h;
    return answer;
  });
  self = &server;
  struct Interrupt {};
  const auto begun = HttpReactor::Clock::now();
  EXPECT_THROW(http_exchange(get(server.url()), 1 << 20, [] { throw Interrupt(); }), Interrupt);
  EXPECT_LT(HttpReactor::Clock::now() - begun, 30s);
}

// The response arrives while the caller gives up: nothing uses the caller's memory after that.
TEST_F(HttpExchange, AnInterruptAtTheMomentOfTheResponseIsSafe) {
  RangeServer* self = nullptr;
  RangeServer server(Bytes(1000), [&](const RangeServer::Asked& asked) {
    auto answer = self->usual(asked);
    answer.delay = 95ms + std::chrono::milliseconds(asked.number % 12);  // the caller polls after 100 ms
    return answer;
  });
  self = &server;
  struct Interrupt {};
  std::vector<std::thread> callers;
  for (int i = 0; i < 8; ++i) {
    callers.emplace_back([&] {
      for (int round = 0; round < 6; ++round) {
        try {
          http_exchange(get(server.url()), 1 << 20, [] { throw Interrupt(); });
        } catch (const Interrupt&) {
        }
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST_F(HttpExchange, RequestsInFlightEndWithTheClient) {
  RangeServer* self = nullptr;
  RangeServer server(Bytes(1000), [&](const RangeServer::Asked& asked) {
    auto answer = self->usual(asked);
    answer.delay = 1h;
    return answer;
  });
  self = &server;
  const auto client = http_client();
  auto waiting = std::async(std::launch::async,
                            [&] { return error_of([&] { http_exchange(get(server.url()), 1 << 20, nullptr); }).code; });
  while (server.requests() == 0) std::this_thread::sleep_for(1ms);
  client->stop();
  EXPECT_EQ(waiting.get(), ErrorCode::kClosed);
  EXPECT_EQ(error_of([&] { http_exchange(get(server.url()), 1 << 20, nullptr); }).code, ErrorCode::kClosed);
}

}  // namespace
}  // namespace gdsdata::testing
