// One thread that keeps many HTTP exchanges in flight.
//
//   any thread --post--> tasks --> the reactor's thread: start, cancel, at
//                                     libcurl, or PlainExchange --> HttpReceiver: head, body, end
//
// libcurl's multi interface opens all connections, and exchanges requests over those with TLS. Most
// GETs without TLS are PlainExchanges.
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
#include <unordered_set>
#include <utility>
#include <vector>

#include "backend/curl_api.h"
#include "backend/http_receiver.h"
#include "backend/plain_connections.h"
#include "backend/plain_exchange.h"
#include "backend/socket_poll.h"

namespace gdsdata {

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
  // Passes on bytes of a body that have come, even if they are too few to wake the reactor.
  void take_waiting(Exchange exchange);
  using Timer = std::pair<Clock::time_point, uint64_t>;
  Timer at(Clock::time_point time, Task task);
  void drop(const Timer& timer);  // which may have ended

  // The exchanges that opened a connection, for tests.
  uint64_t connections_made() const { return connections_made_.load(std::memory_order_relaxed); }

 private:
  struct Transfer;
  int open_descriptor(const std::function<int()>& open);
  bool finds_descriptors();
  bool begin(Transfer& transfer);
  PlainExchange::State begin_plain(Transfer& transfer, PlainConnection connection);
  void take_connection(Transfer& transfer);
  void react(const SocketPoll::Ready& ready);
  void settle(Transfer& transfer, PlainExchange::State state);
  template <typename Step>
  void guard(Transfer& transfer, Step step) noexcept;
  void drop_plain(Transfer& transfer) noexcept;
  void finish(Transfer& transfer, const HttpEnd& end) noexcept;
  void forget(Transfer& transfer) noexcept;
  void run();
  void run_tasks();
  std::chrono::milliseconds run_timers();
  void take_results();
  static int on_socket(CurlApi::Easy easy, int socket, int watch, void* reactor, void* unused);
  static int on_timer(CurlApi::Multi multi, long timeout_ms, void* reactor);

  const CurlApi& curl_;
  CurlApi::Multi multi_ = nullptr;
  const size_t most_connections_;
  const std::string certificates_;  // of the environment, a file or a folder; empty: libcurl's own
  bool has_certificate_folder_ = false;
  SocketPoll sockets_;
  PlainConnections idle_;
  std::unique_ptr<std::byte[]> scratch_;  // kHttpBufferBytes, for exchanges without TLS
  std::unordered_set<std::string> origins_of_libcurl_;  // origins whose responses libcurl has to read
  std::unordered_map<Exchange, std::unique_ptr<Transfer>> transfers_;
  std::unordered_map<int, Transfer*> by_socket_;  // those without TLS
  std::vector<CurlApi::Easy> spare_;  // at most most_connections_, for which it has memory
  Exchange last_ = kNone;
  std::map<Timer, Task> timers_;
  uint64_t last_timer_ = 0;
  std::optional<Clock::time_point> curl_due_;  // when libcurl wants to be called, whatever its sockets do
  std::atomic<uint64_t> connections_made_{0};
  std::atomic<bool> stopped_{false};

  std::mutex mutex_;  // guards the next two
  std::vector<Task> tasks_;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace gdsdata
