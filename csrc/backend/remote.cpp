#include "backend/remote.h"

#include <algorithm>
#include <iterator>
#include <list>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/cached_read.h"
#include "backend/http_client.h"
#include "backend/range_read.h"
#include "backend/scatter.h"
#include "base/condition.h"
#include "base/file.h"
#include "tuning.h"

namespace gdsdata {

namespace {

// While the local backend has to be asked, too, the wait for the reactors is this long.
constexpr std::chrono::milliseconds kTurn{1};
constexpr std::chrono::milliseconds kNoWait{0};

// Results on their way from the reactors to the worker. Outlives a worker that gave up.
class Inbox {
 public:
  // A result comes as a list of one, so that no memory is needed to put it here.
  using Completions = std::list<Completion>;
  using Fetches = CachedRead::Fetches;
  void put(Completions one) noexcept { put(completions_, one); }
  void put(Fetches one) noexcept { put(fetches_, one); }
  void interrupt() {
    {
      std::lock_guard lock(mutex_);
      interrupted_ = true;
    }
    arrived_.notify_one();
  }
  struct Taken {
    Completions completions;
    Fetches fetches;
    bool interrupted = false;
  };
  // Waits for `least` completions, a fetch or an interrupt. Takes at most `most` completions, and
  // all fetches.
  Taken take(size_t least, size_t most, std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    least_ = least;
    if (timeout.count() > 0) arrived_.wait_for(lock, timeout, [this] { return has_enough(); });
    Taken taken;
    taken.interrupted = std::exchange(interrupted_, false);
    taken.fetches.swap(fetches_);
    const auto end = std::next(completions_.begin(), static_cast<ptrdiff_t>(std::min(most, completions_.size())));
    taken.completions.splice(taken.completions.end(), completions_, completions_.begin(), end);
    return taken;
  }

 private:
  template <typename Results>
  void put(Results& results, Results& one) noexcept {
    {
      std::lock_guard lock(mutex_);
      results.splice(results.end(), one);
      if (!has_enough()) return;  // the worker sleeps on
    }
    arrived_.notify_one();
  }
  bool has_enough() const { return completions_.size() >= least_ || !fetches_.empty() || interrupted_; }

  std::mutex mutex_;  // guards the members that follow
  Condition arrived_;
  Completions completions_;
  Fetches fetches_;
  size_t least_ = 1;  // completions that the worker waits for
  bool interrupted_ = false;
};

class RemoteBackend final : public Backend {
 public:
  explicit RemoteBackend(std::unique_ptr<Backend> local) : local_(std::move(local)) {}

  Capabilities capabilities() const override { return local_->capabilities(); }
  void expect_memory(std::span<std::byte> memory) override { local_->expect_memory(memory); }

  size_t submit(std::span<const Request> requests) override {
    size_t taken = 0;
    try {
      take(requests, taken);
    } catch (...) {
      if (taken == 0) throw;  // else the next call throws it
    }
    return taken;
  }

  size_t reap(std::span<Completion> completions, size_t min, std::chrono::milliseconds timeout) override {
    if (remote_in_flight_ == 0) {
      const size_t count = local_->reap(completions, min, timeout);
      local_in_flight_ -= count;
      return count;
    }
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    min = std::min(min, local_in_flight_ + remote_in_flight_);
    size_t count = 0;
    for (;;) {
      if (local_in_flight_ > 0) {
        const size_t of_local = local_->reap(completions.subspan(count), 0, {});
        local_in_flight_ -= of_local;
        count += of_local;
      }
      count += reap_cached(completions.subspan(count));
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
      const bool waits = count < min && left.count() > 0;
      Inbox::Taken taken = inbox_->take(waits ? min - count : 1, completions.size() - count,
                                        waits ? std::min(left, patience()) : kNoWait);
      for (Completion& completion : taken.completions) {
        --remote_in_flight_;
        completions[count++] = std::move(completion);
      }
      for (auto& fetch : taken.fetches) {
        CachedRead& read = *fetch->read;
        read.take(std::move(fetch));
      }
      count += reap_cached(completions.subspan(count));
      if (!waits || taken.interrupted || count == completions.size()) return count;
    }
  }

  void interrupt() override {
    inbox_->interrupt();
    local_->interrupt();
  }

 private:
  // Increments `taken` with each request that it has begun.
  void take(std::span<const Request> requests, size_t& taken) {
    while (taken < requests.size()) {
      const auto rest = requests.subspan(taken);
      const auto is_remote = [](const Request& request) { return request.remote; };
      if (is_remote(rest.front())) {
        if (!has_room_for(rest.front())) return;
        begin(rest.front());
        ++taken;
        continue;
      }
      const auto end = std::find_if(rest.begin(), rest.end(), is_remote);
      const auto run = rest.first(static_cast<size_t>(end - rest.begin()));
      const size_t of_run = local_->submit(run);
      local_in_flight_ += of_run;
      taken += of_run;
      if (of_run < run.size()) return;
    }
  }

  bool has_room_for(const Request& request) const {
    if (remote_in_flight_ == 0) return true;
    if (remote_in_flight_ >= tuning::kRemoteQueueDepth) return false;
    return request.file->cached() == nullptr ||
           buffer_bytes_ + CachedRead::buffer_bytes(request) <= tuning::kCacheFillBytes;
  }

  void begin(const Request& request) {
    auto client = http_client();
    if (request.file->cached() != nullptr) return begin_cached(request, std::move(client));
    struct Passing {
      Scatter scatter;
      Inbox::Completions completion;  // one
      uint64_t bytes = 0;
    };
    const auto passing = std::make_shared<Passing>(Passing{Scatter(request), Inbox::Completions(1)});
    RangeRead::begin(
        std::move(client), request.file->remote(), {request.offset, request.offset + request.length},
        {[passing](uint64_t offset, std::span<const std::byte> bytes) {
           passing->bytes += passing->scatter.take(offset, bytes);
         },
         [passing](uint64_t offset) { return passing->scatter.memory_at(offset); }},
        [passing, inbox = inbox_, tag = request.tag, length = request.length](std::optional<Error> error) {
          Completion& completion = passing->completion.front();
          completion.tag = tag;
          completion.storage_bytes = length;
          completion.error = std::move(error);
          if (!completion.error) finish(completion, passing->scatter, passing->bytes);
          inbox->put(std::move(passing->completion));
        },
        [request] { return request.is_canceled(); });
    ++remote_in_flight_;
  }

  static void finish(Completion& completion, Scatter& scatter, uint64_t bytes) noexcept {
    try {
      scatter.finish();
      completion.bytes[Route::kRemote] = bytes;
    } catch (...) {
      completion.error = current_error();
    }
  }

  void begin_cached(const Request& request, std::shared_ptr<HttpClient> client) {
    auto read = std::make_unique<CachedRead>(request, std::move(client),
                                             [inbox = inbox_](CachedRead::Fetches one) { inbox->put(std::move(one)); });
    cached_.push_back({std::move(read), CachedRead::buffer_bytes(request)});
    ++remote_in_flight_;
    buffer_bytes_ += cached_.back().buffer_bytes;
    cached_.back().read->advance();
  }

  // How long the reactors may be waited for: then others are asked.
  std::chrono::milliseconds patience() const {
    if (local_in_flight_ > 0) return kTurn;
    auto until = CachedRead::Clock::time_point::max();
    for (const Cached& one : cached_) {
      if (one.read->waits_for_others()) until = std::min(until, one.read->next_look());
    }
    if (until == CachedRead::Clock::time_point::max()) return std::chrono::milliseconds::max();
    return std::max(kNoWait, std::chrono::ceil<std::chrono::milliseconds>(until - CachedRead::Clock::now()));
  }

  // Completes cached reads, as many as fit.
  size_t reap_cached(std::span<Completion> completions) {
    size_t count = 0;
    const auto now = CachedRead::Clock::now();
    std::erase_if(cached_, [&](Cached& one) {
      one.read->note_canceled();
      if (one.read->waits_for_others() && one.read->next_look() <= now) one.read->advance();
      if (count == completions.size() || !one.read->ended()) return false;
      completions[count++] = one.read->finish();
      buffer_bytes_ -= one.buffer_bytes;
      --remote_in_flight_;
      return true;
    });
    return count;
  }

  struct Cached {
    std::unique_ptr<CachedRead> read;
    uint64_t buffer_bytes;
  };

  std::unique_ptr<Backend> local_;
  size_t local_in_flight_ = 0, remote_in_flight_ = 0;  // with the cached ones
  std::vector<Cached> cached_;
  uint64_t buffer_bytes_ = 0;  // of them
  std::shared_ptr<Inbox> inbox_ = std::make_shared<Inbox>();
};

}  // namespace

std::unique_ptr<Backend> make_remote_backend(std::unique_ptr<Backend> local) {
  return std::make_unique<RemoteBackend>(std::move(local));
}

}  // namespace gdsdata
