// The access to an object: asked for once, renewed in time, given to everybody who waits.
#include "base/remote_object.h"

#include <atomic>
#include <thread>

#include "testing.h"

namespace gdsdata::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

std::shared_ptr<RemoteObject> object_at(const std::string& location) {
  return std::make_shared<RemoteObject>(location, 1000, 1);
}

// The objects at the desk, of this test alone.
std::vector<std::shared_ptr<RemoteObject>> asked_for() { return access_desk().take(100, 0ms); }

struct Waiting {
  std::shared_ptr<const ObjectAccess> access;
  std::optional<Error> error;
  int calls = 0;
  RemoteObject::Use use() {
    return [this](auto given, auto why_not) {
      access = std::move(given);
      error = std::move(why_not);
      ++calls;
    };
  }
};

TEST(RemoteObject, ManyWaitersAskOnceAndAllGetTheAnswer) {
  const auto object = object_at("s3://b/many");
  std::vector<Waiting> waiting(10);
  for (Waiting& one : waiting) EXPECT_EQ(object->access_or_request(one.use()), nullptr);
  const auto asked = asked_for();
  ASSERT_EQ(asked.size(), 1U);
  EXPECT_EQ(asked[0], object);
  object->grant({"http://h/x", {"A: b"}, Clock::now() + 1h});
  for (const Waiting& one : waiting) {
    EXPECT_EQ(one.calls, 1);
    EXPECT_EQ(one.access, waiting[0].access);
  }
  Waiting later;
  EXPECT_EQ(object->access_or_request(later.use()), waiting[0].access);
  EXPECT_EQ(later.calls, 0);
  EXPECT_TRUE(asked_for().empty());
}

TEST(RemoteObject, AnAccessIsRenewedAMinuteBeforeItEnds) {
  const auto object = object_at("s3://b/soon");
  object->grant({"http://h/1", {}, Clock::now() + 59s});
  Waiting waiting;
  EXPECT_EQ(object->access_or_request(waiting.use()), nullptr);
  EXPECT_EQ(asked_for().size(), 1U);
  object->grant({"http://h/2", {}, Clock::now() + 61s});
  EXPECT_EQ(waiting.access->url, "http://h/2");
  EXPECT_EQ(object->access_or_request(waiting.use())->url, "http://h/2");
}

TEST(RemoteObject, AnAccessThatEndsAtOnceIsGoodForThoseWhoWaited) {
  const auto object = object_at("s3://b/short");
  Waiting waiting;
  object->access_or_request(waiting.use());
  object->grant({"http://h/1", {}, Clock::now()});
  EXPECT_EQ(waiting.access->url, "http://h/1");
  EXPECT_EQ(asked_for().size(), 1U);
}

TEST(RemoteObject, ARefusalIsTheErrorOfAllWaitersAndOfNoLaterCaller) {
  const auto object = object_at("s3://b/refused");
  std::vector<Waiting> waiting(3);
  for (Waiting& one : waiting) object->access_or_request(one.use());
  EXPECT_EQ(asked_for().size(), 1U);
  object->refuse({ErrorCode::kNotFound, "no credentials"});
  for (const Waiting& one : waiting) {
    EXPECT_EQ(one.access, nullptr);
    EXPECT_EQ(one.error->message, "no credentials");
  }
  Waiting later;
  EXPECT_EQ(object->access_or_request(later.use()), nullptr);
  EXPECT_EQ(asked_for().size(), 1U);
  object->grant({"http://h/x", {}, Clock::now() + 1h});
  EXPECT_EQ(later.access->url, "http://h/x");
}

TEST(RemoteObject, OnlyTheAccessThatWasRefusedIsDropped) {
  const auto object = object_at("s3://b/drop");
  object->grant({"http://h/1", {}, Clock::now() + 1h});
  Waiting waiting;
  const auto first = object->access_or_request(waiting.use());
  object->grant({"http://h/2", {}, Clock::now() + 1h});
  object->drop_access(first.get());
  EXPECT_EQ(object->access_or_request(waiting.use())->url, "http://h/2");
  object->drop_access(object->access_or_request(waiting.use()).get());
  EXPECT_EQ(object->access_or_request(waiting.use()), nullptr);
  EXPECT_EQ(asked_for().size(), 1U);
}

TEST(RemoteObject, ThreadsThatAskDropAndAnswerLoseNoRequest) {
  const auto object = object_at("s3://b/threads");
  std::atomic<bool> ends{false};
  std::atomic<int> answered{0}, at_once{0};
  std::thread answering([&] {
    for (int i = 0; !ends || i % 2 != 0; ++i) {
      for (const auto& one : access_desk().take(8, 1ms)) {
        if (i % 5 == 0) {
          one->refuse({ErrorCode::kIo, "not now"});
        } else {
          one->grant({"http://h/" + std::to_string(i), {}, Clock::now() + 1h});
        }
      }
    }
  });
  constexpr int kThreads = 4, kRounds = 2000;
  std::vector<std::thread> asking;
  for (int t = 0; t < kThreads; ++t) {
    asking.emplace_back([&] {
      for (int i = 0; i < kRounds; ++i) {
        const auto access = object->access_or_request([&](auto, auto) { ++answered; });
        if (access == nullptr) continue;
        ++at_once;
        object->drop_access(access.get());
      }
    });
  }
  for (std::thread& thread : asking) thread.join();
  const auto begun = Clock::now();
  while (answered + at_once < kThreads * kRounds && Clock::now() - begun < 30s) std::this_thread::sleep_for(1ms);
  ends = true;
  answering.join();
  EXPECT_EQ(answered + at_once, kThreads * kRounds);
}

TEST(RemoteObject, TheFirstETagIsKept) {
  const auto object = object_at("s3://b/etag");
  EXPECT_EQ(object->etag(), "");
  object->set_etag("\"1\"");
  object->set_etag("\"2\"");
  EXPECT_EQ(object->etag(), "\"1\"");
}

TEST(ObjectVersion, WeakAndQuotedTagsAreThatOfTheBareOne) {
  const int64_t version = object_version("abc");
  EXPECT_GE(version, 0);
  EXPECT_EQ(object_version("\"abc\""), version);
  EXPECT_EQ(object_version("W/\"abc\""), version);
  EXPECT_NE(object_version("abd"), version);
  for (const char* odd : {"", "\"", "W/", "W/\""}) EXPECT_GE(object_version(odd), 0);
}

TEST(RemoteObject, UrlsAreDistinguishedFromPaths) {
  for (const char* url : {"s3://b/k", "gs://b", "az://c/k", "http://h/x", "https://h"}) EXPECT_TRUE(is_url(url));
  for (const char* path : {"", "/s3://b", "s3:/b", "file:///x", "S3://b/k", "ftp://h/x"}) EXPECT_FALSE(is_url(path));
}

}  // namespace
}  // namespace gdsdata::testing
