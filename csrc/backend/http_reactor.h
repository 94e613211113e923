// One thread that keeps many HTTP exchanges in flight, by libcurl's multi interface.
//
//   any thread --post--> tasks --> the reactor's thread: start, cancel, at
//                                     libcurl --> HttpReceiver: head, body, end
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "backend/curl_api.h"
#include "backend/http_head.h"
#include "backend/socket_poll.h"
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
  // The last call. The receiver may be destroyed in it. Not called after `cancel`.
  virtual void ended(const HttpEnd& end) noexcept = 0;
};

class HttpReactor {
 public:
  using Clock = std::chrono::steady_clock;
  using Task = std::function<void()>;

  // Throws Failure (kUnavailable) without libcurl.
  explicit HttpReactor(size_t most_connections);
  ~HttpReactor();
  HttpReactor(const HttpReactor&) = delete;
  HttpReactor& operator=(const HttpReactor&) = delete;

  // Runs a task on the reactor's thread, and drops an exception of it. Any thread may call it.
  // After `stop`, it does nothing.
  void post(Task task);
  // Ends the thread. Exchanges in flight, tasks and timers are dropped. The reactor's own thread
  // must not call it.
  void stop();
  bool stopped() const { return stopped_.load(std::memory_order_acquire); }

  // --- On the reactor's thread alone ---

  using Exchange = uint64_t;
  static constexpr Exchange kNone = 0;
  // Returns kNone if libcurl refuses it; `receiver` then gets no call. Throws without memory.
  Exchange start(HttpRequest request, HttpReceiver& receiver);
  void cancel(Exchange exchange);
  using Timer = std::pair<Clock::time_point, uint64_t>;
  Timer at(Clock::time_point time, Task task);
  void drop(const Timer& timer);  // which may have ended

  // The exchanges that opened a connection, for tests.
  uint64_t connections_made() const { return connections_made_.load(std::memory_order_relaxed); }

 private:
  struct Transfer;
  void run();
  void run_tasks();
  std::chrono::milliseconds run_timers();
  void take_results();
  template <typename Call>
  static size_t guarded(Transfer& transfer, size_t failure, Call call) noexcept;
  static size_t on_header(char* data, size_t size, size_t count, void* transfer);
  static size_t on_body(char* data, size_t size, size_t count, void* transfer);
  static size_t on_read(char* data, size_t size, size_t count, void* transfer);
  static int on_seek(void* transfer, int64_t offset, int origin);
  static int on_socket(CurlApi::Easy easy, int socket, int watch, void* reactor, void* unused);
  static int on_timer(CurlApi::Multi multi, long timeout_ms, void* reactor);

  const CurlApi& curl_;
  CurlApi::Multi multi_ = nullptr;
  const size_t most_connections_;
  const std::string certificates_;  // of the environment, a file or a folder; empty: libcurl's own
  bool has_certificate_folder_ = false;
  std::unordered_map<Exchange, std::unique_ptr<Transfer>> transfers_;
  std::vector<CurlApi::Easy> spare_;  // at most most_connections_, for which it has memory
  Exchange last_ = kNone;
  std::map<Timer, Task> timers_;
  uint64_t last_timer_ = 0;
  SocketPoll sockets_;
  std::optional<Clock::time_point> curl_due_;  // when libcurl wants to be called, whatever its sockets do
  std::atomic<uint64_t> connections_made_{0};
  std::atomic<bool> stopped_{false};

  std::mutex mutex_;  // guards the next two
  std::vector<Task> tasks_;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace gdsdata
