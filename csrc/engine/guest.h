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

// One thread at a time may use it. Nothing of it is in flight between calls.
class Guest {
 public:
  Guest(const EngineOptions& options, Device& device, SegmentQueue& queue, Link& link);

  // If the processor can write the device: serves one fresh segment from the page cache, and queues
  // the rest of it for storage. Returns false if there is no segment.
  bool help(Priority lowest);
  // If it cannot: the same with a segment of this group, a short read. When this returns, the
  // segment is in the device's memory, or queued as a whole.
  bool help_with(const Group& group);

  // The pinned memory that help_with allocates.
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
