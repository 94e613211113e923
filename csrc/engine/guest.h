// The workers' work on the thread of a caller that waits: what the page cache has, without a
// backend.
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

// Used by one thread at a time. Nothing of it is in flight between calls.
class Guest {
 public:
  Guest(const EngineOptions& options, Device& device, SegmentQueue& queue, Link& link);

  // If the processor writes the device: takes one fresh segment, serves it from memory, and queues
  // the rest of it for storage. Returns false if there is no segment.
  bool help(Priority lowest);
  // If it does not: the same with a segment of this group, a short read. It is in the device's
  // memory when this returns, or queued as a whole.
  bool help_with(const Group& group);

  // Pinned memory that help_with allocates.
  static constexpr uint64_t kStagingBytes = Staging::kFirstBytes;
  static_assert(kStagingBytes >= Staging::most_bytes(tuning::kShortReadBytes));

  WorkerLog& log() { return log_; }

 private:
  bool reserve();
  bool serve_staged(ActiveSegment& active);
  void queue_for_storage(ActiveSegment& active);
  void copy_to_device(ActiveSegment& active) noexcept;
  void end(ActiveSegment& active);

  SegmentQueue& queue_;
  WorkerLog log_;
  ActiveSegments segments_;
  RoundReader reader_;
  StagedCopies copies_;
  std::vector<Transfer> left_, device_parts_;  // scratch
};

}  // namespace gdsdata
