// Batches that wait for a slot of the ring, in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

namespace gdsdata {

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
  bool empty() const { return sizes_.empty(); }
  // Takes the first batch. It stays valid until more are added.
  Batch take();

 private:
  std::deque<size_t> sizes_;
  std::vector<int32_t> files_;
  std::vector<int64_t> offsets_;
  size_t taken_ = 0;  // samples, in files_ and offsets_
};

}  // namespace gdsdata
