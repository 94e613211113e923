#include "backend/plain_exchange.h"

#include <sys/socket.h>
#include <sys/utsname.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>

#include "backend/curl_api.h"
#include "base/ascii.h"
#include "base/url.h"
#include "tuning.h"

namespace gdsdata {

namespace {

constexpr std::string_view kScheme = "http://";
constexpr int kMostCalls = 32;  // of recv in a row

bool is_set(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr && *value != '\0';
}

// Those that libcurl reads for http.
bool has_proxy() { return is_set("http_proxy") || is_set("all_proxy") || is_set("ALL_PROXY"); }

// A name or an address with or without a port, and without anything that libcurl would change.
bool is_plain_authority(std::string_view authority) {
  constexpr std::string_view kOthers = "-._:[]";
  return !authority.empty() && std::all_of(authority.begin(), authority.end(), [&](char sign) {
    return (sign >= 'a' && sign <= 'z') || (sign >= '0' && sign <= '9') || kOthers.find(sign) != kOthers.npos;
  });
}

bool is_plain_target(std::string_view target) {
  return target.starts_with('/') &&
         std::all_of(target.begin(), target.end(), [](char sign) { return sign > ' ' && sign < 127 && sign != '#'; });
}

// "Name: value", except for names that mean something to libcurl.
bool is_plain_header(std::string_view header) {
  constexpr std::array<std::string_view, 8> kNamesOfLibcurl = {
      "host", "accept", "connection", "expect", "te", "transfer-encoding", "content-length", "proxy-connection"};
  const size_t colon = header.find(':');
  if (colon == 0 || colon == std::string_view::npos) return false;
  if (header.find_first_not_of(" \t", colon + 1) == std::string_view::npos) return false;
  if (header.find_first_of(std::string_view("\r\n\0", 3)) != std::string_view::npos) return false;
  const std::string_view name = header.substr(0, colon);
  return std::none_of(kNamesOfLibcurl.begin(), kNamesOfLibcurl.end(),
                      [&](std::string_view other) { return equal_but_for_case(name, other); });
}

std::string_view target_of(std::string_view url) {
  const size_t path = url.find('/', kScheme.size());
  return path == std::string_view::npos ? std::string_view() : url.substr(path);
}

// Nothing if only libcurl knows it: a path that begins where the request's ends.
std::optional<std::string> absolute_url(std::string_view location, const std::string& origin) {
  if (!origin_of(location).empty()) return std::string(location);
  if (location.starts_with('/') && !location.starts_with("//")) return origin + std::string(location);
  return std::nullopt;
}

// Kernels before 5.7 do not report a buffer that is full of short segments (SO_RCVLOWAT).
bool reports_full_buffers() {
  static const bool found = [] {
    utsname system{};
    int major = 0, minor = 0;
    return ::uname(&system) == 0 && std::sscanf(system.release, "%d.%d", &major, &minor) == 2 &&
           std::pair(major, minor) >= std::pair(5, 7);
  }();
  return found;
}

std::string text_of(const HttpRequest& request, std::string_view origin) {
  std::string text = "GET ";
  text.append(target_of(request.url)).append(" HTTP/1.1\r\nHost: ").append(origin.substr(kScheme.size()));
  text += "\r\nAccept: */*\r\n";
  for (const std::string& header : request.headers) text.append(header).append("\r\n");
  return text += "\r\n";
}

}  // namespace

std::string plain_origin(const HttpRequest& request) {
  const std::string_view url = request.url;
  if (request.method != "GET" || request.timeout.count() != 0 || !url.starts_with(kScheme)) return "";
  const std::string_view target = target_of(url);
  const std::string_view authority = url.substr(kScheme.size(), url.size() - kScheme.size() - target.size());
  const bool is_plain = is_plain_authority(authority) && is_plain_target(target) &&
                        std::all_of(request.headers.begin(), request.headers.end(), is_plain_header);
  return is_plain && !has_proxy() ? origin_of(url) : "";
}

PlainExchange::PlainExchange(PlainConnection connection, const HttpRequest& request, HttpReceiver& receiver,
                             std::span<std::byte> scratch)
    : connection_(std::move(connection)),
      receiver_(receiver),
      scratch_(scratch),
      request_(text_of(request, connection_.origin)) {}

std::optional<PlainConnection> PlainExchange::take_connection() {
  if (!is_reusable_) return std::nullopt;
  connection_.is_used = true;
  return std::move(connection_);
}

PlainExchange::State PlainExchange::begin() {
  state_ = send();
  watch();
  return state_;
}

PlainExchange::State PlainExchange::advance() {
  if (state_ == State::kSending) begin();
  if (state_ == State::kReceiving) state_ = receive();
  return state_;
}

void PlainExchange::watch() {
  const bool waits_to_send = state_ == State::kSending;
  if (waits_to_send == watches_writes_) return;
  watches_writes_ = waits_to_send;
  // An answer before the request is sent would be ready to read all the time.
  connection_.socket.watch(/*reads=*/!waits_to_send, waits_to_send);
}

PlainExchange::State PlainExchange::send() {
  while (sent_ < request_.size()) {
    const ssize_t count =
        ::send(socket(), request_.data() + sent_, request_.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count >= 0) {
      sent_ += static_cast<size_t>(count);
    } else if (errno == EAGAIN) {
      return State::kSending;
    } else if (errno != EINTR) {
      const int reason = errno;
      if (connection_.is_used) return State::kStale;
      return end(CurlApi::kSendError, std::string("sending the request failed: ") + std::strerror(reason), reason);
    }
  }
  return State::kReceiving;
}

PlainExchange::State PlainExchange::receive() {
  for (int calls = 0; calls < kMostCalls; ++calls) {
    std::span<std::byte> into;
    if (!is_head_delivered_) {
      into = scratch_.first(kHeadBytes);
    } else {
      into = receiver_.body_memory();
      if (into.size() < std::min(left_, tuning::kReceivedInPlaceBytes)) into = scratch_;
      into = into.first(std::min<uint64_t>(into.size(), left_));
    }
    const ssize_t count = ::recv(socket(), into.data(), into.size(), MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return State::kReceiving;
    if (count <= 0) return fail_transfer(count < 0 ? errno : 0);
    is_begun_ = true;
    const auto received = into.first(static_cast<size_t>(count));
    const State state = is_head_delivered_ ? take_body(received) : take(received);
    set_low_water();
    // A call that is not filled has taken all that was there.
    if (state != State::kReceiving || received.size() < into.size()) return state;
  }
  return State::kReceiving;  // the reactor has others, too, and finds the socket ready again
}

// Sets with how many bytes the socket is ready: many within a body, and else one. The kernel also
// reports ends and errors, and a receive buffer that is full.
void PlainExchange::set_low_water() {
  if (!reports_full_buffers()) return;
  const uint64_t expected = is_head_delivered_ ? left_ : 0;
  const bool is_long = expected >= tuning::kShortestBodyToGather;
  const int low_water = is_long ? static_cast<int>(std::min(expected, tuning::kLeastReceivedBytes)) : 1;
  if (low_water == low_water_) return;
  // Without this, there are only more calls.
  if (::setsockopt(socket(), SOL_SOCKET, SO_RCVLOWAT, &low_water, sizeof(low_water)) == 0) low_water_ = low_water;
}

// The head, or the beginning of the body.
PlainExchange::State PlainExchange::take(std::span<const std::byte> bytes) {
  using Head = HeadReader::State;
  if (reader_.state() == Head::kIncomplete) {
    bytes = bytes.subspan(reader_.take({reinterpret_cast<const char*>(bytes.data()), bytes.size()}));
    if (reader_.state() == Head::kUnclear) return State::kUnclear;
    if (reader_.state() == Head::kIncomplete) return State::kReceiving;
    const std::string_view location = reader_.head().header("location");
    if (reader_.head().status / 100 == 3 && !location.empty()) {
      auto url = absolute_url(location, connection_.origin);
      if (!url) return State::kUnclear;
      end_.redirect_url = std::move(*url);
    }
    left_ = reader_.body_bytes();
  }
  if (bytes.empty() && left_ > 0) return State::kReceiving;  // the receiver gets the head with the first byte
  is_head_delivered_ = true;
  if (!receiver_.take_head(reader_.take_head())) return end(CurlApi::kWriteError, "the response is not wanted");
  if (bytes.size() <= left_) return take_body(bytes);
  // More than the head says: what follows belongs to no request.
  const State state = take_body(bytes.first(left_));
  is_reusable_ = false;
  return state;
}

PlainExchange::State PlainExchange::take_body(std::span<const std::byte> bytes) {
  left_ -= bytes.size();
  if (!bytes.empty() && !receiver_.take_body(bytes)) return end(CurlApi::kWriteError, "the response is not wanted");
  if (left_ > 0) return State::kReceiving;
  is_reusable_ = reader_.keeps_connection();
  return end(CurlApi::kOk, "");
}

// `system_errno` is 0 if the server closed the connection.
PlainExchange::State PlainExchange::fail_transfer(int system_errno) {
  if (!is_begun_ && connection_.is_used) return State::kStale;
  // A refusal whose body does not come: its status says enough.
  if (reader_.state() == HeadReader::State::kComplete && !is_head_delivered_ && reader_.head().status >= 300) {
    receiver_.take_head(reader_.take_head());
  }
  if (system_errno != 0) {
    return end(CurlApi::kReceiveError, std::string("receiving failed: ") + std::strerror(system_errno), system_errno);
  }
  if (!is_begun_) return end(CurlApi::kGotNothing, "the server closed the connection without an answer");
  if (reader_.state() == HeadReader::State::kIncomplete) {
    return end(CurlApi::kReceiveError, "the server closed the connection within the head of its answer");
  }
  return end(CurlApi::kPartial,
             "the server closed the connection with " + std::to_string(left_) + " bytes remaining to read");
}

PlainExchange::State PlainExchange::end(int code, std::string reason, int system_errno) {
  end_.code = code;
  end_.reason = std::move(reason);
  end_.system_errno = system_errno;
  return State::kEnded;
}

}  // namespace gdsdata
