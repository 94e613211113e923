// The segments that a worker has taken and not ended, and their owner.
//
//   SegmentQueue --begin--> ActiveSegment: rounds of files, requests, copies --finish--> EndedSegment --report--> Group
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/group.h"
#include "engine/round_files.h"
#include "engine/staging.h"
#include "engine/worker_log.h"

namespace gdsdata {

struct ActiveSegment {
  Segment segment;
  Clock::time_point started;
  RouteBytes bytes;
  std::optional<Error> error;

  size_t begun_parts = 0;  // of a read: rounds begin one after the other
  RoundFiles files;  // of the round's requests
  size_t open_requests = 0;  // to backends
  std::vector<Piece> pieces, device_pieces;  // of these requests: in host memory, in device memory

  size_t host_parts = 0;  // the first ones go through host memory; a backend moves the others to or from the device
  // Used by workers with staging memory.
  Staging::Place place;
  std::shared_ptr<Event> copied;  // of a write: after its copies from the device; null when they are done

  Group& group() const { return *segment.group; }
  bool is_read() const { return group().request().direction == Direction::kRead; }
  std::span<Transfer> parts() { return segment.rest.empty() ? group().parts(segment.range) : segment.rest; }
  // There are no bytes: the worker allocates what later segments need (Engine::prepare).
  bool prepares() { return parts().empty(); }
  // No further part of it need start.
  bool stopped() const { return error.has_value() || group().cancelled(); }
  // For a request, which keeps it open. Throws Failure.
  File& file(uint32_t index);
};

// The result of a segment for its group: bytes and error.
struct EndedSegment {
  std::shared_ptr<Group> group;
  RouteBytes bytes;
  std::optional<Error> error;
  void report() noexcept { group->segment_ended(bytes, std::move(error)); }
};

// Owns the active segments of a worker, and reuses ended ones.
class ActiveSegments {
 public:
  // Allocates for the next `begin`: nothing may fail after the queue has given up a segment.
  void reserve();
  // Call `reserve` before.
  ActiveSegment& begin(Segment segment);
  // Counts it and releases what it holds: once its end is reported, the group may be submitted
  // again.
  EndedSegment finish(ActiveSegment& active, WorkerCounters& counters);
  // Releases it without an end, because its segment was queued again.
  void release(ActiveSegment& active);

  // Reads whose next round waits for its turn or for descriptors.
  bool has_unfinished() const { return !unfinished_.empty(); }
  void add_unfinished(ActiveSegment& active) { unfinished_.push_back(&active); }
  // All of them, in any order, until the next call. add_unfinished may be called meanwhile.
  std::span<ActiveSegment* const> take_unfinished();
  void drop_unfinished() { unfinished_.clear(); }

  template <typename Visit>
  void visit(Visit visit) {
    for (const auto& active : all_) {
      if (active->segment.group != nullptr) visit(*active);
    }
  }

 private:
  std::vector<std::unique_ptr<ActiveSegment>> all_;
  std::vector<ActiveSegment*> idle_, unfinished_, continued_;  // each has capacity for all
};

// Computes the checksums of a read, while its bytes are in memory that the processor reads. Those
// of a write are computed on its way.
void take_checksums(ActiveSegment& active);

}  // namespace gdsdata
