// One worker: a thread's loop around its backends. Both kinds of worker share this part.
//
//   queue --take--> start --> rounds: page cache, then requests in a lane --> settle: next round, or end
//
// PlainWorker moves bytes between files and memory that the processor can write. StagedWorker adds
// the way through staging memory to a device.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <vector>

#include "backend/select.h"
#include "engine/active_segment.h"
#include "engine/lane.h"
#include "engine/options.h"
#include "engine/request_maker.h"
#include "engine/round_reader.h"
#include "engine/segment_queue.h"
#include "engine/worker_log.h"

namespace gdsdata {

class Worker {
 public:
  virtual ~Worker() = default;
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Returns when the queue is closed and all taken segments have ended. An exception ends them.
  void run() noexcept;
  WorkerLog& log() { return log_; }

 protected:
  // A worker that waits for its disk checks the loop this often. Nothing depends on the value.
  static constexpr std::chrono::milliseconds kReapTimeout{100};

  Worker(const EngineOptions& options, const Selection& selection, Device& device, SegmentQueue& queue);

  // --- The two kinds differ in these ---

  // One turn of the loop. Returns false if the queue is closed and no work is left.
  virtual bool turn() = 0;
  // Returns false if there is no memory for the segment yet: call it again later.
  virtual bool start(ActiveSegment& active) = 0;
  // Requests what the page cache lacks of a round, `left_`, and those of its parts that a backend
  // moves to the device.
  virtual void request_reads(ActiveSegment& active, std::span<Transfer> to_device) = 0;
  virtual void end(ActiveSegment& active) = 0;
  // After an exception: drops waiting work, so that only requests in flight are left.
  virtual void drop_waiting() noexcept = 0;
  // At the end of the loop: waits for copies that use this worker's memory.
  virtual void wait_for_copies() noexcept {}
  // Segments hold files open only while they have requests.
  virtual bool holds_files() const { return lane_.busy(); }
  // Returns true if it repeats a failed request in another way.
  virtual bool retries(const Lane&, const Lane::Asked&, const Error&) { return false; }

  // --- Steps of a turn ---

  // Takes the next segment of the queue, or returns null. If `wait`, waits until there is one or
  // the queue is closed.
  ActiveSegment* take(bool wait);
  // Starts more segments while that makes more requests for one submit. Returns a segment that
  // could not start, or null.
  ActiveSegment* gather();
  void read_on(ActiveSegment& active);
  void read_unfinished();
  void settle(ActiveSegment& active);
  // Returns false and sets the segment's error if the backend cannot be created.
  bool make_backend(Lane& lane, ActiveSegment& active);
  void drop_cancelled(Lane& lane);
  // Returns whether anything moved. `has_room`: only requests of this lane keep the worker from
  // taking another segment.
  bool exchange(Lane& lane, std::chrono::milliseconds patience, bool has_room);

  const EngineOptions& options_;
  SegmentQueue& queue_;
  WorkerLog log_;
  WorkClock clock_{log_.counters};
  ActiveSegments segments_;
  RoundReader reader_;
  RequestMaker requests_;
  Lane lane_;  // for memory that the processor can write
  std::vector<Transfer> left_;  // scratch

 private:
  void fail_all(const Error& error) noexcept;
  void completed(Lane& lane, Completion& completion);
};

}  // namespace gdsdata
