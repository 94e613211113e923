#include "backend/http_reactor.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/error.h"
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

struct HttpReactor::Transfer {
  HttpRequest request;
  HttpReceiver* receiver = nullptr;
  CurlApi::Easy easy = nullptr;
  CurlApi::List* headers = nullptr;
  HttpHead head;
  bool head_taken = false;
  bool refused = false;  // the receiver wants no more
  size_t sent = 0;
  char error[CurlApi::kErrorBytes] = {};

  // Returns false if the receiver ends the exchange.
  bool give_head() {
    if (!head_taken) {
      head_taken = true;
      refused = !receiver->take_head(head);
    }
    return !refused;
  }
};

HttpReactor::HttpReactor(size_t most_connections)
    : curl_(libcurl()), most_connections_(most_connections), certificates_(certificates_of_environment()) {
  multi_ = curl_.multi_init();
  if (multi_ == nullptr) throw Failure({ErrorCode::kUnavailable, "libcurl has no memory for a handle"});
  // Idle connections above this number are closed. The default depends on the number of transfers
  // so far, and closes connections that the next requests need.
  curl_.multi_setopt(multi_, CurlApi::kMaxConnects, static_cast<long>(most_connections_));
  curl_.multi_setopt(multi_, CurlApi::kSocketFunction, &HttpReactor::on_socket);
  curl_.multi_setopt(multi_, CurlApi::kSocketData, this);
  curl_.multi_setopt(multi_, CurlApi::kTimerFunction, &HttpReactor::on_timer);
  curl_.multi_setopt(multi_, CurlApi::kTimerData, this);
  thread_ = std::thread([this] { run(); });
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
  while (!transfers_.empty()) cancel(transfers_.begin()->first);
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

void HttpReactor::run() {
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
  for (Task& task : tasks) task();
}

// Returns how long the next timer waits.
std::chrono::milliseconds HttpReactor::run_timers() {
  while (!timers_.empty() && timers_.begin()->first.first <= Clock::now()) {
    const Task task = std::move(timers_.extract(timers_.begin()).mapped());
    task();
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
  auto transfer = std::make_unique<Transfer>();
  if (spare_.empty()) {
    transfer->easy = curl_.easy_init();
  } else {
    transfer->easy = spare_.back();
    spare_.pop_back();
  }
  if (transfer->easy == nullptr) return kNone;
  transfer->request = std::move(request);
  transfer->receiver = &receiver;
  set_up(*transfer);
  if (curl_.multi_add_handle(multi_, transfer->easy) != 0) {
    recycle(std::move(transfer));
    return kNone;
  }
  const Exchange exchange = ++last_;
  by_easy_[transfer->easy] = exchange;
  transfers_.emplace(exchange, std::move(transfer));
  return exchange;
}

void HttpReactor::set_up(Transfer& transfer) {
  const HttpRequest& request = transfer.request;
  CurlApi::Easy easy = transfer.easy;
  const auto set = [&](CurlApi::Option option, auto value) { curl_.easy_setopt(easy, option, value); };
  for (const std::string& header : request.headers) {
    transfer.headers = curl_.slist_append(transfer.headers, header.c_str());
  }
  // Else libcurl waits for a second for servers that do not know it.
  transfer.headers = curl_.slist_append(transfer.headers, "Expect:");
  set(CurlApi::kUrl, request.url.c_str());
  set(CurlApi::kHttpHeader, transfer.headers);
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
  set(CurlApi::kErrorBuffer, transfer.error);
  set(CurlApi::kHeaderFunction, &HttpReactor::on_header);
  set(CurlApi::kHeaderData, &transfer);
  set(CurlApi::kWriteFunction, &HttpReactor::on_body);
  set(CurlApi::kWriteData, &transfer);
  if (!certificates_.empty()) set(CurlApi::kCaInfo, certificates_.c_str());
  if (request.method == "HEAD") {
    set(CurlApi::kNoBody, 1L);
  } else if (request.method == "PUT" || request.method == "POST") {
    set(CurlApi::kUpload, 1L);
    set(CurlApi::kReadFunction, &HttpReactor::on_read);
    set(CurlApi::kReadData, &transfer);
    set(CurlApi::kSeekFunction, &HttpReactor::on_seek);
    set(CurlApi::kSeekData, &transfer);
    set(CurlApi::kInFileSize, static_cast<int64_t>(request.body.size()));
    set(CurlApi::kUploadBufferSize, static_cast<long>(tuning::kHttpBufferBytes));
    if (request.method == "POST") set(CurlApi::kCustomRequest, "POST");
  } else if (request.method != "GET") {
    set(CurlApi::kCustomRequest, request.method.c_str());
  }
}

void HttpReactor::cancel(Exchange exchange) {
  const auto found = transfers_.find(exchange);
  if (found == transfers_.end()) return;
  auto transfer = std::move(found->second);
  transfers_.erase(found);
  by_easy_.erase(transfer->easy);
  curl_.multi_remove_handle(multi_, transfer->easy);
  recycle(std::move(transfer));
}

void HttpReactor::recycle(std::unique_ptr<Transfer> transfer) {
  curl_.easy_reset(transfer->easy);
  curl_.slist_free_all(transfer->headers);
  if (spare_.size() < most_connections_) {
    spare_.push_back(transfer->easy);
  } else {
    curl_.easy_cleanup(transfer->easy);
  }
}

void HttpReactor::take_results() {
  int queued = 0;
  while (const CurlApi::Message* message = curl_.multi_info_read(multi_, &queued)) {
    if (message->what != CurlApi::kDone) continue;
    const CurlApi::Easy easy = message->easy;
    HttpEnd end;
    end.code = message->result;
    const auto found = transfers_.find(by_easy_.at(easy));
    auto transfer = std::move(found->second);
    transfers_.erase(found);
    by_easy_.erase(easy);
    long number = 0;
    if (curl_.easy_getinfo(easy, CurlApi::kConnectionsMade, &number) == 0)
      connections_made_ += static_cast<uint64_t>(number);
    const char* redirect_url = nullptr;
    if (curl_.easy_getinfo(easy, CurlApi::kRedirectUrl, &redirect_url) == 0 && redirect_url != nullptr)
      end.redirect_url = redirect_url;
    if (end.code != CurlApi::kOk) {
      end.reason = transfer->error[0] != '\0' ? transfer->error : curl_.easy_strerror(end.code);
      if (curl_.easy_getinfo(easy, CurlApi::kOsErrno, &number) == 0) end.system_errno = static_cast<int>(number);
    }
    HttpReceiver& receiver = *transfer->receiver;
    if (end.code == CurlApi::kOk) transfer->give_head();  // a response without a body
    curl_.multi_remove_handle(multi_, easy);
    recycle(std::move(transfer));
    receiver.ended(end);
  }
}

size_t HttpReactor::on_header(char* data, size_t size, size_t count, void* transfer) {
  static_cast<Transfer*>(transfer)->head.add_line({data, size * count});
  return size * count;
}

size_t HttpReactor::on_body(char* data, size_t size, size_t count, void* user) {
  auto& transfer = *static_cast<Transfer*>(user);
  const size_t bytes = size * count;
  if (!transfer.give_head()) return 0;
  if (bytes == 0) return 0;
  transfer.refused = !transfer.receiver->take_body({reinterpret_cast<const std::byte*>(data), bytes});
  return transfer.refused ? bytes + 1 : bytes;  // another number ends the exchange
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
