// The engine: workers that take segments of groups and move their bytes. Start here.
//
//   Group --submit--> Segmentation --> SegmentQueue --> Worker: page cache, then coalesced requests to its Backend
//     --> the group's on_done
//
// A worker is plain (plain_worker.h) if the processor can write the batch's memory, and staged
// (staged_worker.h) if not. The guest (guest.h) does the same work on the thread of a waiting
// caller. This folder makes no system calls: backend/ moves bytes, and device/ allocates memory.
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
  // Throws Failure: kInvalidArgument for invalid options, kUnavailable if no backend works here.
  Engine(EngineOptions options, std::shared_ptr<Device> device);
  // Waits until all submitted groups have ended, but at most 0.5 s if storage hangs: its workers
  // then end by themselves. In a forked child, which has no workers, it releases nothing.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Never blocks. Throws Failure (kClosed) in a forked child. `helped`: the caller calls
  // `help_with` at once.
  void submit(std::shared_ptr<Group> group, bool helped = false);
  // Submits and waits until every byte is in place. Throws the group's error as Failure. Calls
  // `poll` regularly while it waits. If `poll` throws, it cancels the group, waits for requests in
  // flight and rethrows. If nothing moves for `stall_timeout` (0: no limit), it throws kStalled,
  // and the group may still write its memory.
  void run(std::shared_ptr<Group> group, const std::function<void()>& poll = {},
           std::chrono::nanoseconds stall_timeout = {});

  // A number that changes whenever something moves that the group waits for: a backend takes or
  // completes one of its requests, or one of its segments ends. While no backend has a request of
  // it, it waits for its turn. Then the progress of all groups counts.
  uint64_t progress_of(const Group& group) const;

  // Wakes workers for patient or helped groups. Call it before you sleep until they end.
  void hurry();

  // Makes idle workers allocate now what they would otherwise allocate at their first segment:
  // pinned memory for copies to the device or, if the processor writes the device, their backend.
  // Never blocks. An error is reported at that segment.
  void prepare();

  // Copies one segment from the page cache on the calling thread, of priority `lowest` or higher.
  // Returns false if there is no such segment, or if the processor cannot write the device. For a
  // consumer that would otherwise sleep.
  bool help(Priority lowest = Priority::kTraining);
  // The same for a caller that waits for this group. If the processor cannot write the device, this
  // serves a short read from the page cache through staging memory. The bytes are in the device's
  // memory when it returns.
  bool help_with(const Group& group);
  // Call it after `submit` with `helped`. Serves a short read on the calling thread, if the page
  // cache has it and no work of the device delays its copy. Else wakes a worker.
  void serve_at_once(const Group& group) noexcept;

  const EngineOptions& options() const;
  const Selection& selection() const;
  const std::shared_ptr<Device>& device() const;
  uint64_t bounce_bytes() const;  // the most host memory that it allocates
  EngineStatistics statistics() const;
  // Records each worker's actions from now on, up to so many spans for each.
  void begin_spans(size_t most_a_worker);
  // One for each worker, and the last one for the guest.
  std::vector<Spans> end_spans();
  bool forked() const;

 private:
  struct Running;  // workers and their shared state; outlives this while a worker runs
  const int64_t process_;
  std::shared_ptr<Running> running_;
};

}  // namespace gdsdata
