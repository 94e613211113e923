#include "base/extents.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "tuning.h"

namespace gdsdata {

namespace {

uint64_t number_at(const std::byte* at, size_t width, const std::byte* end) {
  uint64_t number = 0;
  if (width == 0) return number;
  if (static_cast<size_t>(end - at) < sizeof(number)) {  // little endian, as all machines that are supported
    std::memcpy(&number, at, width);
    return number;
  }
  std::memcpy(&number, at, sizeof(number));
  return width == sizeof(number) ? number : number & ((uint64_t{1} << (8 * width)) - 1);
}

}  // namespace

void unpack_extents(const PackedExtents& packed, std::span<const int64_t> samples, std::span<int64_t> begins,
                    std::span<int64_t> lengths) {
  if (packed.samples == 0) return;
  const size_t fields = packed.order.size();
  const auto row_bytes = static_cast<size_t>(std::accumulate(packed.widths.begin(), packed.widths.end(), int64_t{0}));
  const std::byte* const end = packed.rows.data() + packed.rows.size();
  const auto row_of = [&](size_t i) {
    const int64_t row = std::clamp<int64_t>(samples[i], 0, static_cast<int64_t>(packed.samples) - 1);
    return packed.rows.data() + static_cast<size_t>(row) * row_bytes;
  };
  const auto alignment = static_cast<uint64_t>(packed.alignment);
  // All arithmetic is modulo 2^64.
  for (size_t i = 0; i < samples.size(); ++i) {
    if (i + tuning::kPrefetchedRows < samples.size()) __builtin_prefetch(row_of(i + tuning::kPrefetchedRows));
    const std::byte* at = row_of(i);
    uint64_t field_end = 0;
    for (size_t place = 0; place < fields; ++place) {
      const auto number = [&](size_t column) {
        const auto width = static_cast<size_t>(packed.widths[column]);
        const uint64_t found = number_at(at, width, end) + static_cast<uint64_t>(packed.least[column]);
        at += width;
        return found;
      };
      const uint64_t aligned = (field_end + alignment - 1) & ~(alignment - 1);
      const uint64_t begin = number(2 * place) * alignment + aligned;
      const uint64_t length = number(2 * place + 1);
      const size_t field = i * fields + static_cast<size_t>(packed.order[place]);
      begins[field] = static_cast<int64_t>(begin);
      lengths[field] = static_cast<int64_t>(length);
      if (static_cast<int64_t>(length) >= 0) field_end = begin + length;
    }
  }
}

}  // namespace gdsdata
