// A backend and the requests that wait for room in it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "engine/active_segment.h"
#include "engine/options.h"
#include "engine/segment_queue.h"

namespace gdsdata {

class Lane {
 public:
  struct Asked {
    ActiveSegment* active = nullptr;
    uint32_t file = 0;  // its index in the group's table
    Request request;
  };
  struct Exchange {
    std::span<Completion> completions;  // until the next exchange; pass each to `complete`
    bool moved = false;                 // whether the backend took or completed anything
    std::exception_ptr failure;         // of a submit; rethrow it when the completions are handled
  };

  // `fallback`, if not empty: the backend that serves if the process has no descriptors for this
  // one.
  Lane(std::string backend, std::string fallback, const BackendOptions& options, Device& device, WorkerLog& log);

  // A warm page cache needs no backend, so the first request makes it. Throws Failure.
  void make_backend_once();
  Capabilities capabilities() const { return backend_->capabilities(); }
  // Names memory to the backend that it does not know yet: `memory` only grows.
  void expect_memory(const std::vector<std::span<std::byte>>& memory);

  void add(ActiveSegment& active, uint32_t file, Request request);
  size_t waiting() const { return waiting_.size(); }
  bool busy() const { return in_flight_ > 0 || !waiting_.empty(); }

  // Submits what the backend takes, collects completions, and submits again before ends are
  // reported: the disk does not wait for that. Waits for a completion up to `patience` (0: not at
  // all). `queue`, if not null: a new segment ends the wait, unless requests wait here.
  Exchange exchange(std::chrono::milliseconds patience, SegmentQueue* queue);
  // Counts the completion, and returns what was asked for.
  Asked complete(const Completion& completion);

  // Drops waiting requests of groups that were canceled, and calls `settle` on the segment of each.
  template <typename Settle>
  void drop_cancelled(Settle settle) {
    std::erase_if(waiting_, [&](const Request& request) {
      ActiveSegment& active = *asked_[request.tag].active;
      if (!active.group().cancelled()) return false;
      drop(request);
      settle(active);
      return true;
    });
  }
  void drop_waiting();

 private:
  void drop(const Request& request);
  size_t submit();
  size_t reap(size_t min, std::chrono::milliseconds patience, SegmentQueue* queue);

  const std::string name_, fallback_;
  const BackendOptions& options_;
  Device& device_;
  WorkerLog& log_;
  std::unique_ptr<Backend> backend_;
  size_t expected_memory_ = 0;  // pieces that the backend knows
  std::deque<Request> waiting_;
  size_t in_flight_ = 0;
  std::vector<Asked> asked_;  // by tag
  std::vector<uint64_t> free_tags_;
  std::vector<Completion> completions_;
  std::vector<Request> batch_;  // scratch
};

}  // namespace gdsdata
