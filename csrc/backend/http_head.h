// The head of an HTTP response, as far as ranges and errors need it. Pure: bytes to structure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gdsdata {

// Content-Range (RFC 9110, 14.4).
struct ContentRange {
  uint64_t first = 0, last = 0;
  std::optional<uint64_t> total;
  bool operator==(const ContentRange&) const = default;
};

// Nothing if it is not of the form "bytes FIRST-LAST/TOTAL", or if LAST is less than FIRST.
std::optional<ContentRange> parse_content_range(std::string_view value);

struct HttpHead {
  int status = 0;
  bool is_complete = false;  // its last line has come
  // Names in lower case, values without surrounding blanks; at most kMostHeaders, of
  // kMostHeaderBytes each. Others are dropped.
  std::vector<std::pair<std::string, std::string>> headers;

  static constexpr size_t kMostHeaders = 100, kMostHeaderBytes = 8192;

  // A line as the server sent it. A status line begins a new head.
  void add_line(std::string_view line);
  std::string_view header(std::string_view name) const;  // empty if it is not there
  std::optional<uint64_t> content_length() const;
  std::optional<ContentRange> content_range() const;
  std::optional<double> retry_after_s() const;  // only the form in seconds
  std::string_view version_tag() const;         // ETag, or else Last-Modified
  std::string_view request_id() const;          // by the names that the known stores use
};

}  // namespace gdsdata
