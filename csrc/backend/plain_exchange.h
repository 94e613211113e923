// One GET over a connection without TLS: the body is received where the receiver wants it, and not
// copied there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "backend/head_reader.h"
#include "backend/http_receiver.h"
#include "backend/plain_connections.h"

namespace gdsdata {

// Where a request goes if it needs no libcurl but for the connection; empty: libcurl has to do it.
// That is any request but a GET without a time limit to a plain http URL, and all if a proxy is
// set in the environment.
std::string plain_origin(const HttpRequest& request);

class PlainExchange {
 public:
  enum class State {
    kSending,    // waits until the socket is writable
    kReceiving,  // waits until it is readable
    kEnded,      // see `take_end`
    kStale,      // the server had closed the connection before it got the request
    kUnclear,    // libcurl has to request it anew
  };

  // `scratch` has room for at least kHeadBytes. It is shared: nothing stays in it between calls.
  PlainExchange(PlainConnection connection, const HttpRequest& request, HttpReceiver& receiver,
                std::span<std::byte> scratch);
  PlainExchange(const PlainExchange&) = delete;
  PlainExchange& operator=(const PlainExchange&) = delete;
  int socket() const { return connection_.socket.get(); }
  // Sends the request, and does not call the receiver.
  State begin();
  // After that, when the socket is ready: sends or receives as much as is possible now. Passes on
  // what the receiver throws.
  State advance();
  HttpEnd take_end() { return std::move(end_); }
  // After the end: the connection, if another exchange may use it.
  std::optional<PlainConnection> take_connection();

  static constexpr size_t kHeadBytes = 4096;

 private:
  State send();
  void watch();
  void set_low_water();
  State receive();
  State take(std::span<const std::byte> bytes);
  State take_body(std::span<const std::byte> bytes);
  State fail_transfer(int system_errno);
  State end(int code, std::string reason, int system_errno = 0);

  PlainConnection connection_;
  HttpReceiver& receiver_;
  const std::span<std::byte> scratch_;
  State state_ = State::kSending;
  bool watches_writes_ = false;
  std::string request_;
  size_t sent_ = 0;
  HeadReader reader_;
  bool is_begun_ = false;  // a byte of the response came
  bool is_head_delivered_ = false;
  bool is_reusable_ = false;
  int low_water_ = 1;      // bytes with which the socket is ready
  uint64_t left_ = 0;  // bytes of the body to come, once the head is complete
  HttpEnd end_;
};

}  // namespace gdsdata
