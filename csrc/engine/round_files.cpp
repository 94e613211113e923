#include "engine/round_files.h"

#include <algorithm>
#include <utility>

namespace gdsdata {

size_t RoundFiles::place_of(uint32_t index) const {
  if (kept_.empty() || kept_.back().index < index) return kept_.size();
  const auto place = std::lower_bound(kept_.begin(), kept_.end(), index,
                                      [](const Kept& kept, uint32_t sought) { return kept.index < sought; });
  return static_cast<size_t>(place - kept_.begin());
}

void RoundFiles::add(uint32_t index, std::shared_ptr<File> file) {
  const size_t place = place_of(index);
  if (place < kept_.size() && kept_[place].index == index) return;
  kept_.insert(kept_.begin() + static_cast<ptrdiff_t>(place), {index, std::move(file)});
}

File* RoundFiles::find(uint32_t index) const {
  const size_t place = place_of(index);
  return place < kept_.size() && kept_[place].index == index ? kept_[place].file.get() : nullptr;
}

}  // namespace gdsdata
