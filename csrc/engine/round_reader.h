// Serves a segment's parts from the page cache, in rounds of as many files as descriptors allow.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "backend/page_cache.h"
#include "engine/active_segment.h"
#include "engine/options.h"

namespace gdsdata {

class RoundReader {
 public:
  RoundReader(const EngineOptions& options, SpanLog& spans);

  // Opens the files of the first parts, as many as there are descriptors for. Returns the number of
  // those parts: 0 if a file cannot be opened (see active.error), or if `when_taken` gives up.
  size_t open_files(ActiveSegment& active, std::span<const Transfer> parts, WhenTaken when_taken);
  // Serves parts of the last opened round. Appends those that the page cache lacks to `left`.
  void serve(ActiveSegment& active, std::span<const Transfer> parts, std::vector<Transfer>& left);
  // Serves all rounds. Parts whose file cannot be opened also go to `left`.
  void serve_all(ActiveSegment& active, std::span<const Transfer> parts, std::vector<Transfer>& left);

 private:
  const bool asks_memory_;
  const size_t most_files_;  // in a round, not counting those that other rounds use
  SpanLog& spans_;
  PageCache page_cache_;
  std::vector<File*> part_files_;  // of the round, one for each part
};

}  // namespace gdsdata
