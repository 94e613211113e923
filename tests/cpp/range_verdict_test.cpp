// Each answer to a request for a range has its action, and its error says what happened.
#include "backend/range_verdict.h"

#include <cerrno>
#include <string>
#include <vector>

#include "testing.h"

namespace gdsdata::testing {
namespace {

using Action = Verdict::Action;

constexpr uint64_t kSize = 1000;
constexpr ObjectRange kAsked{100, 200};
constexpr std::string_view kTag = "\"v1\"";

RemoteObject object_at(const std::string& location) { return {location, kSize, object_version(kTag)}; }

HttpHead head_of(int status, const std::vector<std::string>& lines = {}) {
  HttpHead head;
  head.add_line("HTTP/1.1 " + std::to_string(status) + " x");
  for (const std::string& line : lines) head.add_line(line);
  return head;
}

struct Case {
  std::string name;
  int status;
  std::vector<std::string> lines;
  std::string body;
  Action action;
  ErrorCode code = ErrorCode::kIo;
  int system_errno = 0;
  std::string reason = {};  // a part of it
};

std::string error_body(const std::string& code) {
  return "<?xml version=\"1.0\"?><Error><Code>" + code + "</Code><Message>Said so.</Message></Error>";
}

Verdict judge(const Case& one, const RemoteObject& object) {
  const HttpHead head = head_of(one.status, one.lines);
  return is_success(one.status) ? judge_content(head, object, kAsked) : judge_refusal(head, one.body);
}

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"the range",
       206,
       {"Content-Range: bytes 100-199/1000", "Content-Length: 100", "ETag: \"v1\""},
       "",
       Action::kTake},
      {"a weak tag", 206, {"Content-Range: bytes 100-199/1000", "ETag: W/\"v1\""}, "", Action::kTake},
      {"no tag", 206, {"Content-Range: bytes 100-199/1000"}, "", Action::kTake},
      {"an object that is stored compressed",
       206,
       {"Content-Range: bytes 100-199/1000", "Content-Length: 100", "Content-Encoding: gzip"},
       "",
       Action::kTake},
      {"an unknown size", 206, {"Content-Range: bytes 100-199/*"}, "", Action::kTake},
      {"the beginning of it", 206, {"Content-Range: bytes 100-149/1000", "Content-Length: 50"}, "", Action::kTake},
      {"200 with a range", 200, {"Content-Range: bytes 100-199/1000", "Content-Length: 100"}, "", Action::kTake},
      {"206 without a range", 206, {"Content-Length: 100"}, "", Action::kTake},

      {"another begin",
       206,
       {"Content-Range: bytes 101-199/1000"},
       "",
       Action::kRetry,
       ErrorCode::kIo,
       EPROTO,
       "the bytes 101 to 199"},
      {"more bytes than its range has",
       206,
       {"Content-Range: bytes 100-149/1000", "Content-Length: 100"},
       "",
       Action::kRetry,
       ErrorCode::kIo,
       EPROTO,
       "100 bytes for a range of 50"},
      {"fewer bytes than its range has",
       206,
       {"Content-Range: bytes 100-199/1000", "Content-Length: 60"},
       "",
       Action::kRetry,
       ErrorCode::kIo,
       EPROTO,
       "60 bytes for a range of 100"},
      {"a part of no length that is compressed on its way",
       206,
       {"Content-Range: bytes 100-199/1000", "Content-Encoding: gzip"},
       "",
       Action::kRetry,
       ErrorCode::kIo,
       EPROTO,
       "a part of no length for a range of 100"},
      {"the beginning of it, of no length",
       206,
       {"Content-Range: bytes 100-149/1000"},
       "",
       Action::kRetry,
       ErrorCode::kIo,
       EPROTO,
       "a part of no length for a range of 50"},
      {"a later end", 206, {"Content-Range: bytes 100-200/1000"}, "", Action::kRetry, ErrorCode::kIo, EPROTO},
      {"the last end",
       206,
       {"Content-Range: bytes 100-18446744073709551615/1000"},
       "",
       Action::kRetry,
       ErrorCode::kIo,
       EPROTO},
      {"a damaged range",
       206,
       {"Content-Range: bytes one-two/1000", "Content-Length: 100"},
       "",
       Action::kRetry,
       ErrorCode::kIo,
       EPROTO,
       "one-two"},
      {"another length", 206, {"Content-Length: 99"}, "", Action::kRetry, ErrorCode::kIo, EPROTO, "99 bytes"},
      {"206 of no length", 206, {}, "", Action::kRetry, ErrorCode::kIo, EPROTO, "no length"},
      {"200 of its length", 200, {"Content-Length: 100"}, "", Action::kRetry, ErrorCode::kIo, EPROTO, "not the range"},
      {"200 of another length", 200, {"Content-Length: 77"}, "", Action::kRetry, ErrorCode::kIo, EPROTO},
      {"the whole object",
       200,
       {"Content-Length: 1000"},
       "",
       Action::kFail,
       ErrorCode::kIo,
       EOPNOTSUPP,
       "does not serve ranges"},
      {"an object that is decompressed on its way",
       200,
       {"X-Goog-Stored-Content-Encoding: gzip", "X-Goog-Stored-Content-Length: 1000", "Transfer-Encoding: chunked"},
       "",
       Action::kFail,
       ErrorCode::kIo,
       EOPNOTSUPP,
       "its Content-Encoding is gzip"},
      {"the same, of a length",
       200,
       {"X-Goog-Stored-Content-Encoding: gzip", "Content-Length: 5000"},
       "",
       Action::kFail,
       ErrorCode::kIo,
       EOPNOTSUPP,
       "write it again without one"},
      {"the whole object of GCS, as it is stored",
       200,
       {"X-Goog-Stored-Content-Encoding: identity", "Content-Length: 1000"},
       "",
       Action::kFail,
       ErrorCode::kIo,
       EOPNOTSUPP,
       "does not serve ranges"},
      {"200 of no length", 200, {}, "", Action::kFail, ErrorCode::kIo, EOPNOTSUPP},
      {"another size",
       206,
       {"Content-Range: bytes 100-199/1001"},
       "",
       Action::kFail,
       ErrorCode::kCorrupt,
       0,
       "1000 bytes then, 1001 now"},
      {"another tag",
       206,
       {"Content-Range: bytes 100-199/1000", "ETag: \"v2\""},
       "",
       Action::kFail,
       ErrorCode::kCorrupt,
       0,
       "\"v2\""},

      {"301",
       301,
       {"x-amz-bucket-region: eu-north-1"},
       error_body("PermanentRedirect"),
       Action::kFail,
       ErrorCode::kIo,
       EINVAL,
       "eu-north-1"},
      {"400", 400, {}, error_body("InvalidArgument"), Action::kFail, ErrorCode::kIo, EINVAL, "InvalidArgument"},
      {"400 of expiry", 400, {}, error_body("ExpiredToken"), Action::kRetrySigned, ErrorCode::kIo, EACCES, "expired"},
      {"400 of a time limit", 400, {}, error_body("RequestTimeout"), Action::kRetry, ErrorCode::kIo, EIO},
      {"401", 401, {}, "", Action::kRetrySigned, ErrorCode::kIo, EACCES, "credentials"},
      {"403", 403, {}, error_body("AccessDenied"), Action::kRetrySigned, ErrorCode::kIo, EACCES, "permission"},
      {"403 of expiry",
       403,
       {},
       error_body("ExpiredToken"),
       Action::kRetrySigned,
       ErrorCode::kIo,
       EACCES,
       "could not be renewed"},
      {"403 of a clock",
       403,
       {},
       error_body("RequestTimeTooSkewed"),
       Action::kRetrySigned,
       ErrorCode::kIo,
       EACCES,
       "clock"},
      {"403 of an archive",
       403,
       {},
       error_body("InvalidObjectState"),
       Action::kFail,
       ErrorCode::kIo,
       EACCES,
       "restore it first"},
      {"404", 404, {}, error_body("NoSuchKey"), Action::kFail, ErrorCode::kNotFound, ENOENT, "NoSuchKey (Said so.)"},
      {"405", 405, {}, "", Action::kFail, ErrorCode::kIo, EIO},
      {"408", 408, {}, "", Action::kRetry, ErrorCode::kIo, EIO},
      {"410", 410, {}, "", Action::kFail, ErrorCode::kNotFound, ENOENT},
      {"412", 412, {}, "", Action::kFail, ErrorCode::kCorrupt, 0, "replaced"},
      {"416", 416, {}, "", Action::kFail, ErrorCode::kCorrupt, 0, "shorter"},
      {"429", 429, {"Retry-After: 3"}, "", Action::kRetryThrottled, ErrorCode::kIo, EAGAIN, "fewer requests"},
      {"500", 500, {}, error_body("InternalError"), Action::kRetry, ErrorCode::kIo, EIO},
      {"501", 501, {}, "", Action::kFail, ErrorCode::kIo, EOPNOTSUPP},
      {"502", 502, {}, "<html>", Action::kRetry, ErrorCode::kIo, EIO},
      {"503", 503, {}, error_body("SlowDown"), Action::kRetryThrottled, ErrorCode::kIo, EAGAIN, "SlowDown"},
      {"504", 504, {}, "", Action::kRetry, ErrorCode::kIo, EIO},
      {"522 of a gateway", 522, {}, "", Action::kRetry, ErrorCode::kIo, EIO},
      {"no status", 0, {}, "", Action::kFail, ErrorCode::kIo, EIO},
  };
  return all;
}

TEST(RangeVerdict, EachAnswerHasItsActionAndItsError) {
  const RemoteObject object = object_at("s3://bucket/key");
  for (const Case& one : cases()) {
    const Verdict verdict = judge(one, object);
    EXPECT_EQ(verdict.action, one.action) << one.name;
    if (one.action == Action::kTake) continue;
    EXPECT_EQ(verdict.code, one.code) << one.name;
    EXPECT_EQ(verdict.system_errno, one.system_errno) << one.name;
    EXPECT_NE(verdict.reason.find(one.reason), std::string::npos) << one.name << ": " << verdict.reason;
  }
}

TEST(RangeVerdict, TheWholeObjectIsTakenIfItWasAskedFor) {
  const RemoteObject object = object_at("s3://bucket/key");
  const ObjectRange whole{0, kSize};
  EXPECT_EQ(judge_content(head_of(200, {"Content-Length: 1000"}), object, whole).action, Action::kTake);
  EXPECT_EQ(judge_content(head_of(200, {"Content-Length: 999"}), object, whole).action, Action::kRetry);
  EXPECT_EQ(judge_content(head_of(200), object, whole).action, Action::kFail);
}

TEST(RangeVerdict, EachErrorNamesUrlRangeStatusAndRequest) {
  const RemoteObject object = object_at("s3://bucket/key");
  for (Case one : cases()) {
    if (one.action == Action::kTake) continue;
    one.lines.emplace_back("x-amz-request-id: REQ7");
    const Error error = judge(one, object).error(object, kAsked);
    EXPECT_TRUE(error.message.starts_with("s3://bucket/key, bytes 100 to 200: ")) << error.message;
    EXPECT_EQ(error.path, "s3://bucket/key");
    EXPECT_EQ(error.offset, 100U);
    EXPECT_EQ(error.length, 100U);
    if (is_success(one.status)) continue;
    EXPECT_NE(error.message.find("status " + std::to_string(one.status)), std::string::npos) << error.message;
    EXPECT_NE(error.message.find("request id REQ7"), std::string::npos) << error.message;
  }
}

TEST(RangeVerdict, NoErrorHasTheQueryOfAUrl) {
  const RemoteObject object = object_at("https://host/key?sig=a-secret#part");
  for (const Case& one : cases()) {
    if (one.action == Action::kTake) continue;
    const Error error = judge(one, object).error(object, kAsked);
    EXPECT_EQ(error.path, "https://host/key");
    EXPECT_EQ(error.message.find("secret"), std::string::npos) << error.message;
  }
  // Keys of other stores may have a question mark.
  const RemoteObject odd = object_at("s3://bucket/why?");
  EXPECT_EQ(judge_failure({}).error(odd, kAsked).path, "s3://bucket/why?");
}

TEST(RangeVerdict, ABodyIsQuotedInPartAndWithoutControlCharacters) {
  const std::string body = "<Error><Code>A\x1b[31m\nB</Code><Message>" + std::string(5000, 'm') +
                           "</Message><StringToSign>a-secret</StringToSign></Error>";
  const std::string reason = judge_refusal(head_of(403), body).reason;
  EXPECT_LT(reason.size(), 700U);
  EXPECT_EQ(reason.find_first_of("\x1b\n"), std::string::npos);
  EXPECT_EQ(reason.find("secret"), std::string::npos);
}

TEST(RangeVerdict, AnExpiredAccessIsDistinguishedFromARefusedOne) {
  EXPECT_TRUE(judge_refusal(head_of(403), error_body("ExpiredToken")).is_expired);
  EXPECT_FALSE(judge_refusal(head_of(403), error_body("AccessDenied")).is_expired);
}

TEST(RangeVerdict, WithoutAVersionTheFirstResponseSaysWhichOneIsRight) {
  RemoteObject object("s3://bucket/key", kSize, RemoteObject::kAnyVersion);
  const auto answer = [&](const std::string& tag) {
    return judge_content(head_of(206, {"Content-Range: bytes 100-199/1000", "ETag: " + tag}), object, kAsked);
  };
  EXPECT_EQ(answer("\"any\"").action, Action::kTake);
  object.set_etag("\"any\"");
  EXPECT_EQ(answer("\"any\"").action, Action::kTake);
  EXPECT_EQ(answer("\"other\"").code, ErrorCode::kCorrupt);
}

TEST(RangeVerdict, RedirectsAreFollowedFiveTimesAndNeverFromHttpsToHttp) {
  EXPECT_EQ(judge_redirect("http://a/x", "https://b/y", 0).action, Action::kTake);
  EXPECT_EQ(judge_redirect("https://a/x", "HTTPS://b/y", 4).action, Action::kTake);
  EXPECT_NE(judge_redirect("https://a/x", "http://a/y", 0).reason.find("from https to http"), std::string::npos);
  EXPECT_NE(judge_redirect("http://a/x", "ftp://a/y", 0).reason.find("neither"), std::string::npos);
  EXPECT_NE(judge_redirect("http://a/x", "http://a/y", 5).reason.find("5 times"), std::string::npos);
}

TEST(RangeVerdict, AProcessWithoutDescriptorsTriesAgainWithFewerRequestsInFlight) {
  for (const int code : {CurlApi::kNotConnected, CurlApi::kNoAddress, CurlApi::kBadCertificateFile}) {
    const Verdict verdict = judge_failure({code, "why", EMFILE});
    EXPECT_EQ(verdict.action, Action::kRetryThrottled) << code;
    EXPECT_EQ(verdict.system_errno, EMFILE) << code;
    EXPECT_NE(verdict.reason.find("ulimit -n"), std::string::npos) << verdict.reason;
  }
}

TEST(RangeVerdict, FailuresOfConnectionsAreTriedAgainAndThoseOfTrustAreNot) {
  for (const int code :
       {CurlApi::kNotConnected, CurlApi::kReceiveError, CurlApi::kPartial, CurlApi::kGotNothing, CurlApi::kNoAddress,
        CurlApi::kTlsConnect, CurlApi::kTimeout, CurlApi::kWeirdReply, CurlApi::kUnsupportedProtocol}) {
    EXPECT_EQ(judge_failure({code, "why", 0}).action, Action::kRetry) << code;
    EXPECT_NE(judge_failure({code, "why", 0}).system_errno, 0) << code;
  }
  for (const int code : {CurlApi::kCertificateRefused, CurlApi::kBadCertificateFile, CurlApi::kMalformedUrl}) {
    EXPECT_EQ(judge_failure({code, "why", 0}).action, Action::kFail) << code;
  }
  EXPECT_NE(judge_failure({CurlApi::kCertificateRefused, "why", 0}).reason.find("SSL_CERT_FILE"), std::string::npos);
  EXPECT_NE(judge_failure({CurlApi::kTlsConnect, "why", 0}).reason.find("http://"), std::string::npos);
  EXPECT_EQ(judge_failure({CurlApi::kTlsConnect, "why", ECONNREFUSED}).system_errno, EPROTONOSUPPORT);
  EXPECT_EQ(judge_failure({CurlApi::kReceiveError, "why", ECONNRESET}).system_errno, ECONNRESET);
}

}  // namespace
}  // namespace gdsdata::testing
