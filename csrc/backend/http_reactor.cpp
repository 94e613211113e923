#include "backend/http_reactor.h"

#include <signal.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "backend/http_transfer.h"
#include "base/thread_name.h"
#include "tuning.h"

namespace gdsdata {

namespace {

constexpr std::chrono::milliseconds kLongestPoll{1000};
// The connection, two to wake the thread that looks its host up, and a file or a socket of that.
constexpr size_t kDescriptorsOfConnection = 4;
// Origins whose responses libcurl has to read, at most: a server may name any number by redirects.
constexpr size_t kMostOriginsOfLibcurl = 1024;

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

HttpReactor::HttpReactor(size_t most_connections)
    : curl_(libcurl()),
      most_connections_(most_connections),
      certificates_(certificates_of_environment()),
      idle_(most_connections) {
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
  idle_.clear();
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
  name_this_thread("gdsdata-http");
  // A TLS library writes to connections that the server has closed. libcurl leaves the signal to
  // its caller, because of kNoSignal.
  sigset_t pipe;
  ::sigemptyset(&pipe);
  ::sigaddset(&pipe, SIGPIPE);
  ::pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
  for (;;) {
    run_tasks();
    if (curl_due_ && *curl_due_ <= Clock::now()) {
      int running = 0;
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
    for (const SocketPoll::Ready& ready : sockets_.wait(patience)) react(ready);
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

// As the function of that name (descriptors.h), but it closes idle connections too. It never waits,
// because that would hold up all exchanges.
int HttpReactor::open_descriptor(const std::function<int()>& open) {
  int fd = -1, reason = 0;
  do {
    fd = gdsdata::open_descriptor(open, WhenTaken::kGiveUp);
    reason = errno;
  } while (fd < 0 && is_out_of_descriptors(reason) && idle_.close_one());
  errno = reason;
  return fd;
}

// Returns false if fewer descriptors were left than a connection may need. Idle files and
// connections were closed then, if there are any.
bool HttpReactor::finds_descriptors() {
  std::array<Descriptor, kDescriptorsOfConnection> found;
  bool had_all = true;
  for (Descriptor& one : found) {
    one = Descriptor(open_descriptor([&] {
      const int fd = ::eventfd(0, EFD_CLOEXEC);
      had_all = had_all && fd >= 0;
      return fd;
    }));
  }
  return had_all;
}

HttpReactor::Exchange HttpReactor::start(HttpRequest request, HttpReceiver& receiver) {
  if (std::this_thread::get_id() != thread_.get_id()) return kNone;  // it has stopped
  const Exchange exchange = ++last_;
  auto made = std::make_unique<Transfer>(*this, std::move(request), receiver, exchange);
  Transfer& transfer = *(transfers_[exchange] = std::move(made));
  try {
    if (begin(transfer)) return exchange;
  } catch (...) {
    forget(transfer);
    throw;
  }
  forget(transfer);
  return kNone;
}

// Returns false if libcurl refuses it. Does not call the receiver.
bool HttpReactor::begin(Transfer& transfer) {
  transfer.origin = plain_origin(transfer.request);
  const bool is_plain =
      curl_.closes_with_handle && !transfer.origin.empty() && !origins_of_libcurl_.contains(transfer.origin);
  if (!is_plain) return transfer.enter_libcurl();
  while (!transfer.request.fresh_connection) {
    auto connection = idle_.take(transfer.origin);
    if (!connection) break;
    if (begin_plain(transfer, std::move(*connection)) != PlainExchange::State::kStale) return true;
    drop_plain(transfer);
  }
  return transfer.open_connection();
}

PlainExchange::State HttpReactor::begin_plain(Transfer& transfer, PlainConnection connection) {
  if (scratch_ == nullptr) scratch_ = std::make_unique_for_overwrite<std::byte[]>(tuning::kHttpBufferBytes);
  transfer.plain.emplace(std::move(connection), transfer.request, transfer.receiver,
                         std::span(scratch_.get(), tuning::kHttpBufferBytes));
  by_socket_[transfer.plain->socket()] = &transfer;
  return transfer.plain->begin();
}

void HttpReactor::drop_plain(Transfer& transfer) noexcept {
  by_socket_.erase(transfer.plain->socket());
  transfer.plain.reset();
}

void HttpReactor::cancel(Exchange exchange) {
  const auto found = transfers_.find(exchange);
  if (found != transfers_.end()) forget(*found->second);
}

void HttpReactor::take_waiting(Exchange exchange) {
  const auto found = transfers_.find(exchange);
  if (found == transfers_.end() || !found->second->plain) return;
  Transfer& transfer = *found->second;
  guard(transfer, [&] { settle(transfer, transfer.plain->advance()); });
}

void HttpReactor::forget(Transfer& transfer) noexcept {
  if (transfer.plain) by_socket_.erase(transfer.plain->socket());
  transfers_.erase(transfer.exchange);
}

void HttpReactor::react(const SocketPoll::Ready& ready) {
  if (const auto found = by_socket_.find(ready.socket); found != by_socket_.end()) {
    Transfer& transfer = *found->second;
    return guard(transfer, [&] { settle(transfer, transfer.plain->advance()); });
  }
  if (idle_.close_ready(ready.socket)) return;
  const int events = (ready.readable ? CurlApi::kReadable : 0) | (ready.writable ? CurlApi::kWritable : 0) |
                     (ready.failed ? CurlApi::kFailed : 0);
  int running = 0;
  curl_.multi_socket_action(multi_, ready.socket, events, &running);
}

// Takes a step of an exchange, which ends with what the step throws.
template <typename Step>
void HttpReactor::guard(Transfer& transfer, Step step) noexcept {
  HttpEnd end;
  try {
    return step();
  } catch (...) {
    end.thrown = current_error();
  }
  end.code = CurlApi::kWriteError;
  finish(transfer, end);
}

void HttpReactor::take_connection(Transfer& transfer) {
  int system_errno = 0;
  Descriptor socket = transfer.take_socket(system_errno);
  if (socket.get() < 0) {  // another attempt may get one
    HttpEnd end;
    end.code = CurlApi::kReceiveError;
    end.reason = std::string("the new connection cannot be used: ") + std::strerror(system_errno);
    end.system_errno = system_errno;
    return finish(transfer, end);
  }
  PlainConnection connection{transfer.origin, WatchedSocket(sockets_, std::move(socket))};
  connection.socket.watch(/*reads=*/true, /*writes=*/false);
  settle(transfer, begin_plain(transfer, std::move(connection)));
}

void HttpReactor::settle(Transfer& transfer, PlainExchange::State state) {
  switch (state) {
    case PlainExchange::State::kSending:
    case PlainExchange::State::kReceiving:
      return;
    case PlainExchange::State::kEnded: {
      by_socket_.erase(transfer.plain->socket());
      const HttpEnd end = transfer.plain->take_end();
      auto connection = transfer.plain->take_connection();
      if (connection && !origins_of_libcurl_.contains(transfer.origin)) idle_.keep(std::move(*connection));
      return finish(transfer, end);
    }
    case PlainExchange::State::kStale:
      drop_plain(transfer);
      if (!transfer.open_connection()) throw Failure({ErrorCode::kIo, "libcurl refuses a connection"});
      return;
    case PlainExchange::State::kUnclear:
      drop_plain(transfer);
      if (origins_of_libcurl_.size() >= kMostOriginsOfLibcurl) origins_of_libcurl_.clear();
      origins_of_libcurl_.insert(transfer.origin);
      idle_.close_all(transfer.origin);
      if (!transfer.enter_libcurl()) throw Failure({ErrorCode::kIo, "libcurl refuses the request"});
  }
}

void HttpReactor::finish(Transfer& transfer, const HttpEnd& end) noexcept {
  HttpReceiver& receiver = transfer.receiver;
  forget(transfer);
  receiver.ended(end);
}

void HttpReactor::take_results() {
  int queued = 0;
  while (const CurlApi::Message* message = curl_.multi_info_read(multi_, &queued)) {
    if (message->what != CurlApi::kDone) continue;
    Transfer* ended = nullptr;
    curl_.easy_getinfo(message->easy, CurlApi::kPrivateData, &ended);
    const int result = message->result;
    if (ended->connects() && result == CurlApi::kOk) {
      guard(*ended, [&] { take_connection(*ended); });
    } else {
      finish(*ended, ended->end(result));
    }
  }
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
