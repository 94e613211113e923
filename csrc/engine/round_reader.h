// Serves a segment's parts out of the page cache, in rounds of as many files as the process has
// descriptors for.
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

  // Opens the files of a round: those of the first parts, as many as there are descriptors for.
  // Returns how many parts that is: 0 if a file cannot be opened (active.error says why), or if
  // `when_taken` gives up.
  size_t open_files(ActiveSegment& active, std::span<const Transfer> parts, WhenTaken when_taken);
  // Parts of the round that was opened last. Appends to `left` what the page cache does not have.
  void serve(ActiveSegment& active, std::span<const Transfer> parts, std::vector<Transfer>& left);
  // All rounds. Appends to `left` also what it cannot open.
  void serve_all(ActiveSegment& active, std::span<const Transfer> parts, std::vector<Transfer>& left);

 private:
  const bool asks_memory_;
  const size_t most_files_;  // in a round, beside those that other rounds use
  SpanLog& spans_;
  PageCache page_cache_;
  std::vector<File*> part_files_;  // of the round, one a part
};

}  // namespace gdsdata
