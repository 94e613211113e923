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
  if (back_.sizes.empty()) {  // all of its samples were taken
    back_.files.clear();
    back_.offsets.clear();
    back_.taken = 0;
  }
  // Allocations come first.
  back_.files.reserve(back_.files.size() + files.size());
  back_.offsets.reserve(back_.offsets.size() + offsets.size());
  back_.sizes.insert(back_.sizes.end(), sizes.begin(), sizes.end());
  back_.files.insert(back_.files.end(), files.begin(), files.end());
  back_.offsets.insert(back_.offsets.end(), offsets.begin(), offsets.end());
}

PlannedBatches::Batch PlannedBatches::take() {
  if (front_.sizes.empty()) {
    const std::lock_guard lock(mutex_);
    // One by one, because a deque that is moved allocates.
    front_.sizes.swap(back_.sizes);
    front_.files.swap(back_.files);
    front_.offsets.swap(back_.offsets);
    std::swap(front_.taken, back_.taken);
  }
  const size_t samples = front_.sizes.front();
  front_.sizes.pop_front();
  const size_t first = std::exchange(front_.taken, front_.taken + samples);
  return {std::span(front_.files).subspan(first, samples), std::span(front_.offsets).subspan(first, samples)};
}

}  // namespace gdsdata
