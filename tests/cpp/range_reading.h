// Reads ranges from a RangeServer whose answers a test chooses.
#pragma once

#include <cstdlib>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backend/range_read.h"
#include "range_server.h"

namespace gdsdata::testing {

using namespace std::chrono_literals;
using Asked = RangeServer::Asked;
using Answer = RangeServer::Answer;
using Then = RangeServer::Then;

inline constexpr size_t kSize = 300'000;
inline constexpr ObjectRange kRange{1000, 201'000};

inline HttpOptions quick() {
  HttpOptions options;
  options.connections = 8;
  options.reactors = 1;
  options.stall_timeout = 150ms;
  options.deadline = 5s;
  options.least_backoff = 1ms;
  options.most_backoff = 20ms;
  return options;
}

// The same where a busy machine must not look like a stall.
inline HttpOptions patient() {
  HttpOptions options = quick();
  options.stall_timeout = 5s;
  return options;
}

class RangeReading : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"}) {
      if (const char* value = std::getenv(name)) proxies_.emplace_back(name, value);
      ::unsetenv(name);
    }
    if (CurlApi::get() == nullptr) GTEST_SKIP() << CurlApi::refusal();
  }
  // The last user of a client must not be its own thread.
  void TearDown() override {
    if (client_ != nullptr) client_->stop();
    for (const auto& [name, value] : proxies_) ::setenv(name.c_str(), value.c_str(), 1);
  }

  void serve(std::function<Answer(const RangeServer&, const Asked&)> choose, const HttpOptions& options = quick()) {
    client_ = std::make_shared<HttpClient>(options);
    server_ = std::make_unique<RangeServer>(random_bytes(kSize, 28),
                                            [this, choose](const Asked& asked) { return choose(*server_, asked); });
    object_ = std::make_shared<RemoteObject>(server_->url(), kSize, object_version("\"v1\""));
    grant("?sig=a-secret");
  }

  void grant(const std::string& query) {
    object_->grant({server_->url(query), {"Authorization: a-secret"}, HttpReactor::Clock::now() + 1h});
  }

  struct Outcome {
    std::optional<Error> error;
    Bytes bytes;
  };

  std::future<Outcome> begin(ObjectRange range, RangeRead::Canceled canceled = nullptr) {
    struct State {
      std::promise<Outcome> promise;
      Outcome outcome;
      bool is_done = false;
    };
    const auto state = std::make_shared<State>();
    auto future = state->promise.get_future();
    RangeRead::begin(
        client_, object_, range, {[state, first = range.begin](uint64_t offset, std::span<const std::byte> bytes) {
          EXPECT_FALSE(state->is_done);
          EXPECT_EQ(offset, first + state->outcome.bytes.size());  // in order, each once
          state->outcome.bytes.insert(state->outcome.bytes.end(), bytes.begin(), bytes.end());
        }},
        [state](std::optional<Error> error) {
          EXPECT_FALSE(std::exchange(state->is_done, true));
          state->outcome.error = std::move(error);
          state->promise.set_value(state->outcome);
        },
        std::move(canceled));
    return future;
  }

  Outcome outcome_of(std::future<Outcome> future) {
    if (future.wait_for(60s) != std::future_status::ready) {
      ADD_FAILURE() << "the range never ended";
      return {};
    }
    return future.get();
  }

  Outcome read(ObjectRange range = kRange) { return outcome_of(begin(range)); }

  void expect_right(const Outcome& outcome, ObjectRange range = kRange) {
    EXPECT_FALSE(outcome.error) << outcome.error->message;
    const auto expected = std::span(server_->object()).subspan(range.begin, range.length());
    EXPECT_TRUE(std::ranges::equal(outcome.bytes, expected));
  }

  // A range that fails names itself, and no secret.
  Error expect_error(const Outcome& outcome, ErrorCode code) {
    if (!outcome.error) {
      ADD_FAILURE() << "no error";
      return {};
    }
    EXPECT_EQ(outcome.error->code, code) << outcome.error->message;
    EXPECT_EQ(outcome.error->path, server_->url());
    EXPECT_EQ(outcome.error->offset, kRange.begin);
    EXPECT_EQ(outcome.error->length, kRange.length());
    EXPECT_EQ(outcome.error->message.find("secret"), std::string::npos) << outcome.error->message;
    return *outcome.error;
  }

  std::vector<std::pair<std::string, std::string>> proxies_;  // variables of the environment
  std::shared_ptr<HttpClient> client_;
  std::shared_ptr<RemoteObject> object_;
  std::unique_ptr<RangeServer> server_;
};

}  // namespace gdsdata::testing
