#include "engine/planned_batches.h"

#include <string>
#include <utility>

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
  const std::lock_guard lock(mutex_);
  if (added_.sizes.empty()) {  // all of its samples were taken
    added_.files.clear();
    added_.offsets.clear();
    added_.taken = 0;
  }
  // Allocations come first.
  added_.files.reserve(added_.files.size() + files.size());
  added_.offsets.reserve(added_.offsets.size() + offsets.size());
  added_.sizes.insert(added_.sizes.end(), sizes.begin(), sizes.end());
  added_.files.insert(added_.files.end(), files.begin(), files.end());
  added_.offsets.insert(added_.offsets.end(), offsets.begin(), offsets.end());
}

PlannedBatches::Batch PlannedBatches::take() {
  if (taken_.sizes.empty()) {
    const std::lock_guard lock(mutex_);
    // One by one, because a deque that is moved allocates.
    taken_.sizes.swap(added_.sizes);
    taken_.files.swap(added_.files);
    taken_.offsets.swap(added_.offsets);
    std::swap(taken_.taken, added_.taken);
  }
  const size_t samples = taken_.sizes.front();
  taken_.sizes.pop_front();
  const size_t first = std::exchange(taken_.taken, taken_.taken + samples);
  return {std::span(taken_.files).subspan(first, samples), std::span(taken_.offsets).subspan(first, samples)};
}

}  // namespace gdsdata
