// Keyed bijections on ranges of integers, which shuffle without an array as long as the range.
// gdsdata/data/order/permutation.py describes them and chooses their keys.
#pragma once

#include <cstdint>
#include <span>

#include "base/processor.h"

namespace gdsdata {

// The longest side of a permutation's rectangle.
inline constexpr uint64_t kLongestSide = (uint64_t{1} << 31) + 33;

// A position is left * b + right, with left < a and right < b, both at most kLongestSide. Each key
// is one round, which adds a hash of one half to the other. There is an even number of keys.
struct Permutation {
  uint64_t n = 0;  // at most a * b
  uint64_t a = 0, b = 0;
  std::span<const uint64_t> keys;
};

// Both spans are equally long, and may be the same. Positions are in range(n).
void permute(const Permutation& permutation, std::span<const int64_t> positions, std::span<int64_t> images,
             const Processor& has = processor());

// The same with one bijection for each position: on range(n[i]), 1 to 2**32, by keys[i].
void permute_each(std::span<const int64_t> positions, std::span<const int64_t> n, std::span<const uint64_t> keys,
                  std::span<int64_t> images);

}  // namespace gdsdata
