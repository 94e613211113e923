// The files of the requests of one round.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/file.h"

namespace gdsdata {

// Keeps files open while their requests are in flight, and finds them by index.
class RoundFiles {
 public:
  // Does nothing if there is a file of this index. Cheapest in the order of indices.
  void add(uint32_t index, std::shared_ptr<File> file);
  File* find(uint32_t index) const;  // null if there is none
  void clear() { kept_.clear(); }
  size_t size() const { return kept_.size(); }

 private:
  struct Kept {
    uint32_t index;
    std::shared_ptr<File> file;
  };
  size_t place_of(uint32_t index) const;  // or where it would be

  std::vector<Kept> kept_;  // in the order of indices
};

}  // namespace gdsdata
