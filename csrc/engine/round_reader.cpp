#include "engine/round_reader.h"

#include <algorithm>

namespace gdsdata {

namespace {

constexpr size_t kDescriptorsOfFile = 2;  // including the one for O_DIRECT

}  // namespace

RoundReader::RoundReader(const EngineOptions& options, SpanLog& spans)
    : asks_memory_(options.io.direct != DirectMode::kAlways),
      most_files_(std::max<size_t>(1, most_cached_descriptors() / kDescriptorsOfFile / (options.workers + 1))),
      spans_(spans) {}

size_t RoundReader::open_files(ActiveSegment& active, std::span<const Transfer> parts, WhenTaken when_taken) {
  active.files.clear();
  part_files_.clear();
  size_t unused_before = 0;
  for (const Transfer& part : parts) {
    try {
      const bool is_first = part_files_.empty();
      const size_t opened_before = active.files.size();
      File* file = active.open_file(part.file, is_first ? when_taken : WhenTaken::kGiveUp);
      if (file == nullptr) {
        // Only half of these files stay open, because each needs a second descriptor for O_DIRECT.
        const size_t count = unused_before > 1 ? (part_files_.size() + 1) / 2 : part_files_.size();
        part_files_.resize(count);
        active.files.keep(part_files_);
        break;
      }
      part_files_.push_back(file);
      if (active.files.size() > opened_before && active.files.uses_last_alone()) ++unused_before;
    } catch (const Failure& failure) {
      active.error = failure.error();
      active.error->offset = part.offset;
      active.error->length = part.length;
      return 0;
    }
    if (unused_before >= most_files_) break;
  }
  return part_files_.size();
}

void RoundReader::serve(ActiveSegment& active, std::span<const Transfer> parts, std::vector<Transfer>& left) {
  const bool asked_before = !active.segment.rest.empty();
  if (asked_before || !asks_memory_ || !active.is_read()) {
    left.insert(left.end(), parts.begin(), parts.end());
    return;
  }
  const Group& group = active.group();
  const auto asked = Clock::now();
  RouteBytes bytes;
  const auto files = std::span(part_files_).first(parts.size());
  active.error = page_cache_.serve(parts, files, group.request().conversion, group.past_caches(), left, bytes);
  active.bytes += bytes;
  if (const uint64_t copied = bytes.total(); copied > 0) spans_.add(Work::kPageCache, asked, Clock::now(), copied);
  if (active.error) left.clear();
}

void RoundReader::serve_all(ActiveSegment& active, std::span<const Transfer> parts, std::vector<Transfer>& left) {
  while (!parts.empty() && !active.error) {
    const size_t count = open_files(active, parts, WhenTaken::kGiveUp);
    if (active.error) break;
    if (count == 0) {
      left.insert(left.end(), parts.begin(), parts.end());
      return;
    }
    serve(active, parts.first(count), left);
    parts = parts.subspan(count);
  }
  if (active.error) left.clear();
}

}  // namespace gdsdata
