// An exchange of a reactor, from its start until its end is known. Only http_reactor.cpp and
// http_transfer.cpp include this.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "backend/http_reactor.h"
#include "backend/plain_exchange.h"

namespace gdsdata {

// libcurl has the exchange, or opens a connection for it, or its bytes come from `plain`.
struct HttpReactor::Transfer {
  Transfer(HttpReactor& owner, HttpRequest asked, HttpReceiver& takes, Exchange number)
      : reactor(owner), request(std::move(asked)), receiver(takes), exchange(number) {}
  ~Transfer() { leave_libcurl(); }
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // Each returns false if libcurl refuses it, and throws without memory.
  bool enter_libcurl();
  bool open_connection();
  bool connects() const { return is_connecting; }
  // The connection that libcurl has opened, once it has. Without one, `system_errno` says why.
  Descriptor take_socket(int& system_errno);
  void leave_libcurl() noexcept;
  HttpEnd end(int code) noexcept;

  HttpReactor& reactor;
  const HttpRequest request;
  HttpReceiver& receiver;
  const Exchange exchange;
  std::string origin;  // for `plain`
  std::optional<PlainExchange> plain;

 private:
  void take_handle();
  void set_up_connection();
  void set_up_exchange();
  bool add_handle();
  void add_header(const std::string& line);
  void note_connections() noexcept;
  // Returns false if the receiver ends the exchange.
  bool deliver_head();
  template <typename Value>
  void set(CurlApi::Option option, Value value) {
    reactor.curl_.easy_setopt(easy, option, value);
  }
  template <typename Call>
  static auto guarded(Transfer& transfer, decltype(std::declval<Call>()()) failure, Call call) noexcept;
  bool may_lack_descriptors(int code) const;
  static size_t on_header(char* data, size_t size, size_t count, void* transfer);
  static size_t on_body(char* data, size_t size, size_t count, void* transfer);
  static size_t on_read(char* data, size_t size, size_t count, void* transfer);
  static int on_open_socket(void* transfer, int purpose, CurlApi::Address* address);
  static int on_seek(void* transfer, int64_t offset, int origin);

  CurlApi::Easy easy = nullptr;
  CurlApi::List* headers = nullptr;
  bool is_in_multi = false;
  bool is_connecting = false;
  HttpHead head;
  bool head_taken = false;
  bool refused = false;  // the receiver wants no more
  size_t sent = 0;
  bool lacked_descriptors = false;  // for a socket
  std::optional<Error> thrown;
  char error[CurlApi::kErrorBytes] = {};
};

}  // namespace gdsdata
