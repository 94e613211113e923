// The engine: workers that take segments of groups and move their bytes. Start here.
//
//   Group --submit--> Segmentation --> SegmentQueue --> Worker: page cache, then coalesced requests to its Backend
//     --> the group's on_done
//
// A worker is plain (plain_worker.h) if the processor writes the batch's memory, else staged
// (staged_worker.h). The guest (guest.h) is the same work on the thread of a caller that waits. No
// system call stands in this folder: bytes move in backend/, memory comes from device/.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "backend/select.h"
#include "device/device.h"
#include "engine/group.h"
#include "engine/options.h"
#include "engine/spans.h"
#include "engine/statistics.h"

namespace gdsdata {

class Engine {
 public:
  // Throws Failure: options that make no sense (kInvalidArgument), a backend that does not work
  // here (kUnavailable).
  Engine(EngineOptions options, std::shared_ptr<Device> device);
  // Waits until all submitted groups have ended, but at most half a second if storage hangs: then
  // its workers end by themselves. In a forked child, which has no workers, it releases nothing.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Never blocks. Throws Failure (kClosed) in a forked child. `helped`: the caller calls `help` at
  // once.
  void submit(std::shared_ptr<Group> group, bool helped = false);
  // Submits and waits until every byte is in place; throws the group's error as Failure. Calls
  // `poll` now and then while it waits. If `poll` throws, it cancels the group, waits for what is
  // in flight and rethrows. If nothing moves for `stall_timeout` (0: no limit), it throws kStalled:
  // the group may then still write its memory.
  void run(std::shared_ptr<Group> group, const std::function<void()>& poll = {},
           std::chrono::nanoseconds stall_timeout = {});

  // A number that changes whenever something moves that the group waits for: a backend takes or
  // completes one of its requests, or one of its segments ends. While no backend has a request of
  // it, it waits for its turn, and the progress of all groups counts.
  uint64_t progress_of(const Group& group) const;

  // Wakes workers for groups that were submitted as patient, or as helped: somebody is about to
  // sleep until they end.
  void hurry();

  // Has idle workers allocate now what they otherwise allocate at their first segment: pinned
  // memory for copies to the device, or, if the processor writes the device, their backend. Never
  // blocks; that segment gets the error, if any.
  void prepare();

  // Does a piece of the workers' work, of no lower priority, on the calling thread: copies a
  // segment out of the page cache. Returns false if there is no such segment, or if the processor
  // cannot write the device. For a consumer that would otherwise sleep until it is woken.
  bool help(Priority lowest = Priority::kTraining);
  // The same for a caller that waits for this group. If the processor cannot write the device, it
  // serves a short read out of the page cache through staging memory; the bytes are then in the
  // device's memory.
  bool help_with(const Group& group);

  const EngineOptions& options() const;
  const Selection& selection() const;
  const std::shared_ptr<Device>& device() const;
  uint64_t bounce_bytes() const;  // host memory that it allocates at most
  EngineStatistics statistics() const;
  // Records what each worker does from now on, up to so many spans a worker.
  void begin_spans(size_t most_a_worker);
  // One for each worker, and the last one for the guest.
  std::vector<Spans> end_spans();
  bool forked() const;

 private:
  struct Running;  // workers and what they share; outlives this while a worker still runs
  const int64_t process_;
  std::shared_ptr<Running> running_;
};

}  // namespace gdsdata
