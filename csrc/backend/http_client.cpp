#include "backend/http_client.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/per_process.h"

namespace gdsdata {

namespace {

constexpr size_t kTimesKept = 256, kTimesBetween = 32;
// A request is not slow before this time, however fast the others are.
constexpr std::chrono::microseconds kNeverSlow{50'000};

std::string_view host_of(std::string_view url) {
  const size_t begin = url.find("://");
  if (begin == std::string_view::npos) return url;
  url = url.substr(begin + 3);
  return url.substr(0, url.find_first_of("/?"));
}

size_t reactors_of(const HttpOptions& options) {
  if (options.reactors != 0) return options.reactors;
  return std::clamp<size_t>(std::thread::hardware_concurrency() / tuning::kProcessorsOfReactor, 1,
                            tuning::kMostHttpReactors);
}

// The options of the next client. A forked child has those of its parent, and takes no lock for
// them that a thread of the parent may have held.
std::atomic<const HttpOptions*> configured{nullptr};

struct Current {
  std::mutex mutex;  // guards the members that follow
  std::shared_ptr<HttpClient> client;
  std::vector<std::weak_ptr<HttpClient>> replaced;  // those that still have requests in flight
  std::vector<std::unique_ptr<const HttpOptions>> options;  // all that were configured here
  bool closed = false;
};

// A client may be released last by one of its own threads, which cannot wait for itself.
void end_client(HttpClient* last) noexcept {
  try {
    std::thread([last] { delete last; }).detach();
  } catch (const std::exception&) {  // no thread is available: its own ones stay idle
  }
}

std::shared_ptr<HttpClient> make_client(const HttpOptions& options) { return {new HttpClient(options), end_client}; }

void note_replaced(Current& current) {
  std::erase_if(current.replaced, [](const auto& client) { return client.expired(); });
  if (current.client != nullptr) current.replaced.push_back(current.client);
  current.client.reset();
}

}  // namespace

void HttpRoom::begin_waiting() {
  if (std::exchange(is_beginning_, true)) return;  // a request that began has left: the loop below goes on
  for (size_t refused = 0; waiting_ > 0 && refused < windows_.size();) {
    last_ = (last_ + 1) % windows_.size();
    refused = windows_[last_]->begin_one_waiting() ? 0 : refused + 1;
  }
  is_beginning_ = false;
}

HttpWindow::HttpWindow(HttpRoom& room, size_t most) : room_(room), most_(most), limit_(most) {
  room_.windows_.push_back(this);
}

void HttpWindow::enter(HttpReactor::Task start) {
  if (try_enter()) return start();
  waiting_.push_back(std::move(start));
  ++room_.waiting_;
}

bool HttpWindow::try_enter() {
  if (in_flight_ >= limit_ || (in_flight_ > 0 && room_.is_full())) return false;
  ++in_flight_;
  ++room_.in_flight_;
  return true;
}

void HttpWindow::leave(bool throttled) {
  --in_flight_;
  --room_.in_flight_;
  ++since_change_;
  // Requests that were in flight together are throttled together. They count as one.
  const bool is_from_before = from_before_ > 0;
  if (is_from_before) --from_before_;
  if (throttled) {
    if (!is_from_before) {
      limit_ = std::max<size_t>(1, limit_ / 2);
      since_change_ = 0;
      from_before_ = in_flight_;
    }
  } else if (since_change_ > limit_ && limit_ < most_) {
    ++limit_;
    since_change_ = 0;
  }
  room_.begin_waiting();
}

bool HttpWindow::begin_one_waiting() {
  if (waiting_.empty() || !try_enter()) return false;
  const HttpReactor::Task start = std::move(waiting_.front());
  waiting_.pop_front();
  --room_.waiting_;
  start();
  return true;
}

void FirstByteTimes::add(std::chrono::microseconds time) {
  if (times_.size() < kTimesKept) {
    times_.push_back(time);
  } else {
    times_[next_ % kTimesKept] = time;
  }
  if (++next_ % kTimesBetween != 0) return;
  std::vector<std::chrono::microseconds> sorted = times_;
  std::sort(sorted.begin(), sorted.end());
  const auto slowest = sorted[sorted.size() * 99 / 100], median = sorted[sorted.size() / 2];
  slow_ = std::max({slowest, 3 * median, kNeverSlow});
}

HttpWindow& HttpShard::window_of(std::string_view url) {
  const std::string_view host = host_of(url);
  const auto found = windows.find(host);
  return found != windows.end() ? found->second : windows.try_emplace(std::string(host), room, most).first->second;
}

HttpClient::HttpClient(const HttpOptions& options) : options_(options) {
  const size_t count = std::min(reactors_of(options), std::max<size_t>(1, options.connections));
  const size_t each = options.connections / count, left = options.connections % count;
  for (size_t i = 0; i < count; ++i) {
    shards_.push_back(std::make_unique<HttpShard>(std::max<size_t>(1, each + (i < left ? 1 : 0))));
  }
}

uint64_t HttpClient::connections_made() const {
  uint64_t made = 0;
  for (const auto& shard : shards_) made += shard->reactor.connections_made();
  return made;
}

void HttpClient::stop() {
  for (const auto& shard : shards_) shard->reactor.stop();
}

std::shared_ptr<HttpClient> http_client() {
  Current& current = of_this_process<Current>();
  std::lock_guard lock(current.mutex);
  if (current.closed) throw Failure({ErrorCode::kClosed, "the program ends, and reads no URL any more"});
  if (current.client == nullptr) {
    const HttpOptions* const options = configured;
    current.client = make_client(options != nullptr ? *options : HttpOptions{});
  }
  return current.client;
}

void configure_http_client(const HttpOptions& options) {
  Current& current = of_this_process<Current>();
  std::lock_guard lock(current.mutex);
  configured = current.options.emplace_back(std::make_unique<const HttpOptions>(options)).get();
  note_replaced(current);
}

void close_http_client() {
  Current& current = of_this_process<Current>();
  std::lock_guard lock(current.mutex);
  current.closed = true;
  if (current.client != nullptr) current.client->stop();
  for (const auto& replaced : current.replaced) {
    if (const auto client = replaced.lock()) client->stop();
  }
}

}  // namespace gdsdata
