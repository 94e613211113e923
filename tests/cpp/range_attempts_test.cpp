// What one attempt passes on to the next: hosts, connections, pauses, and nothing that is secret.
#include "range_reading.h"

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

TEST_F(RangeAttempts, ARedirectWithoutAnEndIsAnError) {
  serve([](const RangeServer& server, const Asked&) { return redirect_to(server.url()); });
  const Error error = expect_error(read(), ErrorCode::kIo);
  EXPECT_NE(error.message.find("more than 5 times"), std::string::npos) << error.message;
  EXPECT_EQ(server_->requests(), 6U);
}

}  // namespace
}  // namespace gdsdata::testing
