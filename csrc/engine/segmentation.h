// Cuts a group's transfers into segments, the unit that one worker takes. Pure arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/types.h"
#include "tuning.h"

namespace gdsdata {

struct SegmentLimits {
  uint64_t read_bytes = 0;     // of a segment that is read
  uint64_t write_bytes = 0;    // of a segment that is written
  uint64_t request_bytes = 0;  // of a request to a backend
  size_t workers = 1;          // that share a group
  size_t parts = tuning::kMostSegmentParts;  // of a segment
  // The least share of a worker in a read: as stored, and together with the result.
  uint64_t least_read_bytes = tuning::kLeastSegmentBytes, least_moved_bytes = 0;
};

// Consecutive parts of a group.
struct PartRange {
  size_t first = 0;
  size_t count = 0;
};

struct Segmentation {
  uint64_t bytes = 0;              // of all transfers
  std::vector<Transfer> parts;     // the transfers in their order, long ones cut
  std::vector<PartRange> segments;  // all parts in their order; at least one segment, which may be empty
};

// The longest part of a transfer, up to kCutBytes more. The page cache serves a part of a segment
// in one go, and a backend gets it in requests.
uint64_t longest_part_bytes(uint64_t segment_bytes, uint64_t request_bytes);

// Replaces the contents of `result`, and keeps its capacity.
//
// The workers share a group evenly, in segments from the least (for writes kLeastSegmentBytes) to
// the limit of bytes and of parts. Reads end a segment before it exceeds its limit, unless one part
// alone does. Writes fill each segment, so that it can be one piece of the file.
void segment(std::span<const Transfer> transfers, Direction direction, Conversion conversion,
             const SegmentLimits& limits, Segmentation& result);

}  // namespace gdsdata
