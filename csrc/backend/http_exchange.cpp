#include "backend/http_exchange.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "backend/range_verdict.h"
#include "base/error.h"

namespace gdsdata {

namespace {

constexpr std::chrono::milliseconds kPollTime{100};

class Collector final : public HttpReceiver {
 public:
  explicit Collector(size_t most_body_bytes) : most_body_bytes_(most_body_bytes) {}

  bool take_head(const HttpHead& head) override {
    response.head = head;
    return true;
  }
  bool take_body(std::span<const std::byte> bytes) override {
    const size_t kept = std::min(bytes.size(), most_body_bytes_ - response.body.size());
    response.body.insert(response.body.end(), bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(kept));
    is_cut = response.body.size() == most_body_bytes_;
    return !is_cut;
  }
  void ended(const HttpEnd& end) override {
    std::lock_guard lock(mutex_);
    end_ = end;
    changed_.notify_all();
  }
  bool wait(std::chrono::milliseconds patience) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, patience, [this] { return end_.has_value(); });
  }
  const HttpEnd& end() const { return *end_; }

  HttpResponse response;
  bool is_cut = false;

 private:
  const size_t most_body_bytes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<HttpEnd> end_;
};

std::string without_query(const std::string& url) { return url.substr(0, url.find('?')); }

}  // namespace

HttpResponse http_exchange(const HttpRequest& request, size_t most_body_bytes, const std::function<void()>& poll) {
  const auto client = http_client();
  HttpReactor& reactor = client->next_shard().reactor;
  Collector collector(most_body_bytes);
  HttpReactor::Exchange exchange = HttpReactor::kNone;
  reactor.post([&] {
    exchange = reactor.start(request, collector);
    if (exchange == HttpReactor::kNone) collector.ended({CurlApi::kMalformedUrl, "libcurl refuses the request"});
  });
  while (!collector.wait(kPollTime)) {
    try {
      if (poll) poll();
      if (reactor.stopped()) throw Failure({ErrorCode::kClosed, "the program ends, and this request with it"});
    } catch (...) {
      reactor.post([&] {
        reactor.cancel(exchange);
        collector.ended({});
      });
      // Its memory is in use until then. After the end of the client nothing uses it.
      while (!collector.wait(kPollTime) && !reactor.stopped()) {
      }
      throw;
    }
  }
  const HttpEnd& end = collector.end();
  if (end.code != CurlApi::kOk && !collector.is_cut) {
    const Verdict verdict = judge_failure(end);
    const std::string url = without_query(request.url);
    throw Failure({verdict.code, request.method + " " + url + ": " + end.reason, url, 0, 0, verdict.system_errno});
  }
  return std::move(collector.response);
}

}  // namespace gdsdata
