// Reads a segment's parts in rounds of as many files as descriptors allow: from the page cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "backend/page_cache.h"
#include "base/epochs.h"
#include "engine/active_segment.h"
#include "engine/options.h"

namespace gdsdata {

// One thread at a time may use it.
class RoundReader {
 public:
  RoundReader(const EngineOptions& options, const Device& device, SpanLog& spans);

  // Reads the first parts, as many as there are descriptors for, and returns their number. It is 0
  // if a file cannot be opened (see active.error), or if `when_taken` gives up.
  //
  // The first `asked` parts are served from the page cache. Bytes that it lacks are appended to
  // `left`. Their files, and those of the other parts of the round, are kept in active.files.
  size_t read(ActiveSegment& active, std::span<const Transfer> parts, size_t asked, WhenTaken when_taken,
              std::vector<Transfer>& left);
  // Serves all parts in such rounds. Parts whose file cannot be opened also go to `left`.
  void serve_all(ActiveSegment& active, std::span<const Transfer> parts, std::vector<Transfer>& left);

 private:
  // Files that a round has to open. It holds them until it has asked the page cache.
  struct Opened {
    size_t part;
    std::shared_ptr<File> file;
  };

  size_t open_files(ActiveSegment& active, std::span<const Transfer> parts, WhenTaken when_taken,
                    std::vector<Opened>& opened);
  void find_files(const FileTable& table, std::span<const Transfer> parts, std::span<const Opened> opened,
                  const Pin& pin);
  void serve(ActiveSegment& active, std::span<const Transfer> parts, std::vector<Transfer>& left);
  void keep_files(ActiveSegment& active, std::span<const Transfer> parts, size_t asked, std::span<const Transfer> left);

  const bool asks_memory_;
  const size_t few_files_;   // so many files may all be in use
  const size_t most_files_;  // in a round, if there are more
  SpanLog& spans_;
  PageCache page_cache_;
  PinSlot pin_slot_;
  std::vector<File*> part_files_;                 // of the round, one for each part
  std::vector<std::pair<uint32_t, File*>> kept_;  // scratch
};

}  // namespace gdsdata
