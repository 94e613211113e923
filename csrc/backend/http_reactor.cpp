#include "backend/http_reactor.h"

#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <new>
#include <system_error>
#include <utility>

#include "tuning.h"

namespace gdsdata {

namespace {

constexpr std::chrono::milliseconds kLongestPoll{1000};

// The variables that OpenSSL, AWS's tools, requests and curl read, in this order.
std::string certificates_of_environment() {
  for (const char* name : {"SSL_CERT_FILE", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"}) {
    if (const char* value = std::getenv(name); value != nullptr && *value != '\0') return value;
  }
  return "";
}

const CurlApi& libcurl() {
  const CurlApi* curl = CurlApi::get();
  if (curl == nullptr) throw Failure({ErrorCode::kUnavailable, CurlApi::refusal()});
  return *curl;
}

}  // namespace

// An exchange with libcurl's handle for it, from its start until its end is known.
struct HttpReactor::Transfer {
  Transfer(HttpReactor& owner, HttpRequest asked, HttpReceiver& takes)
      : reactor(owner), request(std::move(asked)), receiver(takes) {}
  ~Transfer();
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  void set_up();
  // Returns false if the receiver ends the exchange.
  bool give_head() {
    if (!head_taken) {
      head_taken = true;
      refused = !receiver.take_head(std::move(head));
    }
    return !refused;
  }
  HttpEnd end(int code) noexcept;

  HttpReactor& reactor;
  const HttpRequest request;
  HttpReceiver& receiver;
  CurlApi::Easy easy = nullptr;
  CurlApi::List* headers = nullptr;
  Exchange exchange = kNone;  // once libcurl has it
  HttpHead head;
  bool head_taken = false;
  bool refused = false;  // the receiver wants no more
  size_t sent = 0;
  std::optional<Error> thrown;
  char error[CurlApi::kErrorBytes] = {};

 private:
  void add_header(const std::string& line);
};

HttpReactor::HttpReactor(size_t most_connections)
    : curl_(libcurl()), most_connections_(most_connections), certificates_(certificates_of_environment()) {
  std::error_code unreadable;
  has_certificate_folder_ = std::filesystem::is_directory(certificates_, unreadable);
  multi_ = curl_.multi_init();
  if (multi_ == nullptr) throw Failure({ErrorCode::kUnavailable, "libcurl has no memory for a handle"});
  // Idle connections above this number are closed. The default depends on the number of transfers
  // so far, and closes connections that the next requests need.
  curl_.multi_setopt(multi_, CurlApi::kMaxConnects, static_cast<long>(most_connections_));
  curl_.multi_setopt(multi_, CurlApi::kSocketFunction, &HttpReactor::on_socket);
  curl_.multi_setopt(multi_, CurlApi::kSocketData, this);
  curl_.multi_setopt(multi_, CurlApi::kTimerFunction, &HttpReactor::on_timer);
  curl_.multi_setopt(multi_, CurlApi::kTimerData, this);
  spare_.reserve(most_connections_);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    curl_.multi_cleanup(multi_);
    throw;
  }
}

HttpReactor::~HttpReactor() { stop(); }

void HttpReactor::stop() {
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(ends_, true)) return;
  }
  sockets_.wake();
  thread_.join();
  tasks_.clear();
  timers_.clear();
  transfers_.clear();
  for (CurlApi::Easy easy : spare_) curl_.easy_cleanup(easy);
  spare_.clear();
  curl_.multi_cleanup(multi_);
  stopped_.store(true, std::memory_order_release);
}

void HttpReactor::post(Task task) {
  bool was_empty = false;
  {
    std::lock_guard lock(mutex_);
    if (ends_) return;
    was_empty = tasks_.empty();
    tasks_.push_back(std::move(task));
  }
  if (was_empty) sockets_.wake();
}

namespace {

// Drops what the task throws: tasks catch what others wait for.
void run_task(const HttpReactor::Task& task) noexcept {
  try {
    task();
  } catch (...) {
  }
}

}  // namespace

void HttpReactor::run() {
  // A TLS library writes to connections that the server has closed. libcurl leaves the signal to
  // its caller, because of kNoSignal.
  sigset_t pipe;
  ::sigemptyset(&pipe);
  ::sigaddset(&pipe, SIGPIPE);
  ::pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
  for (;;) {
    run_tasks();
    int running = 0;
    if (curl_due_ && *curl_due_ <= Clock::now()) {
      curl_due_.reset();
      curl_.multi_socket_action(multi_, CurlApi::kNoSocket, 0, &running);
    }
    take_results();
    // The last step, because the others set timers.
    const std::chrono::milliseconds patience = run_timers();
    {
      std::lock_guard lock(mutex_);
      if (ends_) return;
      if (!tasks_.empty()) continue;
    }
    for (const SocketPoll::Ready& ready : sockets_.wait(patience)) {
      const int events = (ready.readable ? CurlApi::kReadable : 0) | (ready.writable ? CurlApi::kWritable : 0) |
                         (ready.failed ? CurlApi::kFailed : 0);
      curl_.multi_socket_action(multi_, ready.socket, events, &running);
    }
  }
}

void HttpReactor::run_tasks() {
  std::vector<Task> tasks;
  {
    std::lock_guard lock(mutex_);
    tasks.swap(tasks_);
  }
  for (const Task& task : tasks) run_task(task);
}

// Returns how long the next timer waits.
std::chrono::milliseconds HttpReactor::run_timers() {
  while (!timers_.empty() && timers_.begin()->first.first <= Clock::now()) {
    const Task task = std::move(timers_.extract(timers_.begin()).mapped());
    run_task(task);
  }
  auto until = Clock::now() + kLongestPoll;
  if (!timers_.empty()) until = std::min(until, timers_.begin()->first.first);
  if (curl_due_) until = std::min(until, *curl_due_);
  return std::max(std::chrono::milliseconds(0), std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()));
}

HttpReactor::Timer HttpReactor::at(Clock::time_point time, Task task) {
  return timers_.emplace(Timer{time, ++last_timer_}, std::move(task)).first->first;
}

void HttpReactor::drop(const Timer& timer) { timers_.erase(timer); }

HttpReactor::Exchange HttpReactor::start(HttpRequest request, HttpReceiver& receiver) {
  if (std::this_thread::get_id() != thread_.get_id()) return kNone;  // it has stopped
  auto made = std::make_unique<Transfer>(*this, std::move(request), receiver);
  made->set_up();
  const Exchange exchange = ++last_;
  Transfer& transfer = *(transfers_[exchange] = std::move(made));
  if (curl_.multi_add_handle(multi_, transfer.easy) != 0) {
    transfers_.erase(exchange);
    return kNone;
  }
  transfer.exchange = exchange;
  return exchange;
}

void HttpReactor::Transfer::add_header(const std::string& line) {
  CurlApi::List* const longer = reactor.curl_.slist_append(headers, line.c_str());
  if (longer == nullptr) throw std::bad_alloc();
  headers = longer;
}

void HttpReactor::Transfer::set_up() {
  if (reactor.spare_.empty()) {
    easy = reactor.curl_.easy_init();
    if (easy == nullptr) throw std::bad_alloc();
  } else {
    easy = reactor.spare_.back();
    reactor.spare_.pop_back();
  }
  const auto set = [&](CurlApi::Option option, auto value) { reactor.curl_.easy_setopt(easy, option, value); };
  for (const std::string& header : request.headers) add_header(header);
  add_header("Expect:");  // else libcurl waits for a second for servers that do not know it
  set(CurlApi::kPrivate, this);
  set(CurlApi::kUrl, request.url.c_str());
  set(CurlApi::kHttpHeader, headers);
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
  set(CurlApi::kHttpContentDecoding, 0L);  // ranges are of the bytes as they are stored
  set(CurlApi::kBufferSize, static_cast<long>(tuning::kHttpBufferBytes));
  set(CurlApi::kConnectTimeoutMs, static_cast<long>(request.connect_timeout.count()));
  set(CurlApi::kTimeoutMs, static_cast<long>(request.timeout.count()));
  set(CurlApi::kErrorBuffer, error);
  set(CurlApi::kHeaderFunction, &HttpReactor::on_header);
  set(CurlApi::kHeaderData, this);
  set(CurlApi::kWriteFunction, &HttpReactor::on_body);
  set(CurlApi::kWriteData, this);
  if (!reactor.certificates_.empty()) {
    set(reactor.has_certificate_folder_ ? CurlApi::kCaPath : CurlApi::kCaInfo, reactor.certificates_.c_str());
  }
  if (request.method == "HEAD") {
    set(CurlApi::kNoBody, 1L);
  } else if (request.method == "PUT" || request.method == "POST") {
    set(CurlApi::kUpload, 1L);
    set(CurlApi::kReadFunction, &HttpReactor::on_read);
    set(CurlApi::kReadData, this);
    set(CurlApi::kSeekFunction, &HttpReactor::on_seek);
    set(CurlApi::kSeekData, this);
    set(CurlApi::kInFileSize, static_cast<int64_t>(request.body.size()));
    set(CurlApi::kUploadBufferSize, static_cast<long>(tuning::kHttpBufferBytes));
    if (request.method == "POST") set(CurlApi::kCustomRequest, "POST");
  } else if (request.method != "GET") {
    set(CurlApi::kCustomRequest, request.method.c_str());
  }
}

HttpReactor::Transfer::~Transfer() {
  if (exchange != kNone) reactor.curl_.multi_remove_handle(reactor.multi_, easy);
  reactor.curl_.slist_free_all(headers);
  if (easy == nullptr) return;
  if (reactor.spare_.size() < reactor.most_connections_) {
    reactor.curl_.easy_reset(easy);
    reactor.spare_.push_back(easy);
  } else {
    reactor.curl_.easy_cleanup(easy);
  }
}

void HttpReactor::cancel(Exchange exchange) { transfers_.erase(exchange); }

void HttpReactor::take_results() {
  int queued = 0;
  while (const CurlApi::Message* message = curl_.multi_info_read(multi_, &queued)) {
    if (message->what != CurlApi::kDone) continue;
    Transfer* ended = nullptr;
    curl_.easy_getinfo(message->easy, CurlApi::kPrivateData, &ended);
    HttpReceiver& receiver = ended->receiver;
    const HttpEnd end = ended->end(message->result);
    transfers_.erase(ended->exchange);
    receiver.ended(end);
  }
}

HttpEnd HttpReactor::Transfer::end(int code) noexcept {
  const CurlApi& curl = reactor.curl_;
  HttpEnd end;
  end.code = code;
  try {
    long number = 0;
    if (curl.easy_getinfo(easy, CurlApi::kConnectionsMade, &number) == 0)
      reactor.connections_made_ += static_cast<uint64_t>(number);
    const char* redirect_url = nullptr;
    if (curl.easy_getinfo(easy, CurlApi::kRedirectUrl, &redirect_url) == 0 && redirect_url != nullptr)
      end.redirect_url = redirect_url;
    // A response without a body, or a refusal whose body was cut: its status says enough.
    if (code == CurlApi::kOk || (head.is_complete && head.status >= 300)) give_head();
    if (code != CurlApi::kOk) {
      end.reason = error[0] != '\0' ? error : curl.easy_strerror(code);
      if (curl.easy_getinfo(easy, CurlApi::kOsErrno, &number) == 0) end.system_errno = static_cast<int>(number);
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
size_t HttpReactor::guarded(Transfer& transfer, size_t failure, Call call) noexcept {
  try {
    return call();
  } catch (...) {
    transfer.thrown = current_error();
    return failure;
  }
}

size_t HttpReactor::on_header(char* data, size_t size, size_t count, void* user) {
  auto& transfer = *static_cast<Transfer*>(user);
  return guarded(transfer, 0, [&] {
    transfer.head.add_line({data, size * count});
    return size * count;
  });
}

size_t HttpReactor::on_body(char* data, size_t size, size_t count, void* user) {
  auto& transfer = *static_cast<Transfer*>(user);
  const size_t bytes = size * count, failure = bytes + 1;  // another number ends the exchange
  return guarded(transfer, failure, [&] {
    if (!transfer.give_head()) return failure;
    if (bytes == 0) return bytes;
    transfer.refused = !transfer.receiver.take_body({reinterpret_cast<const std::byte*>(data), bytes});
    return transfer.refused ? failure : bytes;
  });
}

size_t HttpReactor::on_read(char* data, size_t size, size_t count, void* user) {
  auto& transfer = *static_cast<Transfer*>(user);
  const std::span<const std::byte> body = transfer.request.body;
  const size_t bytes = std::min(size * count, body.size() - transfer.sent);
  std::memcpy(data, body.data() + transfer.sent, bytes);
  transfer.sent += bytes;
  return bytes;
}

// libcurl sends the body again if the server had closed a kept connection.
int HttpReactor::on_seek(void* user, int64_t offset, int origin) {
  auto& transfer = *static_cast<Transfer*>(user);
  if (origin != SEEK_SET || offset < 0 || static_cast<uint64_t>(offset) > transfer.request.body.size()) return 1;
  transfer.sent = static_cast<size_t>(offset);
  return 0;
}

int HttpReactor::on_socket(CurlApi::Easy, int socket, int watch, void* reactor, void*) {
  SocketPoll& sockets = static_cast<HttpReactor*>(reactor)->sockets_;
  if (watch == CurlApi::kForget) {
    sockets.forget(socket);
  } else {
    sockets.watch(socket, (watch & CurlApi::kWatchIn) != 0, (watch & CurlApi::kWatchOut) != 0);
  }
  return 0;
}

// Must not call libcurl.
int HttpReactor::on_timer(CurlApi::Multi, long timeout_ms, void* reactor) {
  auto& due = static_cast<HttpReactor*>(reactor)->curl_due_;
  due = timeout_ms < 0 ? std::nullopt : std::optional(Clock::now() + std::chrono::milliseconds(timeout_ms));
  return 0;
}

}  // namespace gdsdata
