// The engine: workers that take segments of groups and move their bytes. Start here.
//
//   Group (transfers) --submit--> queue of segments --> Worker: page cache, then coalesced requests to its
//   Backend --> group's on_done
//
// No system call stands in this folder: bytes move in backend/, memory comes from device/.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "backend/select.h"
#include "device/device.h"
#include "engine/group.h"
#include "engine/spans.h"
#include "engine/statistics.h"

namespace gdsdata {

struct EngineOptions {
  std::string backend = "auto";
  size_t workers = 0;                    // 0: as many as serve the backend best
  uint64_t segment_bytes = 0;            // what a worker takes at a time; 0: what serves the device best
  uint64_t staging_bytes = 13 << 20;     // of each worker, on the way to a device that the processor cannot write
  uint64_t coalesce_gap_bytes = 16384;   // neighbours at most so far apart become one request
  BackendOptions io;                     // of each worker's backend
};

// First in, first out; segments that only storage can serve come before fresh ones, for they have waited, and
// training's before those in the background, which get every ninth turn at least, so that they end too.
class SegmentQueue {
 public:
  // Takes them all, at least one, of one group; none if it throws. `helped`: somebody pops one of them at once.
  void push_fresh(std::vector<Segment>& segments, bool helped = false);
  void push_for_storage(Segment&& segment);  // leaves it alone if it throws
  void hurry();  // segments that a push has left without a worker get one
  // Waits when asked to; false when there is none (or, waiting, when the queue was closed).
  bool pop(Segment& segment, bool wait);
  bool pop_spare(Segment& segment);  // one that no worker waits for
  bool pop_fresh(Segment& segment, Priority lowest);
  bool pop_fresh_of(const Group& group, Segment& segment);
  // A worker that could take a segment is about to wait for its backend: false where there is one to take. What comes
  // until `wakes` interrupts the backend, if no other worker waits for it.
  bool sleeps(Backend& backend);
  void wakes(Backend& backend);
  void close();

 private:
  static constexpr size_t kPassedOver = 8;
  // With the lock: how many idle workers are to be woken for so many segments; backends are interrupted for the others.
  size_t claim_workers(size_t segments);
  void wake(size_t workers);
  struct Waiting {
    std::deque<Segment> for_storage;  // go first: their groups are the oldest
    std::deque<Segment> fresh;
    size_t size() const { return for_storage.size() + fresh.size(); }
    bool empty() const { return size() == 0; }
  };
  Waiting& of(Priority priority) { return waiting_segments_[static_cast<size_t>(priority)]; }
  bool take_next(Segment& segment);
  size_t waiting_segments() const;
  static Segment take_from(std::deque<Segment>& segments);
  std::mutex mutex_;
  std::condition_variable filled_;
  std::array<Waiting, 2> waiting_segments_;  // by priority
  size_t passed_over_ = 0;                    // turns that the background has waited
  size_t waiting_workers_ = 0;
  std::vector<Backend*> sleeping_;  // backends that are waited for
  bool closed_ = false;
};

// Tells storage that gives nothing from storage that is slow: a wait asks it now and then. One thread uses it.
class StallClock {
 public:
  // The timeout counts from now; 0: never.
  explicit StallClock(std::chrono::nanoseconds timeout) : timeout_(timeout) {}
  // Whether this number (see Engine::progress_of) has not changed for the timeout.
  bool stalled(uint64_t progress);

 private:
  using Clock = std::chrono::steady_clock;
  const std::chrono::nanoseconds timeout_;
  Clock::time_point moved_ = Clock::now();
  uint64_t progress_ = 0;
};

class Worker;
class Engine;

// A group on its way, for whoever waits for it. Goes before the group's memory does: `ended` tells when that may be.
class Pending {
 public:
  // Submits it. `on_end`, if any, is called once when it has ended, on the worker that ended it; must not block. Who
  // calls `wait` at once says so by `waits_now`: then it does a worker's work, and wakes one less.
  Pending(Engine& engine, std::shared_ptr<Group> group, std::function<void()> on_end = {}, bool waits_now = false);
  bool ended() const { return state_->ended.load(std::memory_order_acquire); }
  // Until it has ended, or `patience` is over: whether it has; false at once in a forked child. Does the workers' work
  // meanwhile. `poll` is called now and then, and what it throws is thrown on, with the group still on its way.
  bool wait(std::chrono::nanoseconds patience, const std::function<void()>& poll = {});
  // When it has ended: waits for its copies to the device, and throws the group's error as Failure.
  void finish();
  void cancel() { group_->cancel(); }
  const Group& group() const { return *group_; }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::atomic<bool> ended{false};
  };
  Engine& engine_;
  const std::shared_ptr<Group> group_;
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

class Engine {
 public:
  // Throws Failure: options that make no sense (kInvalidArgument), a backend that is not to be had (kUnavailable).
  Engine(EngineOptions options, std::shared_ptr<Device> device);
  // Waits for what was submitted to end, but not for storage that hangs: after half a second its workers are
  // left to end by themselves. In a forked child, which has no workers, it lets go of everything.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Never blocks. The group is alive until its on_done has been called. Throws Failure (kClosed) in a
  // forked child. `helped`: the caller calls `help` at once.
  void submit(std::shared_ptr<Group> group, bool helped = false);
  // Submits and waits until every byte is in place; throws the group's error as Failure. Calls `poll` now and then
  // while it waits; when that throws, what has not started is cancelled, and it is thrown on. If nothing moves for
  // `stall_timeout` (0: however long), it throws kStalled: the group may then still touch its memory.
  void run(std::shared_ptr<Group> group, const std::function<void()>& poll = {},
           std::chrono::nanoseconds stall_timeout = {});

  // A number that changes whenever something moves that the group waits for: a backend takes or completes one of its
  // requests, or a segment of it ends. While no backend has a request of it, it waits for its turn, and the progress of
  // all groups counts.
  uint64_t progress_of(const Group& group) const;

  // Somebody is about to sleep until groups end that were submitted as patient, or as helped.
  void hurry();

  // Has workers that have nothing to do take the memory that they else take when their first segment comes: what copies
  // to the device need, which the driver is slow to give, or where the processor writes the device, what a backend
  // needs. Never blocks; an error comes with that segment.
  void prepare();

  // Does a piece of the workers' work, of no lower priority, on the calling thread: copies a segment out of the page
  // cache. False where there is nothing of that kind to do, or the processor cannot write the device. For consumers
  // that would otherwise sleep, and be woken.
  bool help(Priority lowest = Priority::kTraining);
  // The same for who waits for a group. Where the processor cannot write the device, that is a short read, which comes
  // out of the page cache by way of staging memory for this, and is in the device's memory then.
  bool help_with(const Group& group);

  const EngineOptions& options() const;
  const Selection& selection() const;
  const std::shared_ptr<Device>& device() const;
  uint64_t bounce_bytes() const;  // host memory that it takes at most
  EngineStatistics statistics() const;
  // What its workers do from now on is kept, up to so many spans of each.
  void begin_spans(size_t most_a_worker);
  // Of each worker, and last of whoever lent its thread.
  std::vector<Spans> end_spans();
  bool forked() const;

 private:
  struct Running;  // workers and what they share; outlives this while one still works
  const int64_t process_;
  std::shared_ptr<Running> running_;
};

}  // namespace gdsdata
