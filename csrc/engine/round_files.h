// The files that one round of a segment's reads uses.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/file_table.h"

namespace gdsdata {

// Keeps files open and finds them by index. All workers share the table's lock, so a round of
// shuffled parts asks the table about once for each file, not once for each part.
class RoundFiles {
 public:
  // Throws Failure like FileTable::get. Returns null if `when_taken` gives up.
  File* open(FileTable& table, uint32_t index, WhenTaken when_taken);
  void clear();
  // Releases all other files. `used` starts with the files opened first, in the same order.
  void keep(std::span<File* const> used);
  size_t size() const { return files_.size(); }
  // True if only this round uses the file that was opened last. Its table holds it too.
  bool uses_last_alone() const { return files_.back().use_count() <= 2; }

 private:
  struct Known {
    uint32_t index = 0;
    File* file = nullptr;
  };
  Known& known(uint32_t index) { return known_[index % known_.size()]; }

  std::vector<std::shared_ptr<File>> files_;  // may contain a file twice, if two indices share a place in `known_`
  std::array<Known, 64> known_{};
};

}  // namespace gdsdata
