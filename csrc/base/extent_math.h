// Pure functions on ranges of bytes: align, split, coalesce.
#pragma once

#include <cstdint>
#include <vector>

#include "base/types.h"

namespace gdsdata {

// `alignment` is a power of two.
constexpr uint64_t align_down(uint64_t value, uint64_t alignment) { return value & ~(alignment - 1); }
constexpr uint64_t align_up(uint64_t value, uint64_t alignment) { return align_down(value + alignment - 1, alignment); }

// Cuts a transfer into parts of at most `limit_bytes` + kCutBytes and appends them to `parts`. A
// transfer of length 0 gives none.
//
// Parts are cut at file offsets that are multiples of kCutBytes, and `limit_bytes` must be one. So
// no two parts read the same disk block. No element is cut in two either, because it has at most 8
// bytes. If an array is not aligned to its elements, a cut moves back to the end of an element.
//
// The first part leaves room for `before_bytes`, to which it is joined. Returns the number of bytes
// to which the next transfer is joined: 0 if the limit is reached.
inline constexpr uint64_t kCutBytes = 4096;
uint64_t split(const Transfer& transfer, uint64_t limit_bytes, Conversion conversion, std::vector<Transfer>& parts,
               uint64_t before_bytes = 0);

// A range of a file. It serves pieces [first_piece, first_piece + piece_count) of a sorted list.
struct Range {
  uint32_t file = 0;
  uint64_t offset = 0;
  uint64_t length = 0;
  size_t first_piece = 0;
  size_t piece_count = 0;
};

// Sorts `transfers` by file and offset. Then joins neighbors that overlap or lie at most
// `gap_bytes` apart into ranges of at most `limit_bytes`. A longer transfer is a range by itself.
// `pieces` gets one piece for each transfer, in that order. Pieces that follow each other in the
// file and in memory become one.
void coalesce(std::vector<Transfer>& transfers, uint64_t gap_bytes, uint64_t limit_bytes, Conversion conversion,
              std::vector<Range>& ranges, std::vector<Piece>& pieces);

}  // namespace gdsdata
