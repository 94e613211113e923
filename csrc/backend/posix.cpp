// preadv and pwritev, one request at a time: works everywhere. Several workers make a queue.
#include <sys/uio.h>

#include <cerrno>
#include <deque>
#include <optional>
#include <utility>

#include "backend/backend.h"
#include "backend/bounce.h"
#include "backend/faulty.h"
#include "backend/flight.h"

namespace gdsdata {

namespace {

class PosixBackend final : public Backend {
 public:
  explicit PosixBackend(const BackendOptions& options)
      : options_(options), arena_(*host_device(), options.bounce_bytes) {
    if (!options.faults.empty()) faults_ = FaultPlan::parse(options.faults);
  }

  Capabilities capabilities() const override { return {"posix", 1, options_.request_bytes}; }

  size_t submit(std::span<const Request> requests) override {
    if (requests.empty()) return 0;
    Flight flight;
    // Nothing else is in flight, so this cannot fail for lack of room.
    flight.begin(requests.front(), arena_, /*others_in_flight=*/false, options_, faults_ ? &*faults_ : nullptr);
    while (!flight.ended()) {
      const Flight::Step& step = flight.next();
      const auto offset = static_cast<off_t>(step.offset);
      const auto count = static_cast<int>(step.memory_count);
      const ssize_t moved = step.write ? ::pwritev(step.fd, step.memory.data(), count, offset)
                                       : ::preadv(step.fd, step.memory.data(), count, offset);
      flight.advance(moved < 0 ? -errno : moved);
    }
    completed_.push_back(flight.finish());
    return 1;
  }

  size_t reap(std::span<Completion> completions, size_t, std::chrono::milliseconds) override {
    size_t given = 0;
    while (given < completions.size() && !completed_.empty()) {
      completions[given++] = std::move(completed_.front());
      completed_.pop_front();
    }
    return given;
  }

 private:
  BackendOptions options_;
  BounceArena arena_;
  std::optional<FaultPlan> faults_;
  std::deque<Completion> completed_;
};

}  // namespace

std::unique_ptr<Backend> make_posix_backend(const BackendOptions& options) {
  return std::make_unique<PosixBackend>(options);
}

}  // namespace gdsdata
