// A range over a server that fails in every way: each byte arrives once, or the error says why not.
#include "range_reading.h"

namespace gdsdata::testing {
namespace {

TEST_F(RangeReading, ARangeArrivesAndItsConnectionIsUsedAgain) {
  serve([](const RangeServer& server, const Asked& asked) { return server.usual(asked); });
  for (int i = 0; i < 5; ++i) expect_right(read());
  EXPECT_EQ(server_->connections(), 1U);
  EXPECT_EQ(client_->connections_made(), 1U);
  EXPECT_EQ(client_->statistics().bytes, 5 * kRange.length());
  EXPECT_EQ(client_->statistics().retries, 0U);
  const auto log = server_->log();
  EXPECT_EQ(log[0].head.find("If-Match"), std::string::npos);
  EXPECT_NE(log[1].head.find("If-Match: \"v1\""), std::string::npos);
}

TEST_F(RangeReading, BytesBeforeAResetAreKeptAndTheRestIsAskedFor) {
  serve([](const RangeServer& server, const Asked& asked) {
    return asked.number < 3 ? server.cut(asked, 50'000, Then::kReset) : server.usual(asked);
  });
  expect_right(read());
  const auto log = server_->log();
  ASSERT_EQ(log.size(), 4U);
  EXPECT_EQ(log[3].begin, kRange.begin + 150'000);
}

TEST_F(RangeReading, AShortBodyIsContinued) {
  serve([](const RangeServer& server, const Asked& asked) {
    return server.cut(asked, 90'000, asked.number % 2 == 0 ? Then::kClose : Then::kGoOn);
  });
  // The second answer has a Content-Length that is not reached, and the connection stays open.
  expect_right(read());
}

TEST_F(RangeReading, AServerThatSendsNoByteIsGivenUpAfterSomeAttempts) {
  serve([](const RangeServer& server, const Asked& asked) { return server.cut(asked, 0, Then::kReset); });
  const Error error = expect_error(read(), ErrorCode::kIo);
  EXPECT_NE(error.message.find("tried 12 times"), std::string::npos) << error.message;
  EXPECT_NE(error.system_errno, 0);
}

TEST_F(RangeReading, AStallIsLeftAndTheRestIsAskedFor) {
  serve([](const RangeServer& server, const Asked& asked) {
    return asked.number == 0 ? server.cut(asked, 70'000, Then::kStall) : server.usual(asked);
  });
  expect_right(read());
  EXPECT_EQ(server_->log().back().begin, kRange.begin + 70'000);
}

TEST_F(RangeReading, AttemptsThatStallAfterSomeBytesAreNotIdle) {
  constexpr size_t kStalls = 14;  // more than there may be idle attempts
  HttpOptions options = quick();
  options.stall_timeout = 50ms;
  options.deadline = 60s;
  serve(
      [](const RangeServer& server, const Asked& asked) {
        return asked.number < kStalls ? server.cut(asked, 10'000, Then::kStall) : server.usual(asked);
      },
      options);
  expect_right(read());
  EXPECT_GT(server_->log().size(), kStalls);
}

TEST_F(RangeReading, AServerThatNeverAnswersIsATimeout) {
  HttpOptions options = quick();
  options.deadline = 600ms;
  serve(
      [](const RangeServer& server, const Asked& asked) {
        Answer answer = server.usual(asked);
        answer.delay = 1h;
        return answer;
      },
      options);
  EXPECT_EQ(expect_error(read(), ErrorCode::kIo).system_errno, ETIMEDOUT);
}

TEST_F(RangeReading, AStormIsSatOutForAsLongAsTheServerAsks) {
  serve([](const RangeServer& server, const Asked& asked) {
    if (asked.number >= 20) return server.usual(asked);
    return RangeServer::refusal(503, asked.number == 0 ? "Retry-After: 1\r\n" : "", "SlowDown");
  });
  const auto begun = HttpReactor::Clock::now();
  expect_right(read());
  EXPECT_GE(HttpReactor::Clock::now() - begun, 1s);
  EXPECT_EQ(client_->statistics().throttled, 20U);
}

TEST_F(RangeReading, AStormThatOutlastsTheDeadlineIsTheServersError) {
  HttpOptions options = quick();
  options.deadline = 300ms;
  serve([](const RangeServer&, const Asked&) { return RangeServer::refusal(503, "", "SlowDown"); }, options);
  const Error error = expect_error(read(), ErrorCode::kIo);
  EXPECT_EQ(error.system_errno, EAGAIN);
  for (const char* part : {"503", "SlowDown", "REQ7", "fewer requests"}) {
    EXPECT_NE(error.message.find(part), std::string::npos) << error.message;
  }
}

TEST_F(RangeReading, AWaitThatWouldPassTheDeadlineIsNotBegun) {
  serve([](const RangeServer&, const Asked&) { return RangeServer::refusal(503, "Retry-After: 3600\r\n"); });
  const auto begun = HttpReactor::Clock::now();
  expect_error(read(), ErrorCode::kIo);
  EXPECT_LT(HttpReactor::Clock::now() - begun, 4s);
  EXPECT_EQ(server_->requests(), 1U);
}

TEST_F(RangeReading, AWrongRangeIsAskedForAgain) {
  serve([](const RangeServer& server, Asked asked) {
    if (asked.number < 2) ++asked.begin;
    return server.usual(asked);
  });
  expect_right(read());
  EXPECT_EQ(server_->requests(), 3U);
}

TEST_F(RangeReading, AnotherVersionBetweenTwoAttemptsIsCorrupt) {
  serve([](const RangeServer& server, const Asked& asked) {
    return asked.number == 0 ? server.cut(asked, 50'000, Then::kReset) : server.usual(asked, "\"v2\"");
  });
  const Error error = expect_error(read(), ErrorCode::kCorrupt);
  EXPECT_NE(error.message.find("replaced"), std::string::npos);
  EXPECT_EQ(server_->requests(), 2U);
}

TEST_F(RangeReading, MoreBytesThanAskedForAreRefused) {
  serve([](const RangeServer& server, Asked asked) {
    Answer answer = server.usual(asked);
    if (asked.number > 0) return answer;
    asked.end += 10;
    answer.head =
        "HTTP/1.1 206 x\r\nContent-Range: bytes 1000-200999/300000\r\nTransfer-Encoding: chunked\r\n\r\n"
        "30d4a\r\n";  // 200010 bytes
    answer.body = server.usual(asked).body;
    return answer;
  });
  expect_right(read());
  EXPECT_EQ(server_->requests(), 2U);
}

TEST_F(RangeReading, TheWholeObjectInPlaceOfARangeIsRefusedAtOnce) {
  serve([](const RangeServer& server, const Asked&) {
    return Answer{"HTTP/1.1 200 OK\r\nContent-Length: " + std::to_string(kSize) + "\r\n\r\n",
                  std::span(server.object())};
  });
  EXPECT_EQ(expect_error(read(), ErrorCode::kIo).system_errno, EOPNOTSUPP);
  EXPECT_EQ(server_->requests(), 1U);
}

TEST_F(RangeReading, AMissingObjectIsNotFoundAtOnce) {
  serve([](const RangeServer&, const Asked&) { return RangeServer::refusal(404, "", "NoSuchKey"); });
  const Error error = expect_error(read(), ErrorCode::kNotFound);
  EXPECT_NE(error.message.find("REQ7"), std::string::npos);
  EXPECT_EQ(server_->requests(), 1U);
}

// Answers the requests for access, with a new query each time.
class Granting {
 public:
  explicit Granting(const RangeServer& server)
      : thread_([this, &server] {
          while (!ends_) {
            for (const auto& object : access_desk().take(8, 10ms)) {
              object->grant({server.url("?sig=" + std::to_string(++granted)), {}, HttpReactor::Clock::now() + 1h});
            }
          }
        }) {}
  ~Granting() {
    ends_ = true;
    thread_.join();
  }
  std::atomic<int> granted{0};

 private:
  std::atomic<bool> ends_{false};
  std::thread thread_;
};

TEST_F(RangeReading, AnAccessThatExpiredIsRenewed) {
  serve([](const RangeServer& server, const Asked& asked) {
    if (asked.head.find("sig=3") != std::string::npos) return server.usual(asked);
    return RangeServer::refusal(403, "", "ExpiredToken");
  });
  const Granting granting(*server_);
  std::vector<std::future<Outcome>> reads;
  for (int i = 0; i < 6; ++i) reads.push_back(begin(kRange));
  for (auto& one : reads) expect_right(outcome_of(std::move(one)));
  EXPECT_EQ(granting.granted, 3);
}

TEST_F(RangeReading, AnAccessThatIsRefusedTwiceIsAnError) {
  serve([](const RangeServer&, const Asked&) { return RangeServer::refusal(403, "", "AccessDenied"); });
  const Granting granting(*server_);
  const Error error = expect_error(read(), ErrorCode::kIo);
  EXPECT_EQ(error.system_errno, EACCES);
  EXPECT_NE(error.message.find("permission"), std::string::npos);
  EXPECT_EQ(server_->requests(), 2U);
}

TEST_F(RangeReading, AnAccessThatIsNotGrantedIsTheErrorOfTheRange) {
  serve([](const RangeServer& server, const Asked& asked) { return server.usual(asked); });
  object_ = std::make_shared<RemoteObject>("s3://bucket/none", kSize, 1);
  auto reading = begin(kRange);
  std::vector<std::shared_ptr<RemoteObject>> asked;
  while (asked.empty()) asked = access_desk().take(8, 1s);
  asked[0]->refuse({ErrorCode::kNotFound, "no credentials", "s3://bucket/none"});
  EXPECT_EQ(outcome_of(std::move(reading)).error->message, "no credentials");
  EXPECT_EQ(server_->requests(), 0U);
}

TEST_F(RangeReading, ASlowFirstAnswerIsOvertakenByASecondRequest) {
  HttpOptions options = quick();
  options.stall_timeout = 30s;
  options.deadline = 60s;
  const auto stalls = std::make_shared<std::atomic<bool>>(false);  // the slow answer may still be on its way at the end
  serve(
      [stalls](const RangeServer& server, const Asked& asked) {
        Answer answer = server.usual(asked);
        if (stalls->exchange(false)) answer.delay = 20s;
        return answer;
      },
      options);
  for (int i = 0; i < 64; ++i) expect_right(read({0, 1000}), {0, 1000});
  *stalls = true;
  const auto begun = HttpReactor::Clock::now();
  expect_right(read());
  EXPECT_LT(HttpReactor::Clock::now() - begun, 15s);
  EXPECT_EQ(client_->statistics().hedges, 1U);
}

// Two answers to the same range arrive at about the same time, again and again.
TEST_F(RangeReading, OfTwoAnswersOneIsDelivered) {
  HttpOptions options = quick();
  options.stall_timeout = 30s;
  options.deadline = 60s;
  const auto slow = std::make_shared<std::atomic<size_t>>(0);  // an answer that lost may still be on its way
  serve(
      [slow](const RangeServer& server, const Asked& asked) {
        Answer answer = server.usual(asked);
        if (asked.end - asked.begin == kRange.length()) answer.delay = (*slow)++ % 2 == 0 ? 51ms : 1ms;
        return answer;
      },
      options);
  for (int round = 0; round < 12; ++round) {
    for (int i = 0; i < 64; ++i) expect_right(read({0, 1000}), {0, 1000});
    *slow = 0;
    expect_right(read());
  }
}

TEST_F(RangeReading, ASlowResponseGoesOnPastTheDeadlineWhileItMakesProgress) {
  HttpOptions options = quick();
  options.deadline = 200ms;
  options.stall_timeout = 2s;
  serve(
      [](const RangeServer& server, const Asked& asked) {
        Answer answer = server.usual(asked);
        answer.between = 3ms;  // 200 chunks of 1000 bytes: more than 64 KiB in each 2 s
        return answer;
      },
      options);
  expect_right(read());
  EXPECT_EQ(server_->requests(), 1U);
}

TEST_F(RangeReading, AResponseThatDripsEndsSoonAfterTheDeadline) {
  HttpOptions options = quick();
  options.deadline = 200ms;
  serve(
      [](const RangeServer& server, const Asked& asked) {
        Answer answer = server.usual(asked);
        answer.between = 50ms;
        return answer;
      },
      options);
  const auto begun = HttpReactor::Clock::now();
  EXPECT_EQ(expect_error(read(), ErrorCode::kIo).system_errno, ETIMEDOUT);
  EXPECT_LT(HttpReactor::Clock::now() - begun, 4s);
}

TEST_F(RangeReading, AServerThatIsNotThereIsAnError) {
  serve([](const RangeServer& server, const Asked& asked) { return server.usual(asked); });
  int port = 0;
  {
    const RangeServer gone{Bytes(1)};
    port = std::stoi(gone.url().substr(17));
  }
  object_->grant({"http://127.0.0.1:" + std::to_string(port) + "/x", {}, HttpReactor::Clock::now() + 1h});
  EXPECT_EQ(expect_error(read(), ErrorCode::kIo).system_errno, ECONNREFUSED);
}

TEST_F(RangeReading, ManyRangesOverEveryFaultEndRight) {
  HttpOptions options = quick();
  options.deadline = 60s;
  serve(
      [](const RangeServer& server, Asked asked) {
        Answer answer = server.usual(asked);
        switch (asked.number % 9) {
          case 0:
            return server.cut(asked, 5000, Then::kReset);
          case 2:
            return server.cut(asked, 100, Then::kClose);
          case 4:
            return RangeServer::refusal(asked.number % 2 == 0 ? 503 : 500);
          case 5:
            return asked.number < 40 ? server.cut(asked, 3000, Then::kStall) : answer;
          case 7:
            ++asked.begin;
            return asked.begin < asked.end ? server.usual(asked) : answer;
          default:
            return answer;
        }
      },
      options);
  std::vector<std::pair<ObjectRange, std::future<Outcome>>> reads;
  std::mt19937_64 random(3);
  for (int i = 0; i < 300; ++i) {
    const uint64_t begin = random() % (kSize - 1);
    const ObjectRange range{begin, begin + 1 + random() % std::min<uint64_t>(kSize - begin, 20'000)};
    reads.emplace_back(range, this->begin(range));
  }
  for (auto& [range, future] : reads) expect_right(outcome_of(std::move(future)), range);
  EXPECT_LE(server_->connections(), 8U + server_->requests());
}

}  // namespace
}  // namespace gdsdata::testing
