#include "engine/planned_batches.h"

#include <string>

#include "base/error.h"

namespace gdsdata {

void PlannedBatches::add(std::span<const int32_t> files, std::span<const int64_t> offsets,
                         std::span<const int64_t> sizes, size_t most_samples, size_t file_count) {
  size_t samples = 0;
  for (const int64_t size : sizes) {
    if (size < 1 || static_cast<size_t>(size) > most_samples) {
      throw Failure({ErrorCode::kInvalidArgument, "a planned batch has " + std::to_string(size) +
                                                      " samples, not 1 to " + std::to_string(most_samples)});
    }
    samples += static_cast<size_t>(size);
  }
  if (samples != files.size() || samples != offsets.size()) {
    throw Failure({ErrorCode::kInvalidArgument, "the sizes of the planned batches do not add up to their extents"});
  }
  for (const int32_t file : files) {
    if (file < 0 || static_cast<size_t>(file) >= file_count) {
      throw Failure({ErrorCode::kInvalidArgument, "no file has the index " + std::to_string(file)});
    }
  }
  // Allocations come first.
  files_.reserve(files_.size() + files.size());
  offsets_.reserve(offsets_.size() + offsets.size());
  sizes_.insert(sizes_.end(), sizes.begin(), sizes.end());
  files_.erase(files_.begin(), files_.begin() + static_cast<ptrdiff_t>(taken_));
  offsets_.erase(offsets_.begin(), offsets_.begin() + static_cast<ptrdiff_t>(taken_));
  taken_ = 0;
  files_.insert(files_.end(), files.begin(), files.end());
  offsets_.insert(offsets_.end(), offsets.begin(), offsets.end());
}

PlannedBatches::Batch PlannedBatches::take() {
  const size_t samples = sizes_.front();
  sizes_.pop_front();
  const size_t first = taken_;
  taken_ += samples;
  return {std::span(files_).subspan(first, samples), std::span(offsets_).subspan(first, samples)};
}

}  // namespace gdsdata
