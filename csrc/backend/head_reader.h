// Where the head of an HTTP/1 response ends, and how long its body is. Pure: bytes to structure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "backend/http_head.h"

namespace gdsdata {

// Understands one form of response: HTTP/1.0 or 1.1, a status, lines that end with CR LF, and one
// Content-Length. Any other one is unclear, for libcurl to judge.
class HeadReader {
 public:
  static constexpr size_t kMostBytes = 64 << 10;
  enum class State { kIncomplete, kComplete, kUnclear };

  // Takes bytes up to the end of the head, and returns how many. Call it until the state changes.
  size_t take(std::string_view bytes);
  State state() const { return state_; }
  // The next ones are valid once the head is complete.
  const HttpHead& head() const { return head_; }
  HttpHead take_head() { return std::move(head_); }
  uint64_t body_bytes() const { return *body_bytes_; }
  bool keeps_connection() const { return keeps_connection_; }

 private:
  void take_line(std::string_view line);
  void take_status(std::string_view line);
  void take_header(std::string_view line);
  void end_head();

  State state_ = State::kIncomplete;
  std::string rest_;  // the beginning of a line whose end has not come
  size_t bytes_ = 0;
  HttpHead head_;
  std::optional<uint64_t> body_bytes_;
  bool keeps_connection_ = true;
};

}  // namespace gdsdata
