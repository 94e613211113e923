// One worker: a thread's loop around one backend.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <vector>

#include "backend/page_cache.h"
#include "base/extent_math.h"
#include "engine/engine.h"

namespace gdsdata {

class Worker {
 public:
  Worker(const EngineOptions& options, const std::string& backend_name, Device& device, SegmentQueue& queue);

  // Until the queue is closed and what was taken has ended.
  void run();
  // Takes one fresh segment, serves it from memory and queues the rest of it for storage; false where there
  // is none. For a worker that does not run.
  bool help();

  const WorkerCounters& counters() const { return counters_; }

 private:
  using Clock = std::chrono::steady_clock;

  // A segment of which some requests are with the backend, or wait for room there.
  struct Active {
    Segment segment;
    Clock::time_point started;
    std::vector<std::shared_ptr<File>> files;  // kept open; the last one is of index last_file
    uint32_t last_file = 0;
    std::vector<Piece> pieces;
    size_t open_requests = 0;
    RouteBytes bytes;
    std::optional<Error> error;

    File& file(uint32_t index);  // throws Failure
  };

  Active& begin(Segment segment);
  // Asks the page cache, once for a segment; what only storage has is in left_ then.
  void serve_from_memory(Active& active);
  std::optional<Error> open_files(Active& active, std::span<const Transfer> parts);
  void request(Active& active);
  void exchange(bool idle);
  void drop_abandoned();
  void end(Active& active);
  void retire(Active& active);
  bool make_backend_once(Active& active);

  const EngineOptions& options_;
  const std::string backend_name_;
  Device& device_;
  SegmentQueue& queue_;
  PageCache page_cache_;
  std::unique_ptr<Backend> backend_;  // made when first needed: a warm page cache needs no bounce memory
  WorkerCounters counters_;

  std::deque<Request> waiting_;    // for room in the backend
  size_t in_flight_ = 0;
  std::vector<Active*> by_tag_;    // whose request it is
  std::vector<uint64_t> free_tags_;
  std::vector<std::unique_ptr<Active>> actives_;
  std::vector<Active*> idle_actives_;

  // Scratch, kept for its capacity.
  std::vector<File*> part_files_;
  std::vector<Transfer> left_;
  std::vector<Range> ranges_;
  std::vector<Completion> completions_;
  std::vector<Request> batch_;
};

}  // namespace gdsdata
