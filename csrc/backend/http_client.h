// The HTTP client of a process: its reactors, and how many requests each host gets at a time.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "backend/http_reactor.h"
#include "tuning.h"

namespace gdsdata {

struct HttpOptions {
  // Requests for ranges in flight. A host that has none may have one beyond them.
  size_t connections = tuning::kHttpConnections;
  size_t reactors = 0;                            // threads; 0: by the number of processors
  std::chrono::milliseconds connect_timeout{5'000};
  std::chrono::milliseconds stall_timeout{10'000};  // without a byte, an exchange is begun anew
  // From a range's first request on. After it, nothing is tried again. A response whose bytes
  // still arrive goes on.
  std::chrono::milliseconds deadline{120'000};
  std::chrono::milliseconds least_backoff{100}, most_backoff{10'000};
  bool hedge = true;  // ask once more for the ranges that are slowest to begin
};

// Counters of a process. Any thread may read them.
struct HttpStatistics {
  std::atomic<uint64_t> requests{0}, retries{0}, throttled{0}, hedges{0}, bytes{0};
};

class HttpWindow;

// The requests of one reactor to all hosts.
class HttpRoom {
 public:
  explicit HttpRoom(size_t most) : most_(most) {}
  size_t in_flight() const { return in_flight_; }

 private:
  friend class HttpWindow;
  bool is_full() const { return in_flight_ >= most_; }
  void begin_waiting();

  const size_t most_;
  size_t in_flight_ = 0;
  size_t waiting_ = 0;
  std::vector<HttpWindow*> windows_;  // they take turns
  size_t last_ = 0;                   // whose turn was last
  bool is_beginning_ = false;         // `begin_waiting` is on the stack
};

// The requests to one host from one reactor: additive increase, multiplicative decrease. A request
// also needs a place in the room, unless it is the only one to its host: so a host that stalls does
// not hold up another.
class HttpWindow {
 public:
  HttpWindow(HttpRoom& room, size_t most);
  // Calls `start` at once, or when another request has left. It must not throw.
  void enter(HttpReactor::Task start);
  // Returns false if there is no room now.
  bool try_enter();
  // Each call of `start`, and each true of `try_enter`, ends in one call of this.
  void leave(bool throttled);
  size_t limit() const { return limit_; }
  size_t in_flight() const { return in_flight_; }

 private:
  friend class HttpRoom;
  bool begin_one_waiting();  // returns false if none waits, or may begin

  HttpRoom& room_;
  const size_t most_;
  size_t limit_;
  size_t in_flight_ = 0;
  size_t since_change_ = 0;   // requests that left since the limit changed
  size_t from_before_ = 0;    // requests in flight that began before the limit last fell
  std::deque<HttpReactor::Task> waiting_;
};

// How long a response takes to begin, over the last requests. Says which ones are slow.
class FirstByteTimes {
 public:
  void add(std::chrono::microseconds time);
  // A request that has not begun by then is among the slowest percent. Nothing: not known yet.
  std::optional<std::chrono::microseconds> slow() const { return slow_; }

 private:
  std::vector<std::chrono::microseconds> times_;  // a ring
  size_t next_ = 0;
  std::optional<std::chrono::microseconds> slow_;
};

// A reactor, and the state that only its thread uses.
struct HttpShard {
  explicit HttpShard(size_t connections) : most(connections), room(connections), reactor(connections) {}
  HttpWindow& window_of(std::string_view url);

  const size_t most;
  HttpRoom room;
  std::map<std::string, HttpWindow, std::less<>> windows;  // by host
  FirstByteTimes first_bytes;
  uint64_t started = 0, hedged = 0;
  std::minstd_rand random{std::random_device{}()};  // of pauses: processes must not keep the same ones
  HttpReactor reactor;  // the last member: its thread ends first
};

class HttpClient {
 public:
  // Throws Failure (kUnavailable) without libcurl.
  explicit HttpClient(const HttpOptions& options);
  HttpShard& next_shard() { return *shards_[next_.fetch_add(1, std::memory_order_relaxed) % shards_.size()]; }
  const HttpOptions& options() const { return options_; }
  HttpStatistics& statistics() { return statistics_; }
  uint64_t connections_made() const;
  void stop();  // requests in flight never complete

 private:
  const HttpOptions options_;
  HttpStatistics statistics_;
  std::vector<std::unique_ptr<HttpShard>> shards_;
  std::atomic<size_t> next_{0};
};

// The client of this process, made at the first call. Throws Failure: kUnavailable without libcurl,
// kClosed after `close_http_client`.
std::shared_ptr<HttpClient> http_client();
// Replaces it: later requests go by these options, and those of children that are forked later.
void configure_http_client(const HttpOptions& options);
// Ends its threads. Requests in flight never complete. For the end of the program.
void close_http_client();

}  // namespace gdsdata
