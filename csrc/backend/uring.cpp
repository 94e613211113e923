// io_uring: one thread keeps a queue of requests in flight.
//
// Writes are prepared first: copied into bounce memory, with their checksums computed. At most half
// of that memory is in flight. A virtual disk may complete requests only when it has nothing left
// to do, and then all at once. The prepared half then keeps it busy while more is copied
// (docs/design-decisions.md).
#include "backend/backend.h"

#ifdef GDSDATA_WITHOUT_LIBURING

namespace gdsdata {

std::string uring_refusal() { return "io_uring: this extension was built without liburing; build it with liburing"; }

std::unique_ptr<Backend> make_uring_backend(const BackendOptions&) {
  throw Failure({ErrorCode::kUnavailable, uring_refusal()});
}

}  // namespace gdsdata

#else

#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "backend/bounce.h"
#include "backend/faulty.h"
#include "backend/flight.h"
#include "base/descriptors.h"
#include "base/extent_math.h"
#include "tuning.h"

namespace gdsdata {

namespace {

// These flags of newer kernels reduce the cost. If a kernel refuses one (EINVAL), fewer are tried.
int make_ring(unsigned entries, io_uring& ring) {
  constexpr unsigned kSubmitterOnly = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;  // Linux 6.1
  int result = 0;
  for (const unsigned flags : {kSubmitterOnly, static_cast<unsigned>(IORING_SETUP_COOP_TASKRUN), 0U}) {
    with_descriptors(
        [&] {
          result = io_uring_queue_init(entries, &ring, flags);
          errno = -result;
          return result;
        },
        WhenTaken::kGiveUp);
    if (result != -EINVAL) return result;
  }
  return result;
}

std::string refusal_of(int system_errno) {
  std::string reason = std::string("io_uring: ") + std::strerror(system_errno);
  switch (system_errno) {
    case ENOSYS:
      return reason + "; the kernel has none (Linux 5.6 or later has), or the container's seccomp profile forbids it";
    case EPERM:
    case EACCES:
      return reason + "; forbidden by /proc/sys/kernel/io_uring_disabled or by the container's seccomp profile";
    case EMFILE:
      return reason + "; raise the limit of open files (ulimit -n)";
    case ENOMEM:
      return reason + "; raise the limit of locked memory (ulimit -l)";
    default:
      return reason;
  }
}

Failure failure_of(int system_errno) {
  Error error{ErrorCode::kUnavailable, refusal_of(system_errno)};
  error.system_errno = system_errno;
  return Failure(std::move(error));
}

class Ring {
 public:
  // Throws Failure.
  explicit Ring(unsigned entries) {
    if (const int result = make_ring(entries, ring_); result < 0) throw failure_of(-result);
  }
  ~Ring() { io_uring_queue_exit(&ring_); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  io_uring* get() { return &ring_; }

 private:
  io_uring ring_{};
};

// Throws Failure.
Descriptor make_eventfd() {
  Descriptor made(open_descriptor([] { return ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); }, WhenTaken::kGiveUp));
  if (made.get() < 0) throw failure_of(errno);
  return made;
}

class UringBackend final : public Backend {
 public:
  explicit UringBackend(const BackendOptions& options)
      : options_(options),
        arena_(*host_device(), options.bounce_bytes, tuning::kRegisteredBytes),
        flights_(options.queue_depth),
        most_writing_bytes_(std::max(options.bounce_bytes / 2, 2 * (options.request_bytes + kCutBytes))),
        wake_(make_eventfd()),
        ring_(static_cast<unsigned>(options.queue_depth + kWakes)) {
    if (!options.faults.empty()) faults_ = FaultPlan::parse(options.faults);
    for (size_t i = flights_.size(); i-- > 0;) idle_.push_back(i);
    // If memory is registered, the kernel need not pin pages for each request. If the limit of
    // locked memory forbids that, requests work without. Registration touches the memory, so only
    // the part for short requests is registered. Long ones in huge pages gain little.
    registered_.push_back({arena_.data(), std::min(arena_.size_bytes(), tuning::kRegisteredBytes)});
    register_memory();
  }

  void expect_memory(std::span<std::byte> memory) override {
    registered_.reserve(registered_.size() + 1);  // nothing may fail while the kernel has none of it
    if (!registered_.empty()) io_uring_unregister_buffers(ring_.get());
    registered_.push_back({memory.data(), memory.size()});
    register_memory();
  }

  Capabilities capabilities() const override { return {"uring", options_.queue_depth, options_.request_bytes}; }

  size_t submit(std::span<const Request> requests) override {
    size_t taken = 0;
    try {
      take(requests, taken);
    } catch (...) {
      if (taken == 0) throw;  // else the next call fails again, with nothing taken
    }
    start_writes();
    io_uring_submit(ring_.get());
    return taken;
  }

  size_t reap(std::span<Completion> completions, size_t min, std::chrono::milliseconds timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    size_t given = 0;
    while (true) {
      take_answers(completions.size() - given);
      const size_t count = std::min(completions.size() - given, completed_.size());
      const auto end = completed_.begin() + static_cast<ptrdiff_t>(count);
      std::move(completed_.begin(), end, completions.begin() + static_cast<ptrdiff_t>(given));
      completed_.erase(completed_.begin(), end);
      given += count;
      const bool nothing_in_flight = idle_.size() == flights_.size();
      const bool interrupted = std::exchange(interrupted_, false);
      if (given >= min || given == completions.size() || nothing_in_flight || interrupted) return given;
      const auto left = deadline - std::chrono::steady_clock::now();
      if (left.count() <= 0) return given;
      wait(left, min - given);
    }
  }

  void interrupt() override {
    constexpr uint64_t kOnce = 1;
    [[maybe_unused]] const auto written =
        ::write(wake_.get(), &kOnce, sizeof kOnce);  // if full, it is readable already
  }

 private:
  // Used instead of a flight's index.
  static constexpr uint64_t kWake = UINT64_MAX - 1;
  // With kernels before 5.11, liburing drops completions that look like its own time limits.
  static_assert(kWake != LIBURING_UDATA_TIMEOUT);
  // A wait for n completions ends after any n, so an interrupt must cause as many.
  static constexpr size_t kWakes = 8;

  // Counts in `taken` the requests that will end in a completion.
  void take(std::span<const Request> requests, size_t& taken) {
    // Later steps then need no allocation to report a completion.
    completed_.reserve(completed_.size() + flights_.size() + requests.size());
    ready_writes_.reserve(flights_.size());
    uint64_t passed_bytes = 0;  // prepared since the last check for completions
    while (taken < requests.size() && !idle_.empty()) {
      const size_t index = idle_.back();
      Flight& flight = flights_[index];
      const bool others_in_flight = idle_.size() < flights_.size();
      if (!flight.begin(requests[taken], arena_, others_in_flight, options_, faults_ ? &*faults_ : nullptr)) break;
      ++taken;
      if (flight.ended()) {
        completed_.push_back(flight.finish());
        continue;
      }
      idle_.pop_back();
      if (!flight.is_write()) {
        prepare(index);
        continue;
      }
      ready_writes_.push_back(index);
      passed_bytes += flight.length();
      if (passed_bytes >= tuning::kLooksEveryBytes) {
        passed_bytes = 0;
        take_answers(0);
      }
    }
  }

  void prepare(size_t index) {
    const Flight::Step& step = flights_[index].next();
    io_uring_sqe* entry = io_uring_get_sqe(ring_.get());  // not null: the ring has an entry for each flight
    void* first = step.memory[0].iov_base;
    const auto length = static_cast<unsigned>(step.length);
    const int buffer = step.memory_count == 1 ? registered_buffer(first, length) : -1;
    if (buffer >= 0 && step.write) {
      io_uring_prep_write_fixed(entry, step.fd, first, length, step.offset, buffer);
    } else if (buffer >= 0) {
      io_uring_prep_read_fixed(entry, step.fd, first, length, step.offset, buffer);
    } else if (step.write) {
      io_uring_prep_writev(entry, step.fd, step.memory.data(), step.memory_count, step.offset);
    } else {
      io_uring_prep_readv(entry, step.fd, step.memory.data(), step.memory_count, step.offset);
    }
    io_uring_sqe_set_data64(entry, index);
  }

  // Starts as many prepared writes as may be in flight, and at least one.
  bool start_writes() {
    bool started = false;
    while (!ready_writes_.empty()) {
      const size_t index = ready_writes_.front();
      const uint64_t bytes = flights_[index].length();
      if (writing_bytes_ > 0 && writing_bytes_ + bytes > most_writing_bytes_) break;
      ready_writes_.erase(ready_writes_.begin());
      writing_bytes_ += bytes;
      prepare(index);
      started = true;
    }
    return started;
  }

  void register_memory() {
    if (io_uring_register_buffers(ring_.get(), registered_.data(), static_cast<unsigned>(registered_.size())) != 0) {
      registered_.clear();
    }
  }

  int registered_buffer(const void* memory, size_t bytes) const {
    const auto* begin = static_cast<const std::byte*>(memory);
    for (size_t i = 0; i < registered_.size(); ++i) {
      const auto* buffer = static_cast<const std::byte*>(registered_[i].iov_base);
      if (begin >= buffer && begin + bytes <= buffer + registered_[i].iov_len) return static_cast<int>(i);
    }
    return -1;
  }

  // Stops after `wanted` completions, so that the caller can handle those first, unless prepared
  // writes are waiting.
  void take_answers(size_t wanted) {
    // With DEFER_TASKRUN, completions are posted only when the submitter enters the kernel.
    if (idle_.size() != flights_.size() && io_uring_cq_ready(ring_.get()) == 0) io_uring_get_events(ring_.get());
    io_uring_cqe* answer = nullptr;
    bool again = false;
    while ((completed_.size() < wanted || !ready_writes_.empty()) && io_uring_peek_cqe(ring_.get(), &answer) == 0) {
      const uint64_t index = io_uring_cqe_get_data64(answer);
      const int result = answer->res;
      io_uring_cqe_seen(ring_.get(), answer);
      if (index == kWake) {
        uint64_t wakes = 0;
        interrupted_ |= ::read(wake_.get(), &wakes, sizeof wakes) > 0;
        if (result >= 0) --polls_;  // else the kernel cannot poll, so go on without
        continue;
      }
      Flight& flight = flights_[index];
      flight.advance(result);
      if (flight.ended()) {
        if (flight.is_write()) writing_bytes_ -= flight.length();
        completed_.push_back(flight.finish());
        idle_.push_back(index);
      } else {
        prepare(index);
        again = true;
      }
    }
    again |= start_writes();
    if (again || io_uring_sq_ready(ring_.get()) > 0) io_uring_submit(ring_.get());  // also entries refused before
  }

  void wait(std::chrono::nanoseconds left, size_t answers) {
    const size_t with_kernel = flights_.size() - idle_.size() - ready_writes_.size();
    answers = std::min({answers, kWakes, ready_writes_.empty() ? with_kernel : (with_kernel + 1) / 2});
    if (polls_ < answers) {
      while (polls_ < answers) {
        io_uring_sqe* entry = io_uring_get_sqe(ring_.get());
        if (entry == nullptr) break;  // the kernel has not taken earlier entries yet
        io_uring_prep_poll_add(entry, wake_.get(), POLLIN);
        io_uring_sqe_set_data64(entry, kWake);
        ++polls_;
      }
      io_uring_submit(ring_.get());
    }
    __kernel_timespec limit{};
    limit.tv_sec = left.count() / 1'000'000'000;
    limit.tv_nsec = left.count() % 1'000'000'000;
    io_uring_cqe* answer = nullptr;
    io_uring_wait_cqes(ring_.get(), &answer, static_cast<unsigned>(answers), &limit,
                       nullptr);  // the caller checks again in any case
  }

  BackendOptions options_;
  BounceArena arena_;
  std::optional<FaultPlan> faults_;
  std::vector<iovec> registered_;  // registered with the kernel, by index
  std::vector<Flight> flights_;
  std::vector<size_t> idle_;  // indices of flights
  std::vector<size_t> ready_writes_;  // prepared, but not submitted
  // Two requests at least, so that one is in flight while the other completes.
  const uint64_t most_writing_bytes_;
  uint64_t writing_bytes_ = 0;  // of submitted writes
  std::vector<Completion> completed_;
  const Descriptor wake_;  // an eventfd, readable after interrupt
  size_t polls_ = 0;  // polls of it in flight, each of which completes when it is readable
  bool interrupted_ = false;
  Ring ring_;  // the last member: the kernel may use the memory of the others until it is gone
};

// gVisor made rings that read and do not write.
bool can_do_its_work(Ring& ring) {
  const std::unique_ptr<io_uring_probe, decltype(&io_uring_free_probe)> known(io_uring_get_probe_ring(ring.get()),
                                                                              io_uring_free_probe);
  const auto can = [&](int operation) { return io_uring_opcode_supported(known.get(), operation) != 0; };
  return known != nullptr && can(IORING_OP_READV) && can(IORING_OP_WRITEV) && can(IORING_OP_POLL_ADD);
}

}  // namespace

std::string uring_refusal() {
  try {
    Ring ring(2);
    if (!can_do_its_work(ring)) {
      return "io_uring: a ring can be made, but does not say that it reads and writes (Linux 5.6 or later does)";
    }
    io_uring_prep_nop(io_uring_get_sqe(ring.get()));  // a seccomp profile may allow a ring, and refuse its use
    int result = 0;
    do {
      result = io_uring_submit_and_wait(ring.get(), 1);
    } while (result == -EINTR);
    return result < 0 ? refusal_of(-result) : "";
  } catch (const Failure& failure) {
    return failure.error().message;
  }
}

std::unique_ptr<Backend> make_uring_backend(const BackendOptions& options) {
  return std::make_unique<UringBackend>(options);
}

}  // namespace gdsdata

#endif
