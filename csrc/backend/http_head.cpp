#include "backend/http_head.h"

#include <algorithm>
#include <array>

#include "base/ascii.h"

namespace gdsdata {

namespace {

constexpr size_t kUsualHeaders = 16;  // more of them take memory again

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\r\n";
  const size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

}  // namespace

std::optional<ContentRange> parse_content_range(std::string_view value) {
  constexpr std::string_view kUnit = "bytes ";
  value = trimmed(value);
  if (!equal_but_for_case(value.substr(0, kUnit.size()), kUnit)) return std::nullopt;
  value = trimmed(value.substr(kUnit.size()));
  const size_t dash = value.find('-'), slash = value.find('/');
  if (dash == std::string_view::npos || slash == std::string_view::npos || dash > slash) return std::nullopt;
  const auto first = decimal_of(value.substr(0, dash)), last = decimal_of(value.substr(dash + 1, slash - dash - 1));
  const std::string_view total = value.substr(slash + 1);
  if (!first || !last || *last < *first || (total != "*" && !decimal_of(total))) return std::nullopt;
  return ContentRange{*first, *last, decimal_of(total)};
}

void HttpHead::add_line(std::string_view line) {
  if (line.starts_with("HTTP/")) {
    *this = {};
    const size_t blank = line.find(' ');
    if (blank != std::string_view::npos) {
      status = static_cast<int>(decimal_of(line.substr(blank + 1, 3)).value_or(0));
    }
    return;
  }
  if (line == "\r\n" || line == "\n") is_complete = true;
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos || line.size() > kMostHeaderBytes || headers.size() >= kMostHeaders) return;
  if (headers.empty()) headers.reserve(kUsualHeaders);
  std::string name(line.substr(0, colon));
  std::transform(name.begin(), name.end(), name.begin(), lower);
  headers.emplace_back(std::move(name), trimmed(line.substr(colon + 1)));
}

std::string_view HttpHead::header(std::string_view name) const {
  const auto found = std::find_if(headers.begin(), headers.end(), [&](const auto& one) { return one.first == name; });
  return found == headers.end() ? std::string_view() : found->second;
}

std::optional<uint64_t> HttpHead::content_length() const { return decimal_of(header("content-length")); }

std::optional<ContentRange> HttpHead::content_range() const { return parse_content_range(header("content-range")); }

std::optional<double> HttpHead::retry_after_s() const {
  const auto seconds = decimal_of(header("retry-after"));
  return seconds ? std::optional(static_cast<double>(*seconds)) : std::nullopt;
}

std::string_view HttpHead::version_tag() const {
  const std::string_view etag = header("etag");
  return etag.empty() ? header("last-modified") : etag;
}

std::string_view HttpHead::request_id() const {
  constexpr std::array<std::string_view, 4> kNames = {"x-amz-request-id", "x-ms-request-id", "x-guploader-uploadid",
                                                      "x-request-id"};
  for (const std::string_view name : kNames) {
    if (const std::string_view value = header(name); !value.empty()) return value;
  }
  return {};
}

}  // namespace gdsdata
