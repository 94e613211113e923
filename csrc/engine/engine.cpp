#include "engine/engine.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "backend/faulty.h"
#include "base/condition.h"
#include "base/extent_math.h"
#include "base/thread_name.h"
#include "engine/guest.h"
#include "engine/link.h"
#include "engine/pending.h"
#include "engine/plain_worker.h"
#include "engine/segment_queue.h"
#include "engine/staged_worker.h"
#include "engine/stall_clock.h"
#include "tuning.h"

namespace gdsdata {

namespace {

// A request may exceed its range by one block on either side.
constexpr uint64_t kRequestEdges = 2 * 65536;

void check(const EngineOptions& options, uint64_t write_segment_bytes, const Device& device) {
  const auto refuse = [](const std::string& message) { throw Failure({ErrorCode::kInvalidArgument, message}); };
  if (options.io.queue_depth < 1 || options.io.queue_depth > 4096) refuse("queue_depth must be from 1 to 4096");
  if (options.io.request_bytes < 65536 || options.io.request_bytes % 4096 != 0 ||
      options.io.request_bytes > (1U << 30)) {
    refuse("request_bytes must be a multiple of 4096 from 65536 to 1 GiB");
  }
  if (options.io.bounce_bytes < options.io.request_bytes + kRequestEdges) {
    refuse("bounce_bytes must be at least request_bytes + 131072, to hold one request with its alignment");
  }
  if (options.segment_bytes < 4096) refuse("segment_bytes must be at least 4096");
  const uint64_t longest_part =
      longest_part_bytes(std::max(options.segment_bytes, write_segment_bytes), options.io.request_bytes);
  const uint64_t longest_segment = Staging::most_bytes(longest_part + kCutBytes);
  if (!device.host_addressable() && options.staging_bytes < longest_segment) {
    refuse("staging_bytes must be at least " + std::to_string(longest_segment) +
           ", to hold one segment of these segment_bytes and request_bytes");
  }
  if (options.workers > 256) refuse("workers must be at most 256");
}

uint64_t default_segment_bytes(const Device& device) {
  return device.host_addressable() ? tuning::kHostReadSegmentBytes : tuning::kDeviceReadSegmentBytes;
}

uint64_t default_write_segment_bytes(const Device& device) {
  return device.host_addressable() ? tuning::kHostWriteSegmentBytes : tuning::kDeviceWriteSegmentBytes;
}

// With io_uring, one worker keeps the disk busy, and others copy from the page cache. To host
// memory the consumer copies too, so a core is left to it.
size_t default_workers(const std::string& backend, const Device& device, size_t cores) {
  if (backend != "uring") return tuning::kPosixWorkers;
  if (cores == 0) cores = std::max(1U, std::thread::hardware_concurrency());
  if (!device.host_addressable()) return std::min(cores, tuning::kMostUringWorkersOfGpu);
  return std::clamp<size_t>(cores - 1, 1, tuning::kMostUringWorkers);
}

constexpr std::chrono::nanoseconds kForEver = std::chrono::hours(24 * 365);

// Reads use all of it in flight. Writes use half, while the other half is filled.
uint64_t default_bounce_bytes(size_t workers) {
  return std::max(tuning::kSharedBounceBytes / workers, tuning::kLeastBounceBytes);
}

Error stall_of(const Group& group, std::chrono::nanoseconds timeout) {
  const GroupRequest& request = group.request();
  const Transfer& first = request.transfers.front();  // a group without transfers never waits for storage
  const std::string& path = request.files->path(first.file);
  const std::string what = request.direction == Direction::kRead ? "read" : "write";
  const size_t others = request.transfers.size() - 1;
  return {ErrorCode::kStalled,
          "no " + what + " has ended for " + std::to_string(timeout.count() / 1'000'000) +
              " ms; this call waits for '" + path + "' at offset " + std::to_string(first.offset) +
              (others > 0 ? " and " + std::to_string(others) + " other ranges" : "") +
              ". Is its storage still reachable? stall_timeout_s raises the limit",
          path, first.offset, first.length};
}

}  // namespace

struct Engine::Running {
  EngineOptions options;
  std::shared_ptr<Device> device;
  Selection selection;
  SegmentLimits segment_limits;
  SegmentQueue queue;
  std::unique_ptr<Link> link;
  std::mutex guest_mutex;  // guards `guest`
  std::unique_ptr<Guest> guest;
  std::vector<std::unique_ptr<Worker>> workers;
  std::vector<std::thread> threads;
  std::mutex ended_mutex;  // guards `working`
  Condition ended;
  size_t working = 0;

  std::unique_ptr<Worker> make_worker() {
    if (device->host_addressable()) return std::make_unique<PlainWorker>(options, selection, *device, queue);
    return std::make_unique<StagedWorker>(options, selection, *device, queue, *link);
  }
  template <typename Visit>
  void visit_logs(Visit visit) {
    for (auto& worker : workers) visit(worker->log());
    visit(guest->log());
  }
};

Engine::Engine(EngineOptions options, std::shared_ptr<Device> device)
    : process_(process_id()), running_(std::make_shared<Running>()) {
  Running& running = *running_;
  running.selection = select_backend(options.backend, options.io, *device);
  if (options.io.queue_depth == 0) options.io.queue_depth = tuning::kQueueDepth;
  SegmentLimits& limits = running.segment_limits;
  limits.write_bytes = options.segment_bytes != 0 ? options.segment_bytes : default_write_segment_bytes(*device);
  if (options.segment_bytes == 0) options.segment_bytes = default_segment_bytes(*device);
  if (options.workers == 0) options.workers = default_workers(running.selection.name, *device, options.cores);
  if (options.io.bounce_bytes == 0) {
    options.io.bounce_bytes = std::max(default_bounce_bytes(options.workers), options.io.request_bytes + kRequestEdges);
  }
  check(options, limits.write_bytes, *device);
  FaultPlan::parse(options.io.faults);  // throws here, not in a worker
  limits.read_bytes = options.segment_bytes;
  limits.request_bytes = options.io.request_bytes;
  limits.workers = options.workers;
  if (device->host_addressable()) {
    limits.least_read_bytes /= options.workers + 1;  // the consumer copies too
    limits.least_moved_bytes = tuning::kLeastMovedBytes;
  }
  running.options = std::move(options);
  running.device = std::move(device);
  running.link = std::make_unique<Link>(*running.device);
  running.guest = std::make_unique<Guest>(running.options, *running.device, running.queue, *running.link);
  for (size_t i = 0; i < running.options.workers; ++i) running.workers.push_back(running.make_worker());
  running.working = running.workers.size();
  try {
    for (auto& worker : running.workers) {
      running.threads.emplace_back([shared = running_, &worker] {
        name_this_thread("gdsdata-worker");
        worker->run();
        std::lock_guard lock(shared->ended_mutex);
        --shared->working;
        shared->ended.notify_all();
      });
    }
  } catch (...) {  // no thread is available
    running.queue.close();
    for (std::thread& thread : running.threads) thread.join();
    throw;
  }
}

Engine::~Engine() {
  constexpr std::chrono::milliseconds kPatience{500};
  if (forked()) {
    // The child has no such threads, and their locks may be held forever. So this is leaked.
    new std::shared_ptr<Running>(std::move(running_));
    return;
  }
  running_->queue.close();
  std::unique_lock lock(running_->ended_mutex);
  const bool all_ended = running_->ended.wait_for(lock, kPatience, [this] { return running_->working == 0; });
  lock.unlock();
  for (std::thread& thread : running_->threads) {
    if (all_ended) {
      thread.join();
    } else {
      thread.detach();
    }
  }
}

const EngineOptions& Engine::options() const { return running_->options; }
const Selection& Engine::selection() const { return running_->selection; }
const std::shared_ptr<Device>& Engine::device() const { return running_->device; }

bool Engine::forked() const { return process_id() != process_; }

void Engine::submit(std::shared_ptr<Group> group, bool helped) {
  if (forked()) {
    throw Failure({ErrorCode::kClosed,
                   "this engine was made in process " + std::to_string(process_) +
                       " and does not work in its forked child; make the data set or engine in the child, or start "
                       "workers with the 'spawn' method"});
  }
  if (group->request().conversion != Conversion::kNone && group->request().checksum != Checksum::kNone) {
    throw Failure({ErrorCode::kInvalidArgument, "a read that converts elements has no checksums"});
  }
  const bool host_addressable = device()->host_addressable();
  try {
    std::vector<Segment> segments;
    for (const PartRange& range : group->begin(running_->segment_limits, host_addressable)) {
      segments.push_back({group, range, {}, {}, false});
    }
    running_->queue.push_fresh(segments, helped && (host_addressable || group->is_short()));
  } catch (...) {
    group->abort();
    throw;
  }
}

void Engine::hurry() {
  if (!forked()) running_->queue.hurry();
}

void Engine::prepare() {
  if (forked()) return;
  auto group = std::make_shared<Group>();
  group->edit().on_done = [] {};
  group->begin_empty(options().workers);
  std::vector<Segment> segments(options().workers, Segment{group, {}, {}, {}, false});
  running_->queue.push_fresh(segments);
}

bool Engine::help(Priority lowest) {
  if (!device()->host_addressable()) return false;
  std::unique_lock lock(running_->guest_mutex, std::try_to_lock);
  return lock && running_->guest->help(lowest);
}

bool Engine::help_with(const Group& group) {
  if (device()->host_addressable()) return help(group.request().priority);
  if (!group.is_short()) return false;
  std::unique_lock lock(running_->guest_mutex, std::try_to_lock);
  return lock && running_->guest->help_with(group);
}

void Engine::serve_at_once(const Group& group) noexcept {
  if (forked()) return;
  std::unique_lock lock(running_->guest_mutex, std::try_to_lock);
  const bool can_serve = lock && group.is_short() && all_done(group.request().before);
  if (!can_serve || !running_->guest->help_with(group, Guest::Copies::kMayStayInFlight)) {
    running_->queue.hurry();
  }
}

uint64_t Engine::progress_of(const Group& group) const {
  const uint64_t taken = group.requests_taken(), completed = group.requests_completed();
  uint64_t progress = taken + completed - group.open_segments();
  if (taken != completed) return progress;
  running_->visit_logs(
      [&](const WorkerLog& log) { progress += log.counters.exchanged.get() + log.counters.segments.get(); });
  return progress;
}

void Engine::run(std::shared_ptr<Group> group, const std::function<void()>& poll,
                 std::chrono::nanoseconds stall_timeout) {
  Pending pending(*this, std::move(group), {}, /*waits_now=*/true);
  StallClock clock(stall_timeout);
  bool has_stalled = false;
  const auto poll_and_time = [&] {
    if (poll) poll();
    has_stalled = clock.stalled(progress_of(pending.group()));
    if (has_stalled) throw Failure(stall_of(pending.group(), stall_timeout));
  };
  try {
    pending.wait(kForEver, poll_and_time);
  } catch (...) {
    pending.cancel();
    if (has_stalled) throw;
    pending.wait(kForEver);  // requests in flight use the caller's memory
    for (const auto& copy : pending.group().result().copies) copy->wait();
    throw;
  }
  pending.finish();
}

uint64_t Engine::bounce_bytes() const {
  const uint64_t of_workers = options().workers * options().io.bounce_bytes;
  if (device()->host_addressable()) return of_workers;
  return of_workers + options().workers * Staging::taken_at_most(options().staging_bytes) + Guest::kStagingBytes;
}

EngineStatistics Engine::statistics() const {
  std::vector<const WorkerCounters*> counters;
  running_->visit_logs([&](const WorkerLog& log) { counters.push_back(&log.counters); });
  return summarize(counters);
}

void Engine::begin_spans(size_t most_a_worker) {
  if (forked()) return;
  running_->visit_logs([&](WorkerLog& log) { log.spans.begin(most_a_worker); });
}

std::vector<Spans> Engine::end_spans() {
  std::vector<Spans> spans;
  if (forked()) return spans;
  running_->visit_logs([&](WorkerLog& log) { spans.push_back(log.spans.end()); });
  return spans;
}

}  // namespace gdsdata
