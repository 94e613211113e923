#include "backend/scatter.h"

#include <algorithm>
#include <cstring>

#include "base/convert.h"

namespace gdsdata {

Scatter::Scatter(const Request& request) : request_(request) {
  if (request.conversion != Conversion::kNone) stored_.resize(request.length);
}

void Scatter::take(uint64_t offset, std::span<const std::byte> bytes) {
  if (!stored_.empty()) {
    std::memcpy(stored_.data() + (offset - request_.offset), bytes.data(), bytes.size());
    return;
  }
  const uint64_t end = offset + bytes.size();
  const auto pieces = request_.pieces;
  while (first_ < pieces.size() && pieces[first_].offset + pieces[first_].length <= offset) ++first_;
  // Pieces are in the order of their offsets, and may overlap.
  for (size_t i = first_; i < pieces.size() && pieces[i].offset < end; ++i) {
    const Piece& piece = pieces[i];
    const uint64_t begin = std::max(offset, piece.offset), stop = std::min(end, piece.offset + piece.length);
    if (begin < stop) std::memcpy(piece.memory + (begin - piece.offset), bytes.data() + (begin - offset), stop - begin);
  }
}

uint64_t Scatter::finish() {
  uint64_t bytes = 0;
  for (const Piece& piece : request_.pieces) {
    if (!stored_.empty()) {
      convert(request_.conversion, piece.memory, stored_.data() + (piece.offset - request_.offset), piece.length);
    }
    bytes += piece.length;
  }
  return bytes;
}

}  // namespace gdsdata
