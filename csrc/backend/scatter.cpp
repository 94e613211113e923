#include "backend/scatter.h"

#include <algorithm>
#include <cstring>

#include "base/convert.h"

namespace gdsdata {

namespace {

// They are there already if they were received into `memory_at`.
void put(std::byte* place, std::span<const std::byte> bytes) {
  if (place != bytes.data()) std::memcpy(place, bytes.data(), bytes.size());
}

}  // namespace

Scatter::Scatter(const Request& request) : request_(request) {
  if (request.conversion != Conversion::kNone) stored_.resize(request.length);
}

void Scatter::skip_pieces_before(uint64_t offset) {
  if (offset < taken_end_) first_ = 0;
  const auto pieces = request_.pieces;
  while (first_ < pieces.size() && pieces[first_].offset + pieces[first_].length <= offset) ++first_;
}

std::span<std::byte> Scatter::memory_at(uint64_t offset) {
  if (!stored_.empty()) return std::span(stored_).subspan(offset - request_.offset);
  skip_pieces_before(offset);
  if (first_ == request_.pieces.size() || request_.pieces[first_].offset > offset) return {};
  const Piece& piece = request_.pieces[first_];
  const uint64_t begin = offset - piece.offset;
  return {piece.memory + begin, piece.length - begin};
}

uint64_t Scatter::take(uint64_t offset, std::span<const std::byte> bytes) {
  const bool is_converted = !stored_.empty();
  if (is_converted) put(stored_.data() + (offset - request_.offset), bytes);
  skip_pieces_before(offset);
  const uint64_t end = taken_end_ = offset + bytes.size();
  const auto pieces = request_.pieces;
  uint64_t taken = 0;
  // Pieces are in the order of their offsets, and may overlap.
  for (size_t i = first_; i < pieces.size() && pieces[i].offset < end; ++i) {
    const Piece& piece = pieces[i];
    const uint64_t begin = std::max(offset, piece.offset), stop = std::min(end, piece.offset + piece.length);
    if (begin >= stop) continue;
    taken += stop - begin;
    if (!is_converted) put(piece.memory + (begin - piece.offset), bytes.subspan(begin - offset, stop - begin));
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
