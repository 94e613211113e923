// Ranges over http without TLS: where their bytes are received, which connections are used again,
// and what is left to libcurl.
#include "backend/plain_exchange.h"

#include <cstdlib>
#include <filesystem>
#include <thread>

#include "range_reading.h"

namespace gdsdata::testing {
namespace {

class PlainExchanges : public RangeReading {
 protected:
  // Reads a range into memory, and counts the bytes that were taken from elsewhere.
  Bytes read_in_place(ObjectRange range, size_t& copied) {
    struct State {
      Bytes memory;
      std::atomic<size_t> copied{0};
      std::promise<std::optional<Error>> done;
    };
    const auto state = std::make_shared<State>();
    state->memory.resize(range.length());
    auto done = state->done.get_future();
    RangeRead::begin(
        client_, object_, range,
        {[state, range](uint64_t offset, std::span<const std::byte> bytes) {
           std::byte* const place = state->memory.data() + (offset - range.begin);
           if (place == bytes.data()) return;
           state->copied += bytes.size();
           std::copy(bytes.begin(), bytes.end(), place);
         },
         [state, range](uint64_t offset) { return std::span(state->memory).subspan(offset - range.begin); }},
        [state](std::optional<Error> error) { state->done.set_value(std::move(error)); });
    EXPECT_EQ(done.wait_for(60s), std::future_status::ready);
    const auto error = done.get();
    EXPECT_FALSE(error) << error->message;
    copied = state->copied;
    return state->memory;
  }

  Answer chunked(const RangeServer& server, const Asked& asked) {
    static thread_local Bytes body;
    body.clear();
    const auto add = [](std::string_view text) {
      const auto bytes = std::as_bytes(std::span(text));
      body.insert(body.end(), bytes.begin(), bytes.end());
    };
    std::string head = server.usual(asked).head;
    const size_t length = head.find("Content-Length"), end = head.find("\r\n", length);
    head.replace(length, end - length, "Transfer-Encoding: chunked");
    for (uint64_t at = asked.begin; at < asked.end;) {
      const uint64_t bytes = std::min<uint64_t>(asked.end - at, 0xfff);
      char size[16];
      std::snprintf(size, sizeof(size), "%llx\r\n", static_cast<unsigned long long>(bytes));
      add(size);
      const auto part = std::span(server.object()).subspan(at, bytes);
      body.insert(body.end(), part.begin(), part.end());
      add("\r\n");
      at += bytes;
    }
    add("0\r\n\r\n");
    return {head, body};
  }
};

TEST_F(PlainExchanges, ABodyIsReceivedInItsPlace) {
  serve([](const RangeServer& server, const Asked& asked) { return server.usual(asked); });
  for (int i = 0; i < 5; ++i) {
    size_t copied = 0;
    const Bytes bytes = read_in_place(kRange, copied);
    EXPECT_TRUE(std::ranges::equal(bytes, std::span(server_->object()).subspan(kRange.begin, kRange.length())));
    EXPECT_LE(copied, PlainExchange::kHeadBytes) << "only what came with the head";
  }
  EXPECT_EQ(server_->connections(), 1U);
}

// The socket is ready only once many bytes wait.
TEST_F(PlainExchanges, ABodyThatComesSlowlyIsNoStall) {
  serve([](const RangeServer& server, const Asked& asked) {
    Answer answer = server.usual(asked);
    answer.between = 5ms;
    return answer;
  });
  expect_right(read());
  EXPECT_EQ(server_->requests(), 1U);
  EXPECT_EQ(client_->statistics().retries, 0U);
}

TEST_F(PlainExchanges, AShortAnswerBehindALongOneIsNotWaitedFor) {
  serve([](const RangeServer& server, const Asked& asked) { return server.usual(asked); }, patient());
  for (int i = 0; i < 3; ++i) {
    expect_right(read());
    const auto began = std::chrono::steady_clock::now();
    expect_right(read({0, 100}), {0, 100});
    EXPECT_LT(std::chrono::steady_clock::now() - began, 3s);
  }
  EXPECT_EQ(server_->connections(), 1U);
}

TEST_F(PlainExchanges, AnAnswerThatAnnouncesMoreThanTheRangeEndsWithIt) {
  serve([](const RangeServer& server, const Asked& asked) {
    Answer answer = server.usual(asked);
    const std::string length = std::to_string(asked.end - asked.begin);
    const size_t at = answer.head.find("Content-Length: ");
    answer.head.replace(answer.head.find(length, at), length.size(), std::to_string(asked.end - asked.begin + 1));
    answer.then = Then::kStall;
    return answer;
  });
  expect_right(read());
  EXPECT_EQ(server_->requests(), 1U);
}

TEST_F(PlainExchanges, AChunkedAnswerIsReadByLibcurlAndSoAreThoseThatFollow) {
  serve([this](const RangeServer& server, const Asked& asked) { return chunked(server, asked); }, patient());
  for (int i = 0; i < 3; ++i) expect_right(read());
  EXPECT_EQ(server_->requests(), 4U) << "the first range was asked for twice";
  EXPECT_EQ(client_->statistics().retries, 0U);
}

TEST_F(PlainExchanges, OfAServerThatLibcurlReadsFromNoConnectionIsKeptIdle) {
  serve([this](const RangeServer& server, const Asked& asked) {
    return asked.number < 8 ? server.usual(asked) : chunked(server, asked);
  });
  std::vector<std::future<Outcome>> reads;
  for (int i = 0; i < 8; ++i) reads.push_back(begin(kRange));
  for (auto& one : reads) expect_right(outcome_of(std::move(one)));
  const auto sockets = [] {
    size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      count += std::filesystem::read_symlink(entry.path(), gone).string().starts_with("socket:") ? 1 : 0;
    }
    return count;
  };
  const size_t before = sockets();
  for (int i = 0; i < 3; ++i) expect_right(read());
  // Those of the client, and the server's for them, which see the end soon.
  const auto until = std::chrono::steady_clock::now() + 10s;
  while (sockets() > before - 2 * 5 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  EXPECT_LE(sockets(), before - 2 * 5) << "eight were idle, and libcurl has one or two";
}

TEST_F(PlainExchanges, AConnectionThatTheServerHasClosedIsReplacedWithoutARetry) {
  serve([](const RangeServer& server, const Asked& asked) { return server.cut(asked, kSize, Then::kClose); },
        patient());
  for (int i = 0; i < 4; ++i) expect_right(read());
  EXPECT_EQ(server_->connections(), 4U);
  EXPECT_EQ(client_->statistics().retries, 0U);
}

// The server resets a kept connection when it gets the second request.
TEST_F(PlainExchanges, AConnectionThatIsResetByItsNextRequestIsReplacedWithoutARetry) {
  serve(
      [](const RangeServer& server, const Asked& asked) {
        static thread_local int answered = 0;
        return ++answered == 1 ? server.usual(asked) : Answer{"", {}, Then::kReset};
      },
      patient());
  for (int i = 0; i < 3; ++i) expect_right(read());
  EXPECT_EQ(server_->connections(), 3U);
  EXPECT_EQ(client_->statistics().retries, 0U);
}

TEST_F(PlainExchanges, BytesBehindAResponseAreNoResponse) {
  serve([](const RangeServer& server, const Asked& asked) {
    static thread_local Bytes body;  // of a connection
    Answer answer = server.usual(asked);
    if (asked.begin != 0) return answer;
    // Behind the body follows what looks like the answer to the next request.
    const std::string forged = "HTTP/1.1 206 x\r\nContent-Length: 100\r\nETag: \"v1\"\r\n\r\n" + std::string(100, 'x');
    body.assign(answer.body.begin(), answer.body.end());
    const auto bytes = std::as_bytes(std::span(forged));
    body.insert(body.end(), bytes.begin(), bytes.end());
    answer.body = body;
    return answer;
  });
  for (const ObjectRange range :
       {ObjectRange{0, 100}, ObjectRange{5000, 5100}, ObjectRange{0, 100'000}, ObjectRange{7000, 7100}}) {
    expect_right(read(range), range);
  }
  EXPECT_GE(server_->connections(), 3U);
}

TEST_F(PlainExchanges, ARefusalKeepsItsConnection) {
  serve([](const RangeServer& server, const Asked& asked) {
    return asked.number == 0 ? RangeServer::refusal(503) : server.usual(asked);
  });
  expect_right(read());
  EXPECT_EQ(server_->requests(), 2U);
  EXPECT_EQ(server_->connections(), 1U);
}

TEST_F(PlainExchanges, AProxyGetsTheRequest) {
  serve([](const RangeServer& server, const Asked& asked) { return server.usual(asked); });
  ::setenv("http_proxy", server_->url().c_str(), 1);
  object_ = std::make_shared<RemoteObject>("http://nowhere.test/object", kSize, object_version("\"v1\""));
  object_->grant({"http://nowhere.test/object", {}, HttpReactor::Clock::now() + 1h});
  const Outcome outcome = read();
  ::unsetenv("http_proxy");  // `TearDown` has what was there
  expect_right(outcome);
  EXPECT_NE(server_->log()[0].head.find("GET http://nowhere.test/object "), std::string::npos);
}

TEST(PlainOrigin, RequestsThatMeanMoreToLibcurlAreLeftToIt) {
  const auto origin = [](const std::string& url, std::vector<std::string> headers = {}) {
    HttpRequest request;
    request.url = url;
    request.headers = std::move(headers);
    return plain_origin(request);
  };
  EXPECT_EQ(origin("http://host/a?b=%20", {"Range: bytes=0-1"}), "http://host");
  EXPECT_EQ(origin("http://127.0.0.1:8333/a"), "http://127.0.0.1:8333");
  EXPECT_EQ(origin("http://host:80/a"), "http://host");
  EXPECT_EQ(origin("http://[::1]:80/a"), "http://[::1]");
  for (const char* url : {"https://host/a", "http://user:password@host/a", "http://host/a b", "http://host/a#b",
                          "http://host/\xc3\xa4", "http://host", "http://host?a/b", "http:///a", "http://Host/a",
                          "http://host%00/a", "http://host\\@other/a", "HTTP://host/a", "ftp://host/a", ""}) {
    EXPECT_EQ(origin(url), "") << url;
  }
  for (const char* header : {"Host: other", "ACCEPT: x", "Range:", "Range;", ": x", "A: b\r\nC: d", "A: b\nC: d",
                             "Transfer-Encoding: chunked", "Content-Length: 1", "Connection: close"}) {
    EXPECT_EQ(origin("http://host/a", {header}), "") << header;
  }
  HttpRequest request;
  request.url = "http://host/a";
  request.timeout = 1s;
  EXPECT_EQ(plain_origin(request), "");
  request.timeout = {};
  request.method = "HEAD";
  EXPECT_EQ(plain_origin(request), "");
}

}  // namespace
}  // namespace gdsdata::testing
