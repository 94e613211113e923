// Arithmetic on ranges of bytes: aligning, splitting, coalescing. Pure functions.
#pragma once

#include <cstdint>
#include <vector>

#include "base/types.h"

namespace gdsdata {

// `alignment` is a power of two.
constexpr uint64_t align_down(uint64_t value, uint64_t alignment) { return value & ~(alignment - 1); }
constexpr uint64_t align_up(uint64_t value, uint64_t alignment) { return align_down(value + alignment - 1, alignment); }

// Cuts a transfer into parts of at most `limit_bytes` + kCutBytes, at file offsets that are
// multiples of kCutBytes (and `limit_bytes` is one), so that no two parts read the same disk block
// and no element is cut in two (elements are at most 8 bytes; a misaligned array keeps its elements
// whole because memory is cut by stored elements). Appends them to `parts`; a transfer of length 0
// gives none.
//
// The first part leaves room for `before_bytes` that it is joined to; returns how many the next
// transfer is joined to, 0 where the limit is reached.
inline constexpr uint64_t kCutBytes = 4096;
uint64_t split(const Transfer& transfer, uint64_t limit_bytes, Conversion conversion, std::vector<Transfer>& parts,
               uint64_t before_bytes = 0);

// A contiguous range of a file that serves pieces [first_piece, first_piece + piece_count) of a
// sorted list.
struct Range {
  uint32_t file = 0;
  uint64_t offset = 0;
  uint64_t length = 0;
  size_t first_piece = 0;
  size_t piece_count = 0;
};

// Sorts `transfers` by file and offset and joins neighbours that overlap or lie at most `gap_bytes`
// apart into ranges of at most `limit_bytes`, or of one transfer that is longer; `pieces` gets one
// piece a transfer, in that order, but those that also follow one another in memory become one.
void coalesce(std::vector<Transfer>& transfers, uint64_t gap_bytes, uint64_t limit_bytes, std::vector<Range>& ranges,
              std::vector<Piece>& pieces);

}  // namespace gdsdata
