#include "backend/http_exchange.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>

#include "backend/range_verdict.h"
#include "base/condition.h"
#include "base/error.h"
#include "base/url.h"

namespace gdsdata {

namespace {

constexpr std::chrono::milliseconds kPollTime{100};

class Signal {
 public:
  // Locked while it notifies, because the waiting thread destroys the signal.
  void give() {
    std::lock_guard lock(mutex_);
    is_given_ = true;
    changed_.notify_all();
  }
  bool wait(std::chrono::milliseconds patience) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, patience, [this] { return is_given_; });
  }

 private:
  std::mutex mutex_;
  Condition changed_;
  bool is_given_ = false;
};

class Collector final : public HttpReceiver {
 public:
  explicit Collector(size_t most_body_bytes) : most_body_bytes_(most_body_bytes) {}

  bool take_head(HttpHead head) override {
    response.head = std::move(head);
    return true;
  }
  bool take_body(std::span<const std::byte> bytes) override {
    const size_t kept = std::min(bytes.size(), most_body_bytes_ - response.body.size());
    response.body.insert(response.body.end(), bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(kept));
    is_cut = response.body.size() == most_body_bytes_;
    return !is_cut;
  }
  void ended(const HttpEnd& how) noexcept override {
    try {
      end = how;
    } catch (...) {
      end.code = how.code;
      end.thrown = current_error();
    }
    complete.give();
  }

  HttpResponse response;
  bool is_cut = false;
  HttpEnd end;      // after `complete`
  Signal complete;  // the last one that the reactor's thread uses

 private:
  const size_t most_body_bytes_;
};

}  // namespace

HttpResponse http_exchange(const HttpRequest& request, size_t most_body_bytes, const std::function<void()>& poll) {
  const auto client = http_client();
  HttpReactor& reactor = client->next_shard().reactor;
  Collector collector(most_body_bytes);
  HttpReactor::Exchange exchange = HttpReactor::kNone;
  reactor.post([&] {
    try {
      exchange = reactor.start(request, collector);
      if (exchange == HttpReactor::kNone) collector.ended({CurlApi::kMalformedUrl, "libcurl refuses the request"});
    } catch (...) {
      HttpEnd end;
      end.code = CurlApi::kWriteError;
      end.thrown = current_error();
      collector.ended(end);
    }
  });
  while (!collector.complete.wait(kPollTime)) {
    try {
      if (poll) poll();
      if (reactor.stopped()) throw Failure({ErrorCode::kClosed, "the program ends, and this request with it"});
    } catch (...) {
      // The exchange may end by itself meanwhile. The memory of both tasks is in use until the
      // second one has run. After the end of the client nothing uses it.
      Signal canceled;
      reactor.post([&] {
        reactor.cancel(exchange);
        canceled.give();
      });
      while (!canceled.wait(kPollTime) && !reactor.stopped()) {
      }
      throw;
    }
  }
  const HttpEnd& end = collector.end;
  if (end.code != CurlApi::kOk && !collector.is_cut) {
    if (end.thrown) throw Failure(*end.thrown);
    const Verdict verdict = judge_failure(end);
    const std::string url = shown_url(request.url);
    throw Failure({verdict.code, request.method + " " + url + ": " + end.reason, url, 0, 0, verdict.system_errno});
  }
  return std::move(collector.response);
}

}  // namespace gdsdata
