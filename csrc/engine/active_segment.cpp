#include "engine/active_segment.h"

#include <utility>

#include "base/crc32.h"

namespace gdsdata {

File& ActiveSegment::file(uint32_t index) {
  if (File* kept = files.find(index)) return *kept;
  files.add(index, group().request().files->get(index));
  return *files.find(index);
}

void ActiveSegments::reserve() {
  if (!idle_.empty()) return;
  for (auto* list : {&idle_, &unfinished_, &continued_}) list->reserve(all_.size() + 1);
  all_.push_back(std::make_unique<ActiveSegment>());
  idle_.push_back(all_.back().get());
}

ActiveSegment& ActiveSegments::begin(Segment segment) {
  ActiveSegment& active = *idle_.back();
  idle_.pop_back();
  active.segment = std::move(segment);
  active.bytes = active.segment.bytes;
  active.started = Clock::now();
  return active;
}

EndedSegment ActiveSegments::finish(ActiveSegment& active, WorkerCounters& counters) {
  for (size_t i = 0; i < kRouteCount; ++i) counters.bytes[i].add(active.bytes.bytes[i]);
  counters.transfers.add(active.segment.range.count);
  counters.segments.add(1);
  if (active.error) counters.errors.add(1);
  counters.segment_latency.add(Clock::now() - active.started);
  EndedSegment ended{std::move(active.segment.group), active.bytes, std::move(active.error)};
  release(active);
  return ended;
}

void ActiveSegments::release(ActiveSegment& active) {
  active.files.clear();
  active.segment = {};
  active.bytes = {};
  active.error.reset();
  active.copied.reset();
  active.begun_parts = 0;
  active.pieces.clear();
  active.device_pieces.clear();
  idle_.push_back(&active);
}

std::span<ActiveSegment* const> ActiveSegments::take_unfinished() {
  continued_.clear();
  continued_.swap(unfinished_);
  return continued_;
}

void take_checksums(ActiveSegment& active) {
  Group& group = active.group();
  const Checksum kind = group.request().checksum;
  if (kind == Checksum::kNone || !active.is_read() || active.stopped()) return;
  const PartRange& range = active.segment.range;
  const auto parts = group.parts(range);
  for (size_t i = 0; i < range.count; ++i) {
    group.part_checksum(range.first + i) = checksum_of(kind, parts[i].memory, parts[i].length);
  }
}

}  // namespace gdsdata
