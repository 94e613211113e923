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
    uint32_t file = 0;  // index in the group's table
    Request request;
  };
  struct Exchange {
    std::span<Completion> completions;  // valid until the next exchange; pass each to `complete`
    bool moved = false;                 // whether the backend took or completed anything
    std::exception_ptr failure;         // of a submit; rethrow it after the completions are handled
  };

  // `fallback`, if not empty: the backend to use if no descriptors are left for the first one.
  Lane(std::string backend, std::string fallback, const BackendOptions& options, Device& device, WorkerLog& log);

  // Creates the backend at the first request, because a warm page cache needs none. Throws Failure.
  void make_backend_once();
  Capabilities capabilities() const { return backend_->capabilities(); }
  // Announces memory that the backend does not know yet. `memory` only grows.
  void expect_memory(const std::vector<std::span<std::byte>>& memory);

  void add(ActiveSegment& active, uint32_t file, Request request);
  size_t waiting() const { return waiting_.size(); }
  bool busy() const { return in_flight_ > 0 || !waiting_.empty(); }

  // Submits as many requests as the backend takes, reaps, and submits again before the completions
  // are handled, so that the disk does not wait. Waits for a completion up to `patience` (0: not at
  // all). If `queue` is not null and no requests wait here, a new segment ends the wait.
  Exchange exchange(std::chrono::milliseconds patience, SegmentQueue* queue);
  // Counts the completion, and returns its request.
  Asked complete(const Completion& completion);

  // Drops waiting requests of canceled groups, and calls `settle` for the segment of each.
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
  size_t expected_memory_ = 0;  // spans announced to the backend
  std::deque<Request> waiting_;
  size_t in_flight_ = 0;
  std::vector<Asked> asked_;  // by tag
  std::vector<uint64_t> free_tags_;
  std::vector<Completion> completions_;
  std::vector<Request> batch_;  // scratch
};

}  // namespace gdsdata
