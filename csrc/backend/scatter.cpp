#include "backend/scatter.h"

#include <algorithm>
#include <cstring>

#include "base/convert.h"

namespace gdsdata {

Scatter::Scatter(const Request& request) : request_(request) {
  if (request.conversion != Conversion::kNone) stored_.resize(request.length);
}

uint64_t Scatter::take(uint64_t offset, std::span<const std::byte> bytes) {
  const bool is_converted = !stored_.empty();
  if (is_converted) std::memcpy(stored_.data() + (offset - request_.offset), bytes.data(), bytes.size());
  if (offset < taken_end_) first_ = 0;
  const uint64_t end = taken_end_ = offset + bytes.size();
  const auto pieces = request_.pieces;
  while (first_ < pieces.size() && pieces[first_].offset + pieces[first_].length <= offset) ++first_;
  uint64_t taken = 0;
  // Pieces are in the order of their offsets, and may overlap.
  for (size_t i = first_; i < pieces.size() && pieces[i].offset < end; ++i) {
    const Piece& piece = pieces[i];
    const uint64_t begin = std::max(offset, piece.offset), stop = std::min(end, piece.offset + piece.length);
    if (begin >= stop) continue;
    taken += stop - begin;
    if (!is_converted)
      std::memcpy(piece.memory + (begin - piece.offset), bytes.data() + (begin - offset), stop - begin);
  }
  return taken;
}

void Scatter::finish() {
  if (stored_.empty()) return;
  for (const Piece& piece : request_.pieces) {
    convert(request_.conversion, piece.memory, stored_.data() + (piece.offset - request_.offset), piece.length);
  }
}

}  // namespace gdsdata
