#include "backend/remote.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/http_client.h"
#include "backend/range_read.h"
#include "backend/scatter.h"
#include "base/file.h"
#include "tuning.h"

namespace gdsdata {

namespace {

// While both backends have requests in flight, each is asked this often.
constexpr std::chrono::milliseconds kTurn{1};

// Completions on their way from the reactors to the worker. Outlives a worker that gave up.
class Inbox {
 public:
  void put(Completion completion) {
    {
      std::lock_guard lock(mutex_);
      completions_.push_back(std::move(completion));
    }
    arrived_.notify_one();
  }
  void interrupt() {
    {
      std::lock_guard lock(mutex_);
      interrupted_ = true;
    }
    arrived_.notify_one();
  }
  // Waits for a completion or an interrupt, and returns how many were taken.
  size_t take(std::span<Completion> out, std::chrono::milliseconds timeout, bool& interrupted) {
    std::unique_lock lock(mutex_);
    if (timeout.count() > 0) arrived_.wait_for(lock, timeout, [this] { return !completions_.empty() || interrupted_; });
    interrupted = std::exchange(interrupted_, false) || interrupted;
    const size_t count = std::min(out.size(), completions_.size());
    std::move(completions_.begin(), completions_.begin() + static_cast<ptrdiff_t>(count), out.begin());
    completions_.erase(completions_.begin(), completions_.begin() + static_cast<ptrdiff_t>(count));
    return count;
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<Completion> completions_;
  bool interrupted_ = false;
};

class RemoteBackend final : public Backend {
 public:
  explicit RemoteBackend(std::unique_ptr<Backend> local) : local_(std::move(local)) {}

  Capabilities capabilities() const override { return local_->capabilities(); }
  void expect_memory(std::span<std::byte> memory) override { local_->expect_memory(memory); }

  size_t submit(std::span<const Request> requests) override {
    size_t taken = 0;
    while (taken < requests.size()) {
      const auto rest = requests.subspan(taken);
      const auto is_remote = [](const Request& request) { return request.remote; };
      if (is_remote(rest.front())) {
        if (remote_in_flight_ >= tuning::kRemoteQueueDepth) return taken;
        begin(rest.front());
        ++taken;
        continue;
      }
      const auto end = std::find_if(rest.begin(), rest.end(), is_remote);
      const auto run = rest.first(static_cast<size_t>(end - rest.begin()));
      const size_t of_run = local_->submit(run);
      local_in_flight_ += of_run;
      taken += of_run;
      if (of_run < run.size()) return taken;
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
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
      const bool waits = count < min && left.count() > 0;
      const auto patience =
          waits ? (local_in_flight_ > 0 ? std::min(left, kTurn) : left) : std::chrono::milliseconds(0);
      bool interrupted = false;
      const size_t of_remote = inbox_->take(completions.subspan(count), patience, interrupted);
      remote_in_flight_ -= of_remote;
      count += of_remote;
      if (!waits || interrupted || count == completions.size()) return count;
    }
  }

  void interrupt() override {
    inbox_->interrupt();
    local_->interrupt();
  }

 private:
  void begin(const Request& request) {
    auto client = http_client();
    const auto scatter = std::make_shared<Scatter>(request);
    ++remote_in_flight_;
    RangeRead::begin(
        std::move(client), request.file->remote(), {request.offset, request.offset + request.length},
        [scatter](uint64_t offset, std::span<const std::byte> bytes) { scatter->take(offset, bytes); },
        [scatter, inbox = inbox_, tag = request.tag, length = request.length](std::optional<Error> error) {
          Completion completion;
          completion.tag = tag;
          completion.storage_bytes = length;
          if (error) {
            completion.error = std::move(error);
          } else {
            completion.bytes[Route::kRemote] = scatter->finish();
          }
          inbox->put(std::move(completion));
        });
  }

  std::unique_ptr<Backend> local_;
  size_t local_in_flight_ = 0, remote_in_flight_ = 0;
  std::shared_ptr<Inbox> inbox_ = std::make_shared<Inbox>();
};

}  // namespace

std::unique_ptr<Backend> make_remote_backend(std::unique_ptr<Backend> local) {
  return std::make_unique<RemoteBackend>(std::move(local));
}

}  // namespace gdsdata
