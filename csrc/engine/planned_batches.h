// Batches that wait for a slot of the ring, in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <vector>

namespace gdsdata {

// One thread at a time takes batches. Others add some meanwhile, and do not wait for it.
class PlannedBatches {
 public:
  struct Batch {  // the file's index and the offset in it, of each sample
    std::span<const int32_t> files;
    std::span<const int64_t> offsets;
  };

  // Throws Failure (kInvalidArgument) if a batch has no samples or more than `most_samples`, if the
  // sizes do not add up, or if a file is not below `file_count`. Adds all of them, or none.
  void add(std::span<const int32_t> files, std::span<const int64_t> offsets, std::span<const int64_t> sizes,
           size_t most_samples, size_t file_count);
  // Takes the first batch, which was added before. It stays valid until the next one is taken.
  Batch take();

 private:
  struct Queue {
    std::deque<size_t> sizes;
    std::vector<int32_t> files;
    std::vector<int64_t> offsets;
    size_t taken = 0;  // samples, in files and offsets
  };

  Queue front_;  // is taken from. When it is empty, the two are swapped
  std::mutex mutex_;
  Queue back_;  // is added to. Guarded by mutex_
};

}  // namespace gdsdata
