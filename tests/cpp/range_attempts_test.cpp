// Attempts after the first one: hosts, connections, pauses, and nothing that is secret.
#include <dlfcn.h>
#include <netdb.h>

#include <atomic>
#include <condition_variable>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "range_reading.h"

namespace {

// Lookups of the host "slow.test" that have not ended. They do when a test says so.
std::atomic<int> slow_lookups{0};
std::atomic<bool> lookups_are_slow{false};

}  // namespace

// Takes the place of libc's, for libcurl's threads too.
extern "C" int getaddrinfo(const char* host, const char* service, const addrinfo* hints, addrinfo** found) {
  using namespace std::chrono_literals;
  static const auto real = reinterpret_cast<decltype(&getaddrinfo)>(::dlsym(RTLD_NEXT, "getaddrinfo"));
  if (host == nullptr || std::string_view(host) != "slow.test") return real(host, service, hints, found);
  ++slow_lookups;
  const auto begun = std::chrono::steady_clock::now();
  while (lookups_are_slow && std::chrono::steady_clock::now() - begun < 20s) std::this_thread::sleep_for(1ms);
  --slow_lookups;
  return EAI_AGAIN;
}

namespace gdsdata::testing {
namespace {

using RangeAttempts = RangeReading;

bool has_secret(const Asked& asked) { return asked.head.find("a-secret") != std::string::npos; }

Answer redirect_to(const std::string& url) {
  return {"HTTP/1.1 302 x\r\nLocation: " + url + "\r\nContent-Length: 0\r\n\r\n", {}};
}

TEST_F(RangeAttempts, ARedirectTakesTheHeadersOfTheAccessToNoOtherServer) {
  RangeServer* self = nullptr;
  RangeServer other(random_bytes(kSize, 28), [&](const Asked& asked) { return self->usual(asked); });
  self = &other;
  serve([&](const RangeServer&, const Asked&) { return redirect_to(other.url()); });
  for (int i = 0; i < 2; ++i) expect_right(read());
  ASSERT_EQ(other.requests(), 2U);
  EXPECT_FALSE(has_secret(other.log()[0]));
  EXPECT_EQ(other.log()[0].begin, kRange.begin);
  EXPECT_NE(other.log()[1].head.find("If-Match: \"v1\""), std::string::npos);
}

TEST_F(RangeAttempts, ARedirectOnTheSameServerKeepsThem) {
  serve([](const RangeServer& server, const Asked& asked) {
    return asked.number == 0 ? redirect_to("/elsewhere") : server.usual(asked);
  });
  expect_right(read());
  EXPECT_TRUE(has_secret(server_->log()[1]));
  EXPECT_NE(server_->log()[1].head.find("GET /elsewhere "), std::string::npos);
}

TEST_F(RangeAttempts, ARedirectIsAskedForOnceForManyRanges) {
  RangeServer* self = nullptr;
  RangeServer other(random_bytes(kSize, 28), [&](const Asked& asked) { return self->usual(asked); });
  self = &other;
  serve([&](const RangeServer&, const Asked&) { return redirect_to(other.url()); });
  for (int i = 0; i < 5; ++i) expect_right(read());
  EXPECT_EQ(server_->requests(), 1U);
  EXPECT_EQ(other.requests(), 5U);
}

TEST_F(RangeAttempts, ARedirectThatHasEndedIsAskedForAgain) {
  serve([](const RangeServer& server, const Asked& asked) {
    if (asked.head.find("GET /elsewhere") == std::string::npos) {
      return redirect_to("/elsewhere" + std::to_string(asked.number));
    }
    if (asked.number >= 2 && asked.head.find("GET /elsewhere0 ") != std::string::npos) {
      return Answer{"HTTP/1.1 403 x\r\nContent-Length: 0\r\n\r\n", {}};
    }
    return server.usual(asked);
  });
  for (int i = 0; i < 3; ++i) expect_right(read());
  EXPECT_EQ(server_->requests(), 6U);  // the redirect, two ranges there, one of them refused; and again
}

TEST_F(RangeAttempts, RedirectsThatServeOneRequestEachAreSoonAskedForEachTime) {
  struct Served {  // of the server's threads, which outlive this test's own variables
    std::mutex mutex;
    std::set<std::string> places;
  };
  serve([served = std::make_shared<Served>()](const RangeServer& server, const Asked& asked) {
    const size_t begin = asked.head.find("GET /once");
    if (begin == std::string::npos) return redirect_to("/once" + std::to_string(asked.number));
    const std::string place = asked.head.substr(begin, asked.head.find(' ', begin + 4) - begin);
    const std::lock_guard lock(served->mutex);
    const bool is_first = served->places.insert(place).second;
    return is_first ? server.usual(asked) : Answer{"HTTP/1.1 410 x\r\nContent-Length: 0\r\n\r\n", {}};
  });
  for (int i = 0; i < 10; ++i) expect_right(read());
  EXPECT_EQ(server_->requests(), 10U * 2 + 3);
}

TEST_F(RangeAttempts, OneRedirectThatEndsForManyRangesCountsOnce) {
  constexpr unsigned kRanges = 4;
  struct Served {
    std::mutex mutex;
    std::condition_variable changed;
    unsigned origin = 0, at_first = 0, later = 0;
  };
  const auto served = std::make_shared<Served>();
  serve(
      [served](const RangeServer& server, const Asked& asked) {
        std::unique_lock lock(served->mutex);
        if (asked.head.find("GET /place") == std::string::npos) {
          return redirect_to("/place" + std::to_string(served->origin++));
        }
        if (asked.head.find("GET /place0 ") == std::string::npos) {
          ++served->later;
        } else if (const unsigned before = served->at_first++; before > 0) {
          // The first place has ended. Each range learns of it when another one has a new place.
          served->changed.notify_all();
          served->changed.wait_for(lock, 2s, [&] { return served->at_first > kRanges && served->later >= before - 1; });
          return Answer{"HTTP/1.1 403 x\r\nContent-Length: 0\r\n\r\n", {}};
        }
        served->changed.notify_all();
        return server.usual(asked);
      },
      patient());
  expect_right(read());
  std::vector<std::future<Outcome>> ranges;
  for (unsigned i = 0; i < kRanges; ++i) ranges.push_back(begin(kRange));
  for (auto& range : ranges) expect_right(range.get());
  const auto asked = [&] {
    const std::lock_guard lock(served->mutex);
    return served->origin;
  };
  const unsigned before = asked();
  for (int i = 0; i < 3; ++i) expect_right(read());
  EXPECT_EQ(asked(), before);
}

TEST_F(RangeAttempts, ARangeLeavesARedirectToAServerThatIsTooBusy) {
  auto origin = std::make_shared<std::atomic<unsigned>>(0);
  serve([origin](const RangeServer& server, const Asked& asked) {
    if (asked.head.find("GET /mirror") == std::string::npos) {
      return redirect_to("/mirror" + std::to_string((*origin)++));
    }
    if (asked.number >= 2 && asked.head.find("GET /mirror0 ") != std::string::npos) {
      return Answer{"HTTP/1.1 503 x\r\nContent-Length: 0\r\n\r\n", {}};
    }
    return server.usual(asked);
  });
  for (int i = 0; i < 3; ++i) expect_right(read());
  EXPECT_EQ(*origin, 2U);
}

TEST_F(RangeAttempts, ARedirectWithoutAnEndIsAnError) {
  serve([](const RangeServer& server, const Asked&) { return redirect_to(server.url()); });
  const Error error = expect_error(read(), ErrorCode::kIo);
  EXPECT_NE(error.message.find("more than 5 times"), std::string::npos) << error.message;
  EXPECT_EQ(server_->requests(), 6U);
}

// Answers on the connections that were made before `is_dead` was set, and on none of them after.
// Their servers' threads are those that have answered before.
Answer until_dead(const RangeServer& server, const Asked& asked, const std::atomic<bool>& is_dead) {
  static thread_local bool is_of_before = false;
  Answer answer = server.usual(asked);
  if (!is_dead) {
    is_of_before = true;
    answer.delay = 50ms;  // so that each range has a connection of its own
  } else if (is_of_before) {
    answer = {"", {}, Then::kStall};
  }
  return answer;
}

TEST_F(RangeAttempts, AfterAnAttemptWithoutAByteTheNextHasAFreshConnection) {
  HttpOptions options = quick();
  options.hedge = false;
  std::atomic<bool> is_dead{false};
  serve([&](const RangeServer& server, const Asked& asked) { return until_dead(server, asked, is_dead); }, options);
  std::vector<std::future<Outcome>> reads;
  for (int i = 0; i < 8; ++i) reads.push_back(begin(kRange));
  for (auto& one : reads) expect_right(outcome_of(std::move(one)));
  ASSERT_GT(server_->connections(), 2U);
  is_dead = true;
  const auto before = client_->statistics().retries.load();
  expect_right(read());
  EXPECT_EQ(client_->statistics().retries - before, 1U);
}

TEST_F(RangeAttempts, ASecondRequestHasAFreshConnection) {
  HttpOptions options = quick();
  options.stall_timeout = 30s;
  options.deadline = 60s;
  std::atomic<bool> is_dead{false};
  serve([&](const RangeServer& server, const Asked& asked) { return until_dead(server, asked, is_dead); }, options);
  std::vector<std::future<Outcome>> reads;
  for (int i = 0; i < 64; ++i) reads.push_back(begin({0, 1000}));  // the slow ones are known then
  for (auto& one : reads) expect_right(outcome_of(std::move(one)), {0, 1000});
  ASSERT_GT(server_->connections(), 2U);
  is_dead = true;
  const auto begun = HttpReactor::Clock::now();
  expect_right(read());
  EXPECT_LT(HttpReactor::Clock::now() - begun, 15s);
}

TEST_F(RangeAttempts, ARefusalWhoseBodyIsCutIsARefusal) {
  std::atomic<int> status{404};
  serve([&](const RangeServer& server, const Asked& asked) {
    if (status == 503 && asked.number >= 2) return server.usual(asked);
    return Answer{"HTTP/1.1 " + std::to_string(status.load()) + " x\r\nContent-Length: 100\r\n\r\n", {}, Then::kClose};
  });
  expect_error(read(), ErrorCode::kNotFound);
  EXPECT_EQ(server_->requests(), 1U);
  status = 503;
  expect_right(read());
  EXPECT_EQ(client_->statistics().throttled, 1U);
}

TEST_F(RangeAttempts, NoErrorRepeatsTheSecretsThatAServerEchoes) {
  static const std::string body = "<Error><Code>NoSuchKey</Code><Message>" + std::string(178, 'm') +
                                  " Authorization: a-secret, and a-secret again</Message></Error>";
  serve([](const RangeServer&, const Asked&) {
    return Answer{
        "HTTP/1.1 404 x\r\nx-request-id: a-secret\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n",
        std::as_bytes(std::span(body))};
  });
  const Error error = expect_error(read(), ErrorCode::kNotFound);
  EXPECT_EQ(error.message.find("a-s"), std::string::npos) << error.message;
  EXPECT_NE(error.message.find("Authorization: ..."), std::string::npos) << error.message;
}

TEST_F(RangeAttempts, AServerThatSendsOneByteATimeIsGivenUpAfterSomeAttempts) {
  serve([](const RangeServer& server, const Asked& asked) { return server.cut(asked, 1, Then::kClose); });
  const Error error = expect_error(read(), ErrorCode::kIo);
  EXPECT_NE(error.message.find("tried 12 times"), std::string::npos) << error.message;
  EXPECT_EQ(server_->requests(), 12U);
}

TEST_F(RangeAttempts, RangesThatWereCanceledAreNotAskedForAgain) {
  HttpOptions options = quick();
  options.hedge = false;
  serve([](const RangeServer&, const Asked&) { return Answer{"", {}, Then::kStall}; }, options);
  std::atomic<bool> canceled{false};
  std::vector<std::future<Outcome>> reads;
  for (int i = 0; i < 20; ++i) reads.push_back(begin(kRange, [&] { return canceled.load(); }));
  while (server_->requests() < 8) std::this_thread::sleep_for(1ms);
  canceled = true;
  const size_t requests = server_->requests();
  for (auto& one : reads) expect_error(outcome_of(std::move(one)), ErrorCode::kClosed);
  EXPECT_LE(server_->requests(), requests + 8);  // those that began at the same time
}

// Whether this libcurl need not wait for a lookup: see CurlApi::kQuickExit.
bool has_quick_exit() {
  const CurlApi& curl = *CurlApi::get();
  const CurlApi::Easy easy = curl.easy_init();
  const bool has_it = curl.easy_setopt(easy, CurlApi::kQuickExit, 1L) == 0;
  curl.easy_cleanup(easy);
  return has_it;
}

TEST_F(RangeAttempts, ALookupThatHangsHoldsUpNeitherOtherHostsNorTheEnd) {
  if (!has_quick_exit()) GTEST_SKIP() << "libcurl is older than 7.87";
  serve([](const RangeServer& server, const Asked& asked) { return server.usual(asked); });
  lookups_are_slow = true;
  const auto good = object_;
  object_ = std::make_shared<RemoteObject>("http://slow.test/object", kSize, 1);
  object_->grant({"http://slow.test/object", {}, HttpReactor::Clock::now() + 1h});
  std::atomic<bool> canceled{false};
  auto hangs = begin(kRange, [&] { return canceled.load(); });
  object_ = good;
  while (client_->statistics().retries == 0) expect_right(read());
  canceled = true;
  EXPECT_TRUE(outcome_of(std::move(hangs)).error);
  client_->stop();
  EXPECT_GT(slow_lookups, 0) << "it waited for a lookup";
  lookups_are_slow = false;
  while (slow_lookups > 0) std::this_thread::sleep_for(1ms);
}

TEST_F(RangeAttempts, WaitForDescriptorsWhileNoneIsLeft) {
  HttpOptions options = patient();
  options.deadline = 30s;
  serve([](const RangeServer& server, const Asked& asked) { return server.usual(asked); }, options);
  std::future<Outcome> reading;
  {
    const DescriptorLimit none_left(0);
    reading = begin(kRange);
    while (client_->statistics().retries < 20) std::this_thread::sleep_for(1ms);  // more than other failures get
  }
  expect_right(outcome_of(std::move(reading)));
  EXPECT_EQ(client_->statistics().throttled, 0U) << "it blames the server";
}

TEST_F(RangeAttempts, ALookupWithoutADescriptorIsNoWrongName) {
  HttpOptions options = quick();
  options.deadline = 500ms;
  serve([](const RangeServer& server, const Asked& asked) { return server.usual(asked); }, options);
  object_ = std::make_shared<RemoteObject>("http://slow.test/object", kSize, 1);
  object_->grant({"http://slow.test/object", {}, HttpReactor::Clock::now() + 1h});
  const DescriptorLimit none_left(0);
  const Outcome outcome = read();
  ASSERT_TRUE(outcome.error);
  EXPECT_EQ(outcome.error->system_errno, EMFILE) << outcome.error->message;
  EXPECT_NE(outcome.error->message.find("ulimit -n"), std::string::npos) << outcome.error->message;
}

}  // namespace
}  // namespace gdsdata::testing
