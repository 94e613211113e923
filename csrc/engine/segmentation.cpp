#include "engine/segmentation.h"

#include <algorithm>

#include "base/extent_math.h"
#include "tuning.h"

namespace gdsdata {

uint64_t longest_part_bytes(uint64_t segment_bytes, uint64_t request_bytes) {
  return std::max(segment_bytes, request_bytes);
}

void segment(std::span<const Transfer> transfers, Direction direction, Conversion conversion,
             const SegmentLimits& limits, Segmentation& result) {
  const bool is_write = direction == Direction::kWrite;
  result.bytes = 0;
  result.parts.clear();
  result.segments.clear();
  for (const Transfer& transfer : transfers) result.bytes += transfer.length;
  const uint64_t share_bytes = align_up(result.bytes / limits.workers, kCutBytes);
  const uint64_t most = is_write ? limits.write_bytes : limits.read_bytes;
  const uint64_t moved_for_each = 1 + result_element_bytes(conversion) / stored_element_bytes(conversion);
  const uint64_t least_read = std::max(limits.least_read_bytes, limits.least_moved_bytes / moved_for_each);
  const uint64_t least = is_write ? tuning::kLeastSegmentBytes : least_read;
  const uint64_t segment_bytes = std::min(most, std::max(least, share_bytes));
  const uint64_t part_bytes = longest_part_bytes(segment_bytes, limits.request_bytes);
  result.parts.reserve(transfers.size());
  uint64_t joined_bytes = 0;
  for (const Transfer& transfer : transfers) {
    joined_bytes = split(transfer, part_bytes, conversion, result.parts, is_write ? joined_bytes : 0);
  }
  const uint64_t most_bytes = is_write ? part_bytes + kCutBytes : segment_bytes;
  const std::vector<Transfer>& parts = result.parts;
  for (size_t first = 0; first < parts.size();) {
    uint64_t bytes = 0;
    size_t last = first;
    while (last < parts.size() && last - first < limits.parts &&
           (last == first || bytes + parts[last].length <= most_bytes)) {
      bytes += parts[last++].length;
    }
    result.segments.push_back({first, last - first});
    first = last;
  }
  if (result.segments.empty()) result.segments.push_back({});  // a worker must end the group
}

}  // namespace gdsdata
