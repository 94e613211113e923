// Turns the rest of a segment into requests, which wait in a lane for room in its backend.
#pragma once

#include <span>
#include <vector>

#include "base/extent_math.h"
#include "engine/active_segment.h"
#include "engine/lane.h"
#include "engine/options.h"

namespace gdsdata {

// The files of the parts must be open (RoundReader), or be the group's own.
class RequestMaker {
 public:
  explicit RequestMaker(const EngineOptions& options) : options_(options) {}

  // Reads through host memory. Neighbors in a file become one request.
  void add_reads(Lane& lane, ActiveSegment& active, std::span<const Transfer> left);
  // Writes through host memory. Consecutive ranges of the file are joined, and all keep their
  // order, so that a part's checksum continues from request to request. With checksums, `left` is
  // all parts of the segment.
  void add_writes(Lane& lane, ActiveSegment& active, std::span<const Transfer> left);
  // For a backend that moves device memory: a request is one piece, because it cannot skip gaps.
  void add_of_device(Lane& lane, ActiveSegment& active, std::span<const Transfer> left);

 private:
  const EngineOptions& options_;
  std::vector<Range> ranges_;    // scratch
  std::vector<Transfer> parts_;  // scratch
  std::vector<Range> remote_ranges_;     // scratch
  std::vector<Transfer> remote_parts_;   // scratch
};

}  // namespace gdsdata
