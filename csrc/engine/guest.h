// The workers' work on the thread of a waiting caller: copies from the page cache, no backend.
#pragma once

#include <vector>

#include "engine/active_segment.h"
#include "engine/link.h"
#include "engine/options.h"
#include "engine/round_reader.h"
#include "engine/segment_queue.h"
#include "engine/staged_copies.h"
#include "engine/worker_log.h"
#include "tuning.h"

namespace gdsdata {

// One thread at a time may use it. Between calls, only copies to the device are in flight.
class Guest {
 public:
  Guest(const EngineOptions& options, Device& device, SegmentQueue& queue, Link& link);
  ~Guest() { copies_.wait_for_all(); }
  Guest(const Guest&) = delete;
  Guest& operator=(const Guest&) = delete;

  // If the processor can write the device: serves one fresh segment from the page cache, and queues
  // the rest of it for storage. Returns false if there is no segment.
  bool help(Priority lowest);
  // The same with a segment of this group. If the processor cannot write the device, the group must
  // be a short read. Its segment is then queued as a whole if the page cache lacks some of it.
  enum class Copies { kAreWaitedFor, kMayStayInFlight };
  bool help_with(const Group& group, Copies copies = Copies::kAreWaitedFor);

  // The pinned memory that help_with allocates.
  static constexpr uint64_t kStagingBytes = Staging::kFirstBytes;
  static_assert(kStagingBytes >= Staging::most_bytes(tuning::kShortReadBytes));

  WorkerLog& log() { return log_; }

 private:
  bool reserve();
  void serve(ActiveSegment& active, Copies copies);
  bool serve_in_place(ActiveSegment& active);
  bool serve_staged(ActiveSegment& active);
  void end(ActiveSegment& active, Copies copies);
  void copy_to_device(ActiveSegment& active, Copies copies) noexcept;

  SegmentQueue& queue_;
  Device& device_;
  WorkerLog log_;
  ActiveSegments segments_;
  RoundReader reader_;
  StagedCopies copies_;
  const bool is_staged_;  // the processor cannot write the device
  std::vector<Transfer> left_, device_parts_;  // scratch
};

}  // namespace gdsdata
