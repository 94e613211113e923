#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <utility>

#include "backend/faulty.h"
#include "base/crc32.h"
#include "base/extent_math.h"
#include "engine/link.h"
#include "engine/segmentation.h"
#include "engine/staging.h"
#include "engine/worker.h"

namespace gdsdata {

namespace {

// Memory of shorter batches is written again and again, and read soon: it stays in the processor's caches. So does
// staging memory, whatever the batch (docs/design-decisions.md).
constexpr uint64_t kPastCachesBytes = 16 << 20;

// A request may reach one block beyond its range on either side.
constexpr uint64_t kRequestEdges = 2 * 65536;

void check(const EngineOptions& options, const Device& device) {
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
  const uint64_t longest_segment =
      Staging::most_bytes(longest_part_bytes(options.segment_bytes, options.io.request_bytes) + kCutBytes);
  if (!device.host_addressable() && options.staging_bytes < longest_segment) {
    refuse("staging_bytes must be at least " + std::to_string(longest_segment) +
           ", to hold one segment of these segment_bytes and request_bytes");
  }
  if (options.workers > 256) refuse("workers must be at most 256");
}

constexpr size_t kDefaultQueueDepth = 64;

// What a copy to a GPU costs besides its bytes is spread over this: 44 GB/s at 1 MiB, 50 at 4
// (docs/design-decisions.md).
uint64_t default_segment_bytes(const Device& device) { return device.host_addressable() ? 1 << 20 : 4 << 20; }

// Requests that are submitted together are joined by the kernel, and a virtual disk writes long ones a fifth faster
// (docs/design-decisions.md). What is staged has to fit into staging memory, twice and more.
uint64_t default_write_segment_bytes(const Device& device) { return device.host_addressable() ? 8 << 20 : 4 << 20; }

// With io_uring one worker keeps a disk busy, and several are for copying out of the page cache, where the
// consumer helps: a core is left to it. With posix a worker has one request in flight, so a disk wants many.
size_t default_workers(const std::string& backend) {
  const size_t cores = std::max(1U, std::thread::hardware_concurrency());
  return backend == "uring" ? std::clamp<size_t>(cores - 1, 1, 8) : 8;
}

constexpr std::chrono::nanoseconds kForEver = std::chrono::hours(24 * 365);

// So much on its way, or of writes half of it and the other half ready, keeps a disk busy while a worker copies: with
// 16 MiB a single one's saves took an eighth to a third longer than with 64, and its reads an eighth
// (docs/design-decisions.md).
uint64_t default_bounce_bytes(size_t workers) { return std::max<uint64_t>((64 << 20) / workers, 16 << 20); }

Error stall_of(const Group& group, std::chrono::nanoseconds timeout) {
  const Transfer& first = group.transfers.front();  // one without transfers does not wait for storage
  const std::string& path = group.files->path(first.file);
  const std::string what = group.direction == Direction::kRead ? "read" : "write";
  const size_t others = group.transfers.size() - 1;
  return {ErrorCode::kStalled,
          "no " + what + " has ended for " + std::to_string(timeout.count() / 1'000'000) +
              " ms; this call waits for '" + path + "' at offset " + std::to_string(first.offset) +
              (others > 0 ? " and " + std::to_string(others) + " other ranges" : "") +
              ". Is its storage still reachable? stall_timeout_s raises the limit",
          path, first.offset, first.length};
}

}  // namespace

Events Group::copies() const {
  Events events;
  add_copies(events);
  return events;
}

void Group::add_copies(Events& events) const {
  for (const auto& [stream, event] : copied_) events.push_back(event);
}

std::vector<uint32_t> Group::checksums() const {
  std::vector<uint32_t> joined;
  const std::vector<Transfer>& parts = segmentation_.parts;
  size_t part = 0;
  for (const Transfer& transfer : transfers) {
    uint32_t sum = 0;  // of no bytes
    for (uint64_t done = 0; done < transfer.length; done += parts[part++].length) {
      const uint32_t of_part = part_checksums_[part];
      sum = done == 0 ? of_part : joined_checksums(checksum, sum, of_part, parts[part].length);
    }
    joined.push_back(sum);
  }
  return joined;
}

void Group::copied_by(const Stream* stream, std::shared_ptr<Event> copied) {
  std::lock_guard lock(mutex_);
  const auto of_stream = [&](const auto& entry) { return entry.first == stream; };
  const auto last = std::find_if(copied_.begin(), copied_.end(), of_stream);
  if (last == copied_.end()) {
    copied_.emplace_back(stream, std::move(copied));
  } else {
    last->second = std::move(copied);
  }
}

void Group::segment_ended(const RouteBytes& segment_bytes, std::optional<Error> segment_error) {
  {
    std::lock_guard lock(mutex_);
    bytes += segment_bytes;
    if (segment_error) {
      if (!error) error = std::move(segment_error);
      cancel();
    }
  }
  if (open_segments_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const auto done = std::move(on_done);  // from here on the owner may fill the group again
  done();
}

void SegmentQueue::push_fresh(std::vector<Segment>& segments, bool helped) {
  size_t to_wake = 0;
  {
    std::lock_guard lock(mutex_);
    const Group& group = *segments.front().group;
    const bool patient = group.patient;
    auto& fresh = of(group.priority).fresh;
    size_t pushed = 0;
    try {
      for (; pushed < segments.size(); ++pushed) fresh.push_back(std::move(segments[pushed]));
    } catch (...) {
      fresh.resize(fresh.size() - pushed);
      throw;
    }
    to_wake = claim_workers(patient ? 1 : waiting_segments() - (helped ? 1 : 0));
  }
  segments.clear();
  wake(to_wake);
}

void SegmentQueue::hurry() {
  size_t to_wake = 0;
  {
    std::lock_guard lock(mutex_);
    to_wake = claim_workers(waiting_segments());
  }
  wake(to_wake);
}

size_t SegmentQueue::waiting_segments() const {
  size_t count = 0;
  for (const Waiting& waiting : waiting_segments_) count += waiting.size();
  return count;
}

void SegmentQueue::push_for_storage(Segment&& segment) {
  size_t to_wake = 0;
  {
    std::lock_guard lock(mutex_);
    of(segment.group->priority).for_storage.push_back(std::move(segment));
    to_wake = claim_workers(1);
  }
  wake(to_wake);
}

size_t SegmentQueue::claim_workers(size_t segments) {
  const size_t idle = std::min(waiting_workers_, segments);
  for (size_t rest = segments - idle; rest > 0 && !sleeping_.empty(); --rest) {
    sleeping_.back()->interrupt();
    sleeping_.pop_back();
  }
  return idle;
}

bool SegmentQueue::sleeps(Backend& backend) {
  std::lock_guard lock(mutex_);
  if (std::any_of(waiting_segments_.begin(), waiting_segments_.end(), [](const auto& of) { return !of.empty(); })) {
    return false;
  }
  sleeping_.push_back(&backend);
  return true;
}

void SegmentQueue::wakes(Backend& backend) {
  std::lock_guard lock(mutex_);
  std::erase(sleeping_, &backend);
}

void SegmentQueue::wake(size_t workers) {
  for (; workers > 0; --workers) filled_.notify_one();
}

Segment SegmentQueue::take_from(std::deque<Segment>& segments) {
  Segment segment = std::move(segments.front());
  segments.pop_front();
  return segment;
}

bool SegmentQueue::pop(Segment& segment, bool wait) {
  Waiting &training = of(Priority::kTraining), &background = of(Priority::kBackground);
  std::unique_lock lock(mutex_);
  const auto filled = [&] { return !training.empty() || !background.empty(); };
  if (wait && !filled()) {
    ++waiting_workers_;
    filled_.wait(lock, [&] { return filled() || closed_; });
    --waiting_workers_;
  }
  return take_next(segment);
}

bool SegmentQueue::pop_spare(Segment& segment) {
  std::lock_guard lock(mutex_);
  return waiting_workers_ == 0 && take_next(segment);
}

bool SegmentQueue::take_next(Segment& segment) {
  Waiting &training = of(Priority::kTraining), &background = of(Priority::kBackground);
  if (training.empty() && background.empty()) return false;
  Waiting* next = &training;
  if (!background.empty() && (training.empty() || ++passed_over_ > kPassedOver)) {
    passed_over_ = 0;
    next = &background;
  }
  segment = take_from(next->for_storage.empty() ? next->fresh : next->for_storage);
  return true;
}

bool SegmentQueue::pop_fresh(Segment& segment, Priority lowest) {
  std::lock_guard lock(mutex_);
  auto& training = of(Priority::kTraining).fresh;
  auto& fresh = training.empty() && lowest == Priority::kBackground ? of(Priority::kBackground).fresh : training;
  if (fresh.empty()) return false;
  segment = take_from(fresh);
  return true;
}

bool SegmentQueue::pop_fresh_of(const Group& group, Segment& segment) {
  std::lock_guard lock(mutex_);
  auto& fresh = of(group.priority).fresh;
  const auto found =
      std::find_if(fresh.begin(), fresh.end(), [&](const Segment& s) { return s.group.get() == &group; });
  if (found == fresh.end()) return false;
  segment = std::move(*found);
  fresh.erase(found);
  return true;
}

void SegmentQueue::close() {
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
  }
  filled_.notify_all();
}

struct Engine::Running {
  EngineOptions options;
  std::shared_ptr<Device> device;
  Selection selection;
  SegmentQueue queue;
  std::unique_ptr<Link> link;
  std::mutex guest_mutex;
  std::unique_ptr<Worker> guest;  // without a thread: whoever helps borrows it
  std::vector<std::unique_ptr<Worker>> workers;
  SegmentLimits segment_limits;
  std::vector<std::thread> threads;
  std::mutex ended_mutex;
  std::condition_variable ended;
  size_t working = 0;
};

Engine::Engine(EngineOptions options, std::shared_ptr<Device> device)
    : process_(process_id()), running_(std::make_shared<Running>()) {
  Running& running = *running_;
  running.selection = select_backend(options.backend, options.io, *device);
  if (options.io.queue_depth == 0) options.io.queue_depth = kDefaultQueueDepth;
  if (options.segment_bytes == 0) {
    options.segment_bytes = default_segment_bytes(*device);
    running.segment_limits.write_bytes = default_write_segment_bytes(*device);
  } else {
    running.segment_limits.write_bytes = options.segment_bytes;
  }
  if (options.workers == 0) options.workers = default_workers(running.selection.name);
  if (options.io.bounce_bytes == 0) {
    options.io.bounce_bytes = std::max(default_bounce_bytes(options.workers), options.io.request_bytes + kRequestEdges);
  }
  check(options, *device);
  FaultPlan::parse(options.io.faults);  // a typing error is told now, not by a worker
  running.segment_limits.read_bytes = options.segment_bytes;
  running.segment_limits.request_bytes = options.io.request_bytes;
  running.segment_limits.workers = options.workers;
  running.options = std::move(options);
  running.device = std::move(device);
  running.link = std::make_unique<Link>(*running.device);
  const auto make_worker = [&](bool is_guest) {
    return std::make_unique<Worker>(running.options, running.selection, *running.device, running.queue, *running.link,
                                    is_guest);
  };
  running.guest = make_worker(true);
  for (size_t i = 0; i < running.options.workers; ++i) running.workers.push_back(make_worker(false));
  running.working = running.workers.size();
  try {
    for (auto& worker : running.workers) {
      running.threads.emplace_back([shared = running_, &worker] {
        worker->run();
        std::lock_guard lock(shared->ended_mutex);
        --shared->working;
        shared->ended.notify_all();
      });
    }
  } catch (...) {  // no more threads are to be had
    running.queue.close();
    for (std::thread& thread : running.threads) thread.join();
    throw;
  }
}

Engine::~Engine() {
  constexpr std::chrono::milliseconds kPatience{500};
  if (forked()) {
    // The threads are not here, their locks may be held for ever: nothing of it can be used or freed.
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
  group->error.reset();
  group->bytes = {};
  group->abandoned_ = false;
  group->copied_.clear();
  group->requests_given_ = group->requests_completed_ = 0;
  segment(group->transfers, group->direction, group->conversion, running_->segment_limits, group->segmentation_);
  const uint64_t group_bytes = group->segmentation_.bytes;
  group->is_short_ = group->direction == Direction::kRead && group_bytes <= kShortReadBytes;
  group->past_caches_ = device()->host_addressable() && group_bytes >= kPastCachesBytes;
  group->part_checksums_.assign(group->checksum != Checksum::kNone ? group->segmentation_.parts.size() : 0, 0);
  std::vector<Segment> segments;
  for (const PartRange& range : group->segmentation_.segments) segments.push_back({group, range, {}, {}, false});
  group->open_segments_ = segments.size();
  running_->queue.push_fresh(segments, helped && (device()->host_addressable() || group->is_short_));
}

void Engine::hurry() {
  if (!forked()) running_->queue.hurry();
}

void Engine::prepare() {
  if (forked()) return;
  auto group = std::make_shared<Group>();  // of nothing
  group->on_done = [] {};
  std::vector<Segment> segments(options().workers, Segment{group, {}, {}, {}, false});
  group->open_segments_ = segments.size();
  running_->queue.push_fresh(segments);
}

bool Engine::help(Priority lowest) {
  if (!device()->host_addressable()) return false;
  std::unique_lock lock(running_->guest_mutex, std::try_to_lock);
  return lock && running_->guest->help(lowest);
}

bool Engine::help_with(const Group& group) {
  if (device()->host_addressable()) return help(group.priority);
  if (!group.is_short_) return false;
  std::unique_lock lock(running_->guest_mutex, std::try_to_lock);
  return lock && running_->guest->help_with(group);
}

bool StallClock::stalled(uint64_t progress) {
  const auto now = Clock::now();
  if (progress != progress_) {
    progress_ = progress;
    moved_ = now;
  }
  return timeout_.count() > 0 && now - moved_ >= timeout_;
}

uint64_t Engine::progress_of(const Group& group) const {
  const uint64_t given = group.requests_given_.load(std::memory_order_relaxed);
  const uint64_t completed = group.requests_completed_.load(std::memory_order_relaxed);
  uint64_t progress = given + completed - group.open_segments_.load(std::memory_order_relaxed);
  if (given != completed) return progress;
  const auto count = [&](const Worker& worker) {
    progress += worker.counters().exchanged.get() + worker.counters().segments.get();
  };
  count(*running_->guest);
  for (const auto& worker : running_->workers) count(*worker);
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
    // What is in flight still uses the caller's memory: wait for it.
    pending.wait(kForEver);
    for (const auto& copy : pending.group().copies()) copy->wait();
    throw;
  }
  pending.finish();
}

Pending::Pending(Engine& engine, std::shared_ptr<Group> group, std::function<void()> on_end, bool waits_now)
    : engine_(engine), group_(std::move(group)) {
  group_->on_done = [state = state_, on_end = std::move(on_end)] {
    {
      const std::lock_guard lock(state->mutex);
      state->ended.store(true, std::memory_order_release);
      state->changed.notify_all();
    }
    if (on_end) on_end();
  };
  engine_.submit(group_, waits_now);
}

bool Pending::wait(std::chrono::nanoseconds patience, const std::function<void()>& poll) {
  constexpr std::chrono::milliseconds kPollInterval{50};
  if (engine_.forked()) return false;  // nothing ends here, and locks may be held for ever
  const auto begun = std::chrono::steady_clock::now();
  auto polled = begun;
  const auto left = [&](auto now) { return patience - (now - begun); };
  const auto poll_once = [&](auto now) {
    if (poll && now - polled >= kPollInterval) {
      polled = now;
      poll();
    }
  };
  while (!ended() && engine_.help_with(*group_)) {  // rather than sleep
    const auto now = std::chrono::steady_clock::now();
    poll_once(now);
    if (left(now).count() <= 0) return ended();
  }
  if (!ended()) engine_.hurry();  // what cannot be helped with: writes, or others help
  std::unique_lock lock(state_->mutex);
  while (!ended()) {
    const auto now = std::chrono::steady_clock::now();
    if (left(now).count() <= 0) return false;
    state_->changed.wait_for(lock, std::min<std::chrono::nanoseconds>(left(now), kPollInterval));
    lock.unlock();
    poll_once(std::chrono::steady_clock::now());
    lock.lock();
  }
  return true;
}

void Pending::finish() {
  for (const auto& copy : group_->copies()) group_->is_short_ ? wait_soon(*copy) : copy->wait();
  if (group_->error) throw Failure(*group_->error);
}

uint64_t Engine::bounce_bytes() const {
  const uint64_t of_workers = options().workers * options().io.bounce_bytes;
  if (device()->host_addressable()) return of_workers;
  return of_workers + options().workers * Staging::taken_at_most(options().staging_bytes) + Worker::kGuestStagingBytes;
}

EngineStatistics Engine::statistics() const {
  std::vector<const WorkerCounters*> counters;
  counters.push_back(&running_->guest->counters());
  for (const auto& worker : running_->workers) counters.push_back(&worker->counters());
  return summarize(counters);
}

void Engine::begin_spans(size_t most_a_worker) {
  if (forked()) return;
  for (auto& worker : running_->workers) worker->spans().begin(most_a_worker);
  running_->guest->spans().begin(most_a_worker);
}

std::vector<Spans> Engine::end_spans() {
  std::vector<Spans> spans;
  if (forked()) return spans;
  for (auto& worker : running_->workers) spans.push_back(worker->spans().end());
  spans.push_back(running_->guest->spans().end());
  return spans;
}

}  // namespace gdsdata
