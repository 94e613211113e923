#include "backend/range_verdict.h"

#include <algorithm>
#include <array>
#include <cerrno>

#include "base/descriptors.h"
#include "base/url.h"

namespace gdsdata {

namespace {

using Action = Verdict::Action;

constexpr size_t kMostQuotedBytes = 200;
constexpr unsigned kMostRedirects = 5;

// The text of an XML element. Stores' errors are small documents: <Error><Code>..</Code>...
std::string_view element(std::string_view body, std::string_view name) {
  const std::string opening = "<" + std::string(name) + ">", closing = "</" + std::string(name) + ">";
  const size_t begin = body.find(opening);
  if (begin == std::string_view::npos) return {};
  const std::string_view rest = body.substr(begin + opening.size());
  const size_t end = rest.find(closing);
  return end == std::string_view::npos ? std::string_view() : rest.substr(0, std::min(end, kMostQuotedBytes));
}

std::string printable(std::string_view text) {
  std::string kept(text.substr(0, kMostQuotedBytes));
  std::replace_if(kept.begin(), kept.end(), [](unsigned char sign) { return sign < 32 || sign == 127; }, ' ');
  return kept;
}

// "status 403, AccessDenied (...), request id ..."
std::string refusal_text(const HttpHead& head, std::string_view body) {
  std::string text = "the server answered with status " + std::to_string(head.status);
  if (const auto code = element(body, "Code"); !code.empty()) text += ", " + printable(code);
  if (const auto message = element(body, "Message"); !message.empty()) text += " (" + printable(message) + ")";
  if (const auto id = head.request_id(); !id.empty()) text += ", request id " + printable(id);
  return text;
}

bool names(std::string_view body, std::string_view code) { return body.find(code) != std::string_view::npos; }

bool names_expiry(std::string_view body) {
  constexpr std::array<std::string_view, 5> kCodes = {"ExpiredToken", "RequestExpired", "TokenRefreshRequired",
                                                      "has expired", "InvalidToken"};
  return std::any_of(kCodes.begin(), kCodes.end(), [&](std::string_view code) { return names(body, code); });
}

Verdict wrong_answer(std::string reason) { return {Action::kRetry, std::move(reason), ErrorCode::kIo, EPROTO}; }

Verdict without_ranges() {
  return {Action::kFail,
          "the server sent the whole object: it does not serve ranges; copy the object to a store that does, or to a "
          "local disk",
          ErrorCode::kIo, EOPNOTSUPP};
}

// GCS decompresses such an object on its way, and then sends all of it.
bool is_decompressed(const HttpHead& head) {
  const std::string_view stored = head.header("x-goog-stored-content-encoding");
  return !stored.empty() && stored != "identity";
}

Verdict without_stored_bytes(const HttpHead& head) {
  return {Action::kFail,
          "the server decompresses the object on its way, so it serves no ranges: its Content-Encoding is " +
              printable(head.header("x-goog-stored-content-encoding")) + "; write it again without one",
          ErrorCode::kIo, EOPNOTSUPP};
}

Verdict another_version(const std::string& how) {
  return {Action::kFail,
          "the object was replaced since it was indexed (" + how +
              "); iterate again to index it anew, or keep versions apart by their names",
          ErrorCode::kCorrupt};
}

}  // namespace

Error Verdict::error(const RemoteObject& object, ObjectRange asked) const {
  const std::string place = shown_url(object.location());
  return {code,
          place + ", bytes " + std::to_string(asked.begin) + " to " + std::to_string(asked.end) + ": " + reason,
          place,
          asked.begin,
          asked.length(),
          system_errno};
}

Verdict judge_content(const HttpHead& head, const RemoteObject& object, ObjectRange asked) {
  const auto range = head.content_range();
  const auto length = head.content_length();
  if (!range && !head.header("content-range").empty()) {
    return wrong_answer("the server sent the range \"" + printable(head.header("content-range")) + "\"");
  }
  if (range) {
    if (range->total && *range->total != object.size_bytes()) {
      return another_version(std::to_string(object.size_bytes()) + " bytes then, " + std::to_string(*range->total) +
                             " now");
    }
    if (range->first != asked.begin || range->last >= asked.end) {
      return wrong_answer("the server sent the bytes " + std::to_string(range->first) + " to " +
                          std::to_string(range->last) + " instead, the last one included");
    }
    // The rest of a body that goes on behind a shorter range would be taken for what follows it. A
    // body that is compressed on its way would be taken for the bytes of the range.
    const uint64_t said = range->last - range->first + 1;
    const bool may_differ = said < asked.length() || !head.header("content-encoding").empty();
    if ((length && *length < said) || (may_differ && length != said)) {
      return wrong_answer("the server sent " + (length ? std::to_string(*length) + " bytes" : "a part of no length") +
                          " for a range of " + std::to_string(said));
    }
  } else if (head.status == 200 && is_decompressed(head)) {
    return without_stored_bytes(head);
  } else if (head.status == 206) {
    // No Content-Range: rclone's server answers so. Only the length can be checked.
    if (length != asked.length()) {
      return wrong_answer("the server sent " + (length ? std::to_string(*length) + " bytes" : "a part of no length") +
                          " instead of " + std::to_string(asked.length()));
    }
  } else if (length == object.size_bytes()) {
    if (asked.length() != object.size_bytes()) return without_ranges();
  } else if (!length) {
    return without_ranges();
  } else {
    return wrong_answer("the server answered with status " + std::to_string(head.status) + " and " +
                        std::to_string(*length) + " bytes, which are not the range that it was asked for");
  }
  const std::string_view tag = head.version_tag();
  // Without a version from the index, that of the first response is the right one.
  const std::string first_etag = object.etag();
  const bool is_other = object.has_version() ? object_version(tag) != object.version()
                                             : !first_etag.empty() && object_version(tag) != object_version(first_etag);
  if (!tag.empty() && is_other) return another_version("its tag is " + printable(tag) + " now");
  return {};
}

Verdict judge_refusal(const HttpHead& head, std::string_view body) {
  const std::string text = refusal_text(head, body);
  const auto of_expiry = [&] {
    return Verdict{.action = Action::kRetrySigned,
                   .reason = text + "; the credentials expired and could not be renewed",
                   .system_errno = EACCES,
                   .is_expired = true};
  };
  switch (head.status) {
    case 404:
    case 410:
      return {Action::kFail, text + "; the object is not there: check the URL, or index the data set anew",
              ErrorCode::kNotFound, ENOENT};
    case 412:
      return another_version(text);
    case 416:
      return {Action::kFail, text + "; the object is shorter than when it was indexed: iterate again to index it anew",
              ErrorCode::kCorrupt};
    case 401:
    case 403:
      if (names_expiry(body)) return of_expiry();
      if (names(body, "InvalidObjectState")) {
        return {Action::kFail, text + "; the object is archived: restore it first", ErrorCode::kIo, EACCES};
      }
      return {Action::kRetrySigned,
              text + (names(body, "RequestTimeTooSkewed")
                          ? "; set this machine's clock"
                          : "; check the credentials and their permission to read this object"),
              ErrorCode::kIo, EACCES};
    case 400:
      if (names_expiry(body)) return of_expiry();
      if (names(body, "RequestTimeout")) return {Action::kRetry, text, ErrorCode::kIo, EIO};
      return {Action::kFail, text, ErrorCode::kIo, EINVAL};
    case 301:
    case 307: {  // without a place to go to: the others are followed
      const std::string_view region = head.header("x-amz-bucket-region");
      const std::string where = region.empty() ? "" : ", which is " + printable(region);
      return {Action::kFail, text + "; the bucket is elsewhere: set its region" + where + ", or its endpoint",
              ErrorCode::kIo, EINVAL};
    }
    case 429:
    case 503:
      return {Action::kRetryThrottled, text + "; it asks for fewer requests", ErrorCode::kIo, EAGAIN,
              head.retry_after_s()};
    case 408:
    case 425:
      return {Action::kRetry, text, ErrorCode::kIo, EIO, head.retry_after_s()};
    case 501:
    case 505:
      return {Action::kFail, text, ErrorCode::kIo, EOPNOTSUPP};
    default:
      // Gateways have statuses of their own, from 520 on.
      return {head.status >= 500 ? Action::kRetry : Action::kFail, text, ErrorCode::kIo, EIO, head.retry_after_s()};
  }
}

Verdict judge_redirect(std::string_view from, std::string_view to, unsigned hops) {
  const auto refused = [](const std::string& why) {
    return Verdict{Action::kFail, "the server redirects " + why + ": check the URL, or the endpoint", ErrorCode::kIo,
                   EINVAL};
  };
  const std::string source = origin_of(from), target = origin_of(to);
  if (target.empty()) return refused("to a URL that is neither http nor https");
  if (source.starts_with("https:") && !target.starts_with("https:")) return refused("from https to http");
  if (hops >= kMostRedirects) return refused("more than " + std::to_string(kMostRedirects) + " times");
  return {};
}

Verdict judge_failure(const HttpEnd& end) {
  if (end.thrown) return {Action::kFail, end.thrown->message, end.thrown->code, end.thrown->system_errno};
  // This process's other requests will end, and their connections then serve this one.
  if (is_out_of_descriptors(end.system_errno)) {
    return {Action::kRetryThrottled, end.reason + "; raise the limit of open files (ulimit -n)", ErrorCode::kIo,
            end.system_errno};
  }
  switch (end.code) {
    case CurlApi::kCertificateRefused:
    case CurlApi::kBadCertificateFile:
    case CurlApi::kBadOwnCertificate:
      return {Action::kFail,
              "the server's certificate is not accepted (" + end.reason +
                  "); name the authority's file by SSL_CERT_FILE if you trust it",
              ErrorCode::kIo, EACCES};
    case CurlApi::kNoAddress:
    case CurlApi::kNoProxyAddress:
      return {Action::kRetry, end.reason + "; check the endpoint, and the proxy in the environment", ErrorCode::kIo,
              EHOSTUNREACH};
    case CurlApi::kTlsConnect:  // its number is that of an earlier call
      return {Action::kRetry, end.reason + "; if the server has no TLS, begin its URL or endpoint with http://",
              ErrorCode::kIo, EPROTONOSUPPORT};
    case CurlApi::kTimeout:
      return {Action::kRetry, end.reason, ErrorCode::kIo, ETIMEDOUT};
    case CurlApi::kUnsupportedProtocol:  // of a damaged status line, too
      return {Action::kRetry, end.reason, ErrorCode::kIo, EPROTO};
    case CurlApi::kMalformedUrl:
      return {Action::kFail, end.reason, ErrorCode::kIo, EINVAL};
    default:
      return {Action::kRetry, end.reason, ErrorCode::kIo, end.system_errno != 0 ? end.system_errno : EIO};
  }
}

Verdict judge_wrong_length(uint64_t received, uint64_t asked) {
  return wrong_answer("the server sent " + std::to_string(received) + " bytes instead of " + std::to_string(asked));
}

}  // namespace gdsdata
