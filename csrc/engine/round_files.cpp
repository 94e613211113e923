#include "engine/round_files.h"

#include <utility>

namespace gdsdata {

File* RoundFiles::open(FileTable& table, uint32_t index, WhenTaken when_taken) {
  Known& place = known(index);
  if (place.file != nullptr && place.index == index) return place.file;
  std::shared_ptr<File> file = table.get(index, when_taken);
  if (file == nullptr) return nullptr;
  files_.push_back(std::move(file));
  place = {index, files_.back().get()};
  return place.file;
}

void RoundFiles::clear() {
  if (files_.empty()) return;
  files_.clear();
  known_.fill({});
}

void RoundFiles::keep(std::span<File* const> used) {
  size_t kept = 0;
  for (const File* file : used) {
    if (kept < files_.size() && files_[kept].get() == file) ++kept;
  }
  files_.resize(kept);
  known_.fill({});
}

}  // namespace gdsdata
