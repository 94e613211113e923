// A request to a server, and what receives the response.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backend/curl_api.h"
#include "backend/http_head.h"
#include "base/error.h"

namespace gdsdata {

struct HttpRequest {
  std::string method = "GET";
  std::string url;
  std::vector<std::string> headers;  // "Name: value"
  std::span<const std::byte> body;   // sent if the method is PUT or POST; lives until the end
  bool fresh_connection = false;     // none that was used before
  std::chrono::milliseconds connect_timeout{10'000};
  std::chrono::milliseconds timeout{0};  // of the whole exchange; 0: none
};

// How an exchange ended. Without an error, the response is complete. No redirect is followed.
struct HttpEnd {
  int code = 0;         // CurlApi::Code
  std::string reason;   // of an error, for people
  int system_errno = 0;
  std::string redirect_url = {};  // absolute; empty: the response is no redirect
  std::optional<Error> thrown = {};  // by the receiver, or without memory for the response
};

// Receives one response, on the reactor's thread. No method may block. An exception of `take_head`
// or `take_body` ends the exchange.
class HttpReceiver {
 public:
  virtual ~HttpReceiver() = default;
  // The final head, before the first byte of the body. Returns false to end the exchange.
  virtual bool take_head(HttpHead head) = 0;
  virtual bool take_body(std::span<const std::byte> bytes) = 0;
  // Memory into which the next bytes of the body may be received. `take_body` then gets a part of
  // it, from its beginning on. Empty: there is none.
  virtual std::span<std::byte> body_memory() { return {}; }
  // The last call. The receiver may be destroyed in it. Not called after `cancel`.
  virtual void ended(const HttpEnd& end) noexcept = 0;
};

}  // namespace gdsdata
