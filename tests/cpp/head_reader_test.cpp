// Where the head of a response ends and how long its body is, and which responses are libcurl's.
#include "backend/head_reader.h"

#include <algorithm>
#include <random>

#include "testing.h"

namespace gdsdata::testing {
namespace {

using State = HeadReader::State;

constexpr std::string_view kUsual =
    "HTTP/1.1 206 Partial Content\r\nContent-Length: 10\r\nETag: \"v1\"\r\nConnection: keep-alive\r\n\r\n";

// A reader that got the bytes in parts of a length.
HeadReader read(std::string_view bytes, size_t part, size_t* taken = nullptr) {
  HeadReader reader;
  size_t count = 0;
  while (count < bytes.size() && reader.state() == State::kIncomplete) {
    count += reader.take(bytes.substr(count, part));
  }
  if (taken != nullptr) *taken = count;
  return reader;
}

TEST(HeadReader, AHeadInPartsOfAnyLengthIsTheSameHead) {
  for (size_t part = 1; part <= kUsual.size() + 5; ++part) {
    size_t taken = 0;
    HeadReader reader = read(std::string(kUsual) + "0123456789", part, &taken);
    ASSERT_EQ(reader.state(), State::kComplete) << part;
    EXPECT_EQ(taken, kUsual.size());
    EXPECT_EQ(reader.body_bytes(), 10U);
    EXPECT_TRUE(reader.keeps_connection());
    const HttpHead head = reader.take_head();
    EXPECT_EQ(head.status, 206);
    EXPECT_TRUE(head.is_complete);
    EXPECT_EQ(head.header("etag"), "\"v1\"");
  }
}

TEST(HeadReader, AnInterimHeadIsPassedOver) {
  HeadReader reader = read("HTTP/1.1 100 Continue\r\nETag: \"v0\"\r\n\r\n" + std::string(kUsual), 7);
  ASSERT_EQ(reader.state(), State::kComplete);
  EXPECT_EQ(reader.head().status, 206);
  EXPECT_EQ(reader.head().header("etag"), "\"v1\"");
}

TEST(HeadReader, AConnectionIsKeptIfTheServerSaysNothingElse) {
  const auto keeps = [](const std::string& version, const std::string& line) {
    return read("HTTP/" + version + " 200 OK\r\nContent-Length: 0\r\n" + line + "\r\n", 9).keeps_connection();
  };
  EXPECT_TRUE(keeps("1.1", ""));
  EXPECT_TRUE(keeps("1.1", "Connection: Keep-Alive\r\n"));
  EXPECT_TRUE(keeps("1.0", "Connection: keep-alive\r\n"));
  EXPECT_FALSE(keeps("1.1", "Connection: close\r\n"));
  EXPECT_FALSE(keeps("1.1", "Connection: keep-alive, close\r\n"));
  EXPECT_FALSE(keeps("1.0", ""));
}

TEST(HeadReader, ResponsesOfAnotherFormAreLeftToLibcurl) {
  const std::string status = "HTTP/1.1 206 x\r\n", length = "Content-Length: 10\r\n";
  const std::vector<std::string> heads = {
      status + "Transfer-Encoding: chunked\r\n\r\n",
      status + length + "Transfer-Encoding: chunked\r\n\r\n",
      status + "\r\n",  // the body ends with the connection
      status + length + "Content-Length: 11\r\n\r\n",
      status + "Content-Length: 10, 10\r\n\r\n",
      status + "Content-Length: +10\r\n\r\n",
      status + "Content-Length: 18446744073709551616\r\n\r\n",
      status + "Content-Length : 10\r\n\r\n",
      status + length + " folded: line\r\n\r\n",
      status + length + "without a colon\r\n\r\n",
      status + length + ": without a name\r\n\r\n",
      status + "Content-Length: 10\n\r\n",
      status + length + "A: b\rTransfer-Encoding: chunked\r\n\r\n",
      status + length + std::string("A: \0\r\n\r\n", 8),
      status + length + "Upgrade: h2c\r\n\r\n",
      status + length + "A: " + std::string(HttpHead::kMostHeaderBytes, 'a') + "\r\n\r\n",
      "HTTP/1.1 204 x\r\n" + length + "\r\n",
      "HTTP/1.1 304 x\r\n" + length + "\r\n",
      "HTTP/1.1 101 x\r\n\r\n",
      "HTTP/1.1 20 x\r\n" + length + "\r\n",
      "HTTP/1.1 2066 x\r\n" + length + "\r\n",
      "HTTP/1.1  206 x\r\n" + length + "\r\n",
      "HTTP/2 206 x\r\n" + length + "\r\n",
      "ICY 200 x\r\n" + length + "\r\n",
      "\r\n" + status + length + "\r\n",
  };
  for (const std::string& head : heads) {
    for (const size_t part : {size_t{1}, head.size()}) EXPECT_EQ(read(head, part).state(), State::kUnclear) << head;
  }
}

TEST(HeadReader, AHeadWithoutAnEndIsLeftToLibcurl) {
  std::string lines = "HTTP/1.1 206 x\r\n", interim;
  for (int i = 0; i < 20'000; ++i) {
    lines += "a:b\r\n";
    interim += "HTTP/1.1 100 x\r\n\r\n";
  }
  for (const std::string& head : {lines, interim, "HTTP/1.1 206 " + std::string(100'000, 'x')}) {
    size_t taken = 0;
    EXPECT_EQ(read(head, 4096, &taken).state(), State::kUnclear);
    EXPECT_LT(taken, 2 * HeadReader::kMostBytes);
  }
}

// Whatever a server sends, a head that counts names one length, and what is behind it is the body.
TEST(HeadReader, NoDamageMakesTwoReadingsOfALength) {
  std::mt19937_64 random(5);
  size_t complete = 0;
  for (int round = 0; round < 100'000; ++round) {
    std::string bytes(kUsual);
    for (uint64_t changes = random() % 4; changes > 0; --changes) {
      const size_t at = random() % bytes.size();
      switch (random() % 4) {
        case 0:
          bytes[at] = static_cast<char>(random());
          break;
        case 1:
          bytes.erase(at, 1 + random() % 4);
          break;
        case 2:
          bytes.insert(at, "\r\n");
          break;
        default:
          bytes.insert(at, "\r\nContent-Length: " + std::to_string(random() % 12) + "\r\n");
      }
    }
    size_t taken = 0;
    HeadReader reader = read(bytes, 1 + random() % 40, &taken);
    if (reader.state() != State::kComplete) continue;
    ++complete;
    ASSERT_TRUE(std::string_view(bytes).substr(0, taken).ends_with("\r\n\r\n")) << bytes;
    const HttpHead& head = reader.head();
    for (const auto& [name, value] : head.headers) {
      if (name == "content-length") {
        ASSERT_EQ(head.content_length(), reader.body_bytes()) << bytes;
      }
      ASSERT_NE(name, "transfer-encoding");
    }
    ASSERT_EQ(head.content_length(), reader.body_bytes()) << bytes;
    ASSERT_GE(head.status, 200);
  }
  EXPECT_GT(complete, 10'000U);
}

}  // namespace
}  // namespace gdsdata::testing
