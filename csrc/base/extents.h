// Unpacks where the fields of samples lie: gdsdata/formats/extents.py describes the rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace gdsdata {

struct PackedExtents {
  std::span<const std::byte> rows;
  size_t samples;                    // as many rows, of the columns' widths in all
  std::span<const int64_t> widths;   // bytes of each column, 0 to 8: begin and length of each field
  std::span<const int64_t> least;    // of each column
  std::span<const int64_t> order;    // fields as they follow each other
  int64_t alignment;                 // a power of two
};

// Writes begin and length of each field of some samples, sample after sample. A sample that has no
// row gets the first or the last one.
void unpack_extents(const PackedExtents& packed, std::span<const int64_t> samples, std::span<int64_t> begins,
                    std::span<int64_t> lengths);

}  // namespace gdsdata
