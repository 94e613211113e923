#include "engine/request_maker.h"

#include <cstdint>

#include "tuning.h"

namespace gdsdata {

void RequestMaker::add_reads(Lane& lane, ActiveSegment& active, std::span<const Transfer> left) {
  const Conversion conversion = active.group().request().conversion;
  ranges_.clear();
  parts_.clear();
  remote_ranges_.clear();
  remote_parts_.clear();
  const bool may_be_remote = active.group().request().files->has_remote();
  for (const Transfer& transfer : left) {
    if (may_be_remote && !active.file(transfer.file).holds(transfer.offset, transfer.length)) {
      split(transfer, tuning::kRemoteRequestBytes, conversion, remote_parts_);
    } else {
      split(transfer, options_.io.request_bytes, conversion, parts_);
    }
  }
  coalesce(parts_, options_.coalesce_gap_bytes, options_.io.request_bytes, conversion, ranges_, active.pieces);
  coalesce(remote_parts_, tuning::kRemoteCoalesceGapBytes, tuning::kRemoteRequestBytes, conversion, remote_ranges_,
           active.pieces);
  const auto add = [&](const Range& range, bool remote) {
    const auto pieces = std::span(active.pieces).subspan(range.first_piece, range.piece_count);
    lane.add(active, range.file,
             {0, Direction::kRead, conversion, &active.file(range.file), range.offset, range.length, pieces,
              /*owns_pages=*/active.place.has_pages_of(pieces.front()), remote,
              remote ? &active.group().cancelled_flag() : nullptr});
  };
  for (const Range& range : ranges_) add(range, /*remote=*/false);
  for (const Range& range : remote_ranges_) add(range, /*remote=*/true);
}

void RequestMaker::add_writes(Lane& lane, ActiveSegment& active, std::span<const Transfer> left) {
  Group& group = active.group();
  const Conversion conversion = group.request().conversion;
  const bool has_checksums = group.request().checksum != Checksum::kNone;
  const uint64_t most_bytes = options_.io.request_bytes;
  ranges_.clear();
  const auto goes_on_with = [&](const Transfer& next) {
    if (ranges_.empty()) return false;
    const Range& last = ranges_.back();
    return last.file == next.file && last.offset + last.length == next.offset;
  };
  uint64_t joined_bytes = 0;
  for (size_t i = 0; i < left.size(); ++i) {
    uint32_t* checksum = has_checksums ? &group.part_checksum(active.segment.range.first + i) : nullptr;
    parts_.clear();
    joined_bytes = split(left[i], most_bytes, conversion, parts_, goes_on_with(left[i]) ? joined_bytes : 0);
    for (const Transfer& part : parts_) {
      if (goes_on_with(part) && ranges_.back().length + part.length <= most_bytes + kCutBytes) {
        ranges_.back().length += part.length;
        ++ranges_.back().piece_count;
      } else {
        ranges_.push_back({part.file, part.offset, part.length, active.pieces.size(), 1});
      }
      active.pieces.push_back({part.offset, part.length, part.memory, checksum});
    }
  }
  for (const Range& range : ranges_) {
    lane.add(active, range.file,
             {0, Direction::kWrite, conversion, &active.file(range.file), range.offset, range.length,
              std::span(active.pieces).subspan(range.first_piece, range.piece_count)});
  }
}

void RequestMaker::add_of_device(Lane& lane, ActiveSegment& active, std::span<const Transfer> left) {
  const GroupRequest& asked = active.group().request();
  ranges_.clear();
  parts_.clear();
  for (const Transfer& transfer : left) split(transfer, options_.io.request_bytes, asked.conversion, parts_);
  coalesce(parts_, 0, active.is_read() ? options_.io.request_bytes : 0, asked.conversion, ranges_,
           active.device_pieces);
  for (const Range& range : ranges_) {
    File& file = active.file(range.file);
    for (const Piece& piece : std::span(active.device_pieces).subspan(range.first_piece, range.piece_count)) {
      lane.add(active, range.file,
               {0, asked.direction, asked.conversion, &file, piece.offset, piece.length, {&piece, 1}, false});
    }
  }
}

}  // namespace gdsdata
