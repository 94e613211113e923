// Turns what a segment still needs into requests, which wait in a lane for room in its backend.
#pragma once

#include <span>
#include <vector>

#include "base/extent_math.h"
#include "engine/active_segment.h"
#include "engine/lane.h"
#include "engine/options.h"

namespace gdsdata {

// The files of what it is given are open (RoundReader), or the group's own.
class RequestMaker {
 public:
  explicit RequestMaker(const EngineOptions& options) : options_(options) {}

  // Through host memory: neighbors in a file become one request.
  void add_reads(Lane& lane, ActiveSegment& active, std::span<const Transfer> left);
  // Through host memory: consecutive ranges of the file are joined, and all keep their order. So
  // each part's checksum goes on from request to request. With checksums, `left` is all parts of
  // the segment.
  void add_writes(Lane& lane, ActiveSegment& active, std::span<const Transfer> left);
  // By a backend that moves device memory, which cannot read over a gap: a request is a piece.
  void add_of_device(Lane& lane, ActiveSegment& active, std::span<const Transfer> left);

 private:
  const EngineOptions& options_;
  std::vector<Range> ranges_;    // scratch
  std::vector<Transfer> parts_;  // scratch
};

}  // namespace gdsdata
