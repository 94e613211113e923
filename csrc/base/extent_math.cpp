#include "base/extent_math.h"

#include <algorithm>
#include <tuple>

namespace gdsdata {

uint64_t split(const Transfer& transfer, uint64_t limit_bytes, Conversion conversion, std::vector<Transfer>& parts,
               uint64_t before_bytes) {
  const uint64_t element_bytes = stored_element_bytes(conversion);
  uint64_t done = 0;
  while (done < transfer.length) {
    uint64_t part_bytes = transfer.length - done;
    uint64_t joined_bytes = before_bytes + part_bytes;
    if (joined_bytes > limit_bytes + kCutBytes) {  // a short last part would cost a request
      const uint64_t offset = transfer.offset + done;
      const uint64_t cut = align_down(offset + limit_bytes - before_bytes, kCutBytes);
      part_bytes = cut > offset ? cut - offset : 0;
      part_bytes -= part_bytes % element_bytes;  // the array may not be aligned to its elements
      joined_bytes = 0;
    }
    if (part_bytes > 0) {
      std::byte* memory = transfer.memory == nullptr ? nullptr : transfer.memory + result_bytes(conversion, done);
      parts.push_back({transfer.file, transfer.offset + done, part_bytes, memory});
    }
    done += part_bytes;
    before_bytes = joined_bytes < limit_bytes ? joined_bytes : 0;
  }
  return before_bytes;
}

void coalesce(std::vector<Transfer>& transfers, uint64_t gap_bytes, uint64_t limit_bytes, Conversion conversion,
              std::vector<Range>& ranges, std::vector<Piece>& pieces) {
  std::sort(transfers.begin(), transfers.end(), [](const Transfer& a, const Transfer& b) {
    return std::tie(a.file, a.offset, a.length) < std::tie(b.file, b.offset, b.length);
  });
  for (const Transfer& transfer : transfers) {
    const uint64_t end = transfer.offset + transfer.length;
    Range* last = ranges.empty() ? nullptr : &ranges.back();
    if (last != nullptr && last->file == transfer.file && transfer.offset <= last->offset + last->length + gap_bytes &&
        end - last->offset <= limit_bytes) {
      last->length = std::max(last->length, end - last->offset);
      Piece& before = pieces.back();
      const std::byte* end_in_memory = before.memory + result_bytes(conversion, before.length);
      if (before.offset + before.length == transfer.offset && end_in_memory == transfer.memory) {
        before.length += transfer.length;  // it continues in memory as in the file
        continue;
      }
      ++last->piece_count;
    } else {
      ranges.push_back({transfer.file, transfer.offset, transfer.length, pieces.size(), 1});
    }
    pieces.push_back({transfer.offset, transfer.length, transfer.memory});
  }
}

}  // namespace gdsdata
