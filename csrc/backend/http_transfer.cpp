#include "backend/http_transfer.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>

#include "tuning.h"

namespace gdsdata {

void HttpReactor::Transfer::take_handle() {
  if (easy != nullptr) return;
  if (reactor.spare_.empty()) {
    easy = reactor.curl_.easy_init();
    if (easy == nullptr) throw std::bad_alloc();
  } else {
    easy = reactor.spare_.back();
    reactor.spare_.pop_back();
  }
}

bool HttpReactor::Transfer::add_handle() {
  is_in_multi = reactor.curl_.multi_add_handle(reactor.multi_, easy) == 0;
  return is_in_multi;
}

bool HttpReactor::Transfer::enter_libcurl() {
  take_handle();
  set_up_connection();
  set_up_exchange();
  return add_handle();
}

bool HttpReactor::Transfer::open_connection() {
  take_handle();
  set_up_connection();
  set(CurlApi::kConnectOnly, 1L);
  is_connecting = true;
  return add_handle();
}

// libcurl closes its own descriptor when it loses the handle (CurlApi::closes_with_handle).
Descriptor HttpReactor::Transfer::take_socket(int& system_errno) {
  int socket = CurlApi::kNoSocket;
  reactor.curl_.easy_getinfo(easy, CurlApi::kActiveSocket, &socket);
  // Without a socket, the server has closed the connection since.
  errno = ENOTCONN;
  Descriptor own(socket == CurlApi::kNoSocket ? CurlApi::kNoSocket : reactor.open_descriptor([&] {
    return ::fcntl(socket, F_DUPFD_CLOEXEC, 0);
  }));
  system_errno = own.get() < 0 ? errno : 0;
  note_connections();
  leave_libcurl();
  return own;
}

void HttpReactor::Transfer::leave_libcurl() noexcept {
  if (is_in_multi) reactor.curl_.multi_remove_handle(reactor.multi_, easy);
  is_in_multi = is_connecting = false;
  reactor.curl_.slist_free_all(std::exchange(headers, nullptr));
  if (easy == nullptr) return;
  if (reactor.spare_.size() < reactor.most_connections_) {
    reactor.curl_.easy_reset(easy);
    reactor.spare_.push_back(easy);
  } else {
    reactor.curl_.easy_cleanup(easy);
  }
  easy = nullptr;
}

void HttpReactor::Transfer::add_header(const std::string& line) {
  CurlApi::List* const longer = reactor.curl_.slist_append(headers, line.c_str());
  if (longer == nullptr) throw std::bad_alloc();
  headers = longer;
}

void HttpReactor::Transfer::set_up_connection() {
  set(CurlApi::kPrivate, this);
  set(CurlApi::kUrl, request.url.c_str());
  set(CurlApi::kNoSignal, 1L);
  // Else the end of an exchange waits for a lookup of its host, and all others with it. libcurl
  // before 7.87 does not have this option.
  set(CurlApi::kQuickExit, 1L);
  set(CurlApi::kFreshConnect, request.fresh_connection ? 1L : 0L);
  set(CurlApi::kHttpVersion, CurlApi::kHttp11);  // one connection a range: HTTP/2 would put all on one
  set(CurlApi::kPathAsIs, 1L);                   // a key may have "/../" in it
  set(CurlApi::kProtocols, CurlApi::kHttp | CurlApi::kHttps);
  set(CurlApi::kDnsShuffleAddresses, 1L);
  set(CurlApi::kTcpKeepAlive, 1L);
  set(CurlApi::kConnectTimeoutMs, static_cast<long>(request.connect_timeout.count()));
  set(CurlApi::kErrorBuffer, error);
  set(CurlApi::kOpenSocketFunction, &Transfer::on_open_socket);
  set(CurlApi::kOpenSocketData, this);
  if (!reactor.certificates_.empty()) {
    set(reactor.has_certificate_folder_ ? CurlApi::kCaPath : CurlApi::kCaInfo, reactor.certificates_.c_str());
  }
}

void HttpReactor::Transfer::set_up_exchange() {
  for (const std::string& header : request.headers) add_header(header);
  add_header("Expect:");  // else libcurl waits for a second for servers that do not know it
  set(CurlApi::kHttpHeader, headers);
  set(CurlApi::kHttpContentDecoding, 0L);  // ranges are of the bytes as they are stored
  set(CurlApi::kBufferSize, static_cast<long>(tuning::kHttpBufferBytes));
  set(CurlApi::kTimeoutMs, static_cast<long>(request.timeout.count()));
  set(CurlApi::kHeaderFunction, &Transfer::on_header);
  set(CurlApi::kHeaderData, this);
  set(CurlApi::kWriteFunction, &Transfer::on_body);
  set(CurlApi::kWriteData, this);
  if (request.method == "HEAD") {
    set(CurlApi::kNoBody, 1L);
  } else if (request.method == "PUT" || request.method == "POST") {
    set(CurlApi::kUpload, 1L);
    set(CurlApi::kReadFunction, &Transfer::on_read);
    set(CurlApi::kReadData, this);
    set(CurlApi::kSeekFunction, &Transfer::on_seek);
    set(CurlApi::kSeekData, this);
    set(CurlApi::kInFileSize, static_cast<int64_t>(request.body.size()));
    set(CurlApi::kUploadBufferSize, static_cast<long>(tuning::kHttpBufferBytes));
    if (request.method == "POST") set(CurlApi::kCustomRequest, "POST");
  } else if (request.method != "GET") {
    set(CurlApi::kCustomRequest, request.method.c_str());
  }
}

void HttpReactor::Transfer::note_connections() noexcept {
  long number = 0;
  if (reactor.curl_.easy_getinfo(easy, CurlApi::kConnectionsMade, &number) == 0)
    reactor.connections_made_ += static_cast<uint64_t>(number);
}

// libcurl reads names of hosts and certificates from files and sockets that it opens itself, and
// does not say why it cannot.
bool HttpReactor::Transfer::may_lack_descriptors(int code) const {
  const bool opens_others =
      code == CurlApi::kNoAddress || code == CurlApi::kNoProxyAddress || code == CurlApi::kBadCertificateFile;
  return lacked_descriptors || (opens_others && !reactor.finds_descriptors());
}

bool HttpReactor::Transfer::deliver_head() {
  if (!head_taken) {
    head_taken = true;
    refused = !receiver.take_head(std::move(head));
  }
  return !refused;
}

HttpEnd HttpReactor::Transfer::end(int code) noexcept {
  const CurlApi& curl = reactor.curl_;
  HttpEnd end;
  end.code = code;
  try {
    note_connections();
    const char* redirect_url = nullptr;
    if (curl.easy_getinfo(easy, CurlApi::kRedirectUrl, &redirect_url) == 0 && redirect_url != nullptr)
      end.redirect_url = redirect_url;
    // A response without a body, or a refusal whose body was cut: its status says enough.
    if (code == CurlApi::kOk || (head.is_complete && head.status >= 300)) deliver_head();
    if (code != CurlApi::kOk) {
      long number = 0;
      end.reason = error[0] != '\0' ? error : curl.easy_strerror(code);
      if (curl.easy_getinfo(easy, CurlApi::kOsErrno, &number) == 0) end.system_errno = static_cast<int>(number);
      if (may_lack_descriptors(code)) {
        end.system_errno = EMFILE;
        end.reason = std::string("no connection can be opened: ") + std::strerror(EMFILE);
      }
    }
  } catch (...) {
    thrown = current_error();
  }
  if (thrown) {
    end.thrown = std::move(thrown);
    end.code = CurlApi::kWriteError;
  }
  return end;
}

// libcurl is C: no exception may pass through it. Returns `failure` in the place of one.
template <typename Call>
auto HttpReactor::Transfer::guarded(Transfer& transfer, decltype(std::declval<Call>()()) failure, Call call) noexcept {
  try {
    return call();
  } catch (...) {
    transfer.thrown = current_error();
    return failure;
  }
}

size_t HttpReactor::Transfer::on_header(char* data, size_t size, size_t count, void* user) {
  auto& transfer = *static_cast<Transfer*>(user);
  return guarded(transfer, size_t{0}, [&] {
    transfer.head.add_line({data, size * count});
    return size * count;
  });
}

size_t HttpReactor::Transfer::on_body(char* data, size_t size, size_t count, void* user) {
  auto& transfer = *static_cast<Transfer*>(user);
  const size_t bytes = size * count, failure = bytes + 1;  // another number ends the exchange
  return guarded(transfer, failure, [&] {
    if (!transfer.deliver_head()) return failure;
    if (bytes == 0) return bytes;
    transfer.refused = !transfer.receiver.take_body({reinterpret_cast<const std::byte*>(data), bytes});
    return transfer.refused ? failure : bytes;
  });
}

size_t HttpReactor::Transfer::on_read(char* data, size_t size, size_t count, void* user) {
  auto& transfer = *static_cast<Transfer*>(user);
  const std::span<const std::byte> body = transfer.request.body;
  const size_t bytes = std::min(size * count, body.size() - transfer.sent);
  std::memcpy(data, body.data() + transfer.sent, bytes);
  transfer.sent += bytes;
  return bytes;
}

int HttpReactor::Transfer::on_open_socket(void* user, int, CurlApi::Address* address) {
  auto& transfer = *static_cast<Transfer*>(user);
  return guarded(transfer, CurlApi::kNoSocket, [&] {
    const auto open = [&] { return ::socket(address->family, address->type | SOCK_CLOEXEC, address->protocol); };
    const int socket = transfer.reactor.open_descriptor(open);
    transfer.lacked_descriptors = socket < 0 && is_out_of_descriptors(errno);
    return socket;
  });
}

// libcurl sends the body again if the server had closed a kept connection.
int HttpReactor::Transfer::on_seek(void* user, int64_t offset, int origin) {
  auto& transfer = *static_cast<Transfer*>(user);
  if (origin != SEEK_SET || offset < 0 || static_cast<uint64_t>(offset) > transfer.request.body.size()) return 1;
  transfer.sent = static_cast<size_t>(offset);
  return 0;
}

}  // namespace gdsdata
