#include "backend/head_reader.h"

#include <algorithm>

#include "base/ascii.h"

namespace gdsdata {

namespace {

constexpr int kFirstFinalStatus = 200, kNoContent = 204, kNotModified = 304;

bool is_digit(char sign) { return sign >= '0' && sign <= '9'; }

// RFC 9110, 5.6.2.
bool is_token_sign(char sign) {
  constexpr std::string_view kOthers = "!#$%&'*+-.^_`|~";
  return is_digit(sign) || (sign >= 'a' && sign <= 'z') || (sign >= 'A' && sign <= 'Z') ||
         kOthers.find(sign) != std::string_view::npos;
}

bool is_value_sign(char sign) { return static_cast<unsigned char>(sign) >= ' ' || sign == '\t'; }

}  // namespace

size_t HeadReader::take(std::string_view bytes) {
  size_t taken = 0;
  while (state_ == State::kIncomplete && taken < bytes.size()) {
    const size_t end = bytes.find('\n', taken);
    const std::string_view part = bytes.substr(taken, end == std::string_view::npos ? end : end + 1 - taken);
    taken += part.size();
    bytes_ += part.size();
    if (bytes_ > kMostBytes) {
      state_ = State::kUnclear;
    } else if (end == std::string_view::npos) {
      rest_ += part;
    } else if (rest_.empty()) {
      take_line(part);
    } else {
      rest_ += part;
      take_line(rest_);
      rest_.clear();
    }
  }
  return taken;
}

void HeadReader::take_line(std::string_view line) {
  if (!line.ends_with("\r\n")) {
    state_ = State::kUnclear;
  } else if (head_.status == 0) {
    take_status(line);
  } else if (line.size() == 2) {
    end_head();
  } else {
    take_header(line);
  }
}

// "HTTP/1.1 206 Partial Content"
void HeadReader::take_status(std::string_view line) {
  constexpr std::string_view kVersion = "HTTP/1.";
  constexpr size_t kStatusBegin = 9, kStatusEnd = 12;
  const bool is_clear = line.starts_with(kVersion) && line.size() > kStatusEnd && (line[7] == '0' || line[7] == '1') &&
                        line[8] == ' ' && line[kStatusBegin] != '0' &&
                        std::all_of(line.begin() + kStatusBegin, line.begin() + kStatusEnd, is_digit) &&
                        (line[kStatusEnd] == ' ' || line[kStatusEnd] == '\r');
  if (!is_clear) {
    state_ = State::kUnclear;
    return;
  }
  head_.add_line(line);
  body_bytes_.reset();
  keeps_connection_ = line[7] == '1';
}

void HeadReader::take_header(std::string_view line) {
  const size_t colon = line.find(':');
  const bool is_clear = colon != std::string_view::npos && colon > 0 && line.size() <= HttpHead::kMostHeaderBytes &&
                        head_.headers.size() < HttpHead::kMostHeaders &&
                        std::all_of(line.begin(), line.begin() + static_cast<ptrdiff_t>(colon), is_token_sign) &&
                        std::all_of(line.begin() + static_cast<ptrdiff_t>(colon), line.end() - 2, is_value_sign);
  if (!is_clear) {
    state_ = State::kUnclear;
    return;
  }
  head_.add_line(line);
  const auto& [name, value] = head_.headers.back();
  if (name == "content-length") {
    const auto length = decimal_of(value);
    const bool is_another = body_bytes_ && body_bytes_ != length;
    body_bytes_ = length;
    if (!length || is_another) state_ = State::kUnclear;
  } else if (name == "connection") {
    keeps_connection_ = equal_but_for_case(value, "keep-alive");
  } else if (name == "transfer-encoding" || name == "upgrade") {
    state_ = State::kUnclear;
  }
}

void HeadReader::end_head() {
  const int status = head_.status;
  if (status < kFirstFinalStatus) {  // Another head follows, except if the protocol is switched.
    if (status == 101) state_ = State::kUnclear;
    head_ = {};
    return;
  }
  const bool has_no_body = status == kNoContent || status == kNotModified;
  state_ = has_no_body || !body_bytes_ ? State::kUnclear : State::kComplete;
  head_.is_complete = true;
}

}  // namespace gdsdata
