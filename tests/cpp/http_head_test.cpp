// Heads of responses: what they say is understood, and no bytes of a hostile server do harm.
#include "backend/http_head.h"

#include <array>
#include <limits>
#include <random>
#include <string>

#include "testing.h"

namespace gdsdata::testing {
namespace {

TEST(HttpHead, AContentRangeIsParsedInEachOfItsForms) {
  EXPECT_EQ(parse_content_range("bytes 0-9/100"), (ContentRange{0, 9, 100}));
  EXPECT_EQ(parse_content_range("bytes 5-5/*"), (ContentRange{5, 5, std::nullopt}));
  EXPECT_EQ(parse_content_range("  Bytes 7-8/9\r\n"), (ContentRange{7, 8, 9}));
  const uint64_t most = std::numeric_limits<uint64_t>::max();
  EXPECT_EQ(parse_content_range("bytes 0-18446744073709551615/18446744073709551615"), (ContentRange{0, most, most}));
}

TEST(HttpHead, AContentRangeOfAnotherFormIsNone) {
  for (const char* text :
       {"", "bytes", "bytes ", "bytes */100", "bytes 0-9", "bytes 9-0/100", "bytes -9/100", "bytes 0-/100",
        "bytes 0-9/", "bytes 0-9/x", "bytes 0-9/-1", "items 0-9/100", "bytes=0-9/100", "bytes 0/9-100",
        "bytes 0-18446744073709551616/1", "bytes +1-2/3", "bytes 1 -2/3", "bytes 0-9/100, 20-29/100", "byte"}) {
    EXPECT_EQ(parse_content_range(text), std::nullopt) << text;
  }
}

TEST(HttpHead, TheLastStatusLineBeginsTheHeadThatCounts) {
  HttpHead head;
  for (const char* line : {"HTTP/1.1 302 Found\r\n", "ETag: \"old\"\r\n", "\r\n", "HTTP/1.1 206 Partial Content\r\n",
                           "ETAG:   \"new\" \r\n", "content-length:12\r\n", "x-amz-request-id: R1\r\n", "\r\n"}) {
    head.add_line(line);
  }
  EXPECT_EQ(head.status, 206);
  EXPECT_EQ(head.version_tag(), "\"new\"");
  EXPECT_EQ(head.content_length(), 12U);
  EXPECT_EQ(head.request_id(), "R1");
  EXPECT_EQ(head.content_range(), std::nullopt);
}

TEST(HttpHead, LastModifiedIsTheTagOfAServerWithoutETags) {
  HttpHead head;
  head.add_line("Last-Modified: Wed, 25 Nov 2026 08:00:00 GMT");
  EXPECT_EQ(head.version_tag(), "Wed, 25 Nov 2026 08:00:00 GMT");
}

TEST(HttpHead, RetryAfterIsTakenInSecondsOnly) {
  const auto asked = [](const std::string& value) {
    HttpHead head;
    head.add_line("Retry-After: " + value);
    return head.retry_after_s();
  };
  EXPECT_EQ(asked("7"), 7.0);
  EXPECT_EQ(asked("Wed, 25 Nov 2026 08:00:00 GMT"), std::nullopt);
  EXPECT_EQ(asked("-1"), std::nullopt);
  EXPECT_EQ(asked("99999999999999999999"), std::nullopt);
}

TEST(HttpHead, StatusLinesOfAnyKindGiveANumberOrZero) {
  for (const auto& [line, status] : std::vector<std::pair<const char*, int>>{{"HTTP/2 200", 200},
                                                                             {"HTTP/1.1 999 x", 999},
                                                                             {"HTTP/1.1", 0},
                                                                             {"HTTP/1.1 ", 0},
                                                                             {"HTTP/1.1 2x0", 0},
                                                                             {"HTTP/1.1  200", 0}}) {
    HttpHead head;
    head.add_line(line);
    EXPECT_EQ(head.status, status) << line;
  }
}

TEST(HttpHead, AHeadOfAnySizeIsKeptWithinItsBounds) {
  HttpHead head;
  for (int i = 0; i < 100'000; ++i) head.add_line("x" + std::to_string(i) + ": y");
  EXPECT_EQ(head.headers.size(), HttpHead::kMostHeaders);
  HttpHead other;
  other.add_line("long: " + std::string(1 << 20, 'x'));
  EXPECT_TRUE(other.headers.empty());
}

// Random lines, and lines of a right head with random damage.
TEST(HttpHead, NoBytesDoHarm) {
  std::mt19937_64 random(28);
  constexpr std::array<std::string_view, 7> kLines = {"HTTP/1.1 206 Partial Content\r\n",
                                                      "Content-Range: bytes 100-199/1000\r\n",
                                                      "Content-Length: 100\r\n",
                                                      "ETag: W/\"abc\"\r\n",
                                                      "Retry-After: 3\r\n",
                                                      "Last-Modified: x\r\n",
                                                      "\r\n"};
  for (int round = 0; round < 20'000; ++round) {
    HttpHead head;
    for (const std::string_view line : kLines) {
      std::string damaged(line);
      for (auto left = random() % 4; left > 0; --left) {
        const size_t place = random() % (damaged.size() + 1);
        if (random() % 2 == 0 && place < damaged.size()) {
          damaged[place] = static_cast<char>(random());
        } else if (random() % 2 == 0) {
          damaged.insert(place, 1, "0:-/* \xff"[random() % 7]);
        } else {
          damaged.resize(place);
        }
      }
      head.add_line(damaged);
    }
    const ContentRange range = head.content_range().value_or(ContentRange{});
    EXPECT_LE(range.first, range.last);
    EXPECT_GE(head.status, 0);
    EXPECT_LE(head.status, 999);
    EXPECT_GE(head.retry_after_s().value_or(0.0), 0.0);
    EXPECT_LE(head.version_tag().size() + head.request_id().size(), HttpHead::kMostHeaderBytes);
    static_cast<void>(head.content_length());
  }
}

}  // namespace
}  // namespace gdsdata::testing
