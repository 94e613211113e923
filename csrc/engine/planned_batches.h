// Batches that wait for a slot of the ring, in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/locate.h"
#include "base/permutation.h"

namespace gdsdata {

// The order in which an epoch takes samples of one size, and where they lie. Without keys, samples
// come in the order of the files.
struct SampleOrder {
  Permutation permutation;
  SamplesOfFiles files;
};

// One thread at a time takes batches. Others add some meanwhile, and do not wait for it. Either
// each sample's place is added, or runs of positions in an order: then the places are computed when
// a batch is taken.
class PlannedBatches {
 public:
  struct Batch {  // the file's index and the offset in it, of each sample
    std::span<const int32_t> files;
    std::span<const int64_t> offsets;
  };

  // Batches have at most `most_samples`, and files are below `file_count`.
  PlannedBatches(size_t most_samples, size_t file_count) : most_samples_(most_samples), file_count_(file_count) {}

  // Throws Failure (kInvalidArgument) if a batch has no samples or too many, if the sizes do not
  // add up, if there is no such file, or if an order was set. Adds all of them, or none.
  void add(std::span<const int32_t> files, std::span<const int64_t> offsets, std::span<const int64_t> sizes);
  // Call it once, before all else. The order's memory must outlive this. Throws Failure
  // (kInvalidArgument) if it is of other files.
  void set_order(const SampleOrder& order);
  // Adds batches of positions: `lengths[i]` of them from `begins[i]` on, run after run. No run is
  // of two batches. Throws Failure (kInvalidArgument) like `add`, or if a run leaves the order.
  void add_runs(std::span<const int64_t> begins, std::span<const int64_t> lengths, std::span<const int64_t> sizes);
  // Takes the first batch, which was added before. It stays valid until the next one is taken.
  // Allocates nothing.
  Batch take();

 private:
  struct Run {
    int64_t begin, length;
  };
  struct Queue {
    std::deque<size_t> sizes;
    std::vector<int32_t> files;  // of an order: this, `offsets` and `taken` are unused
    std::vector<int64_t> offsets;
    size_t taken = 0;  // samples, in files and offsets
    std::vector<Run> runs;
    size_t taken_runs = 0;
  };
  // A batch in an order, which is computed here.
  struct Ordered {
    SampleOrder order;
    std::unique_ptr<int64_t[]> samples, offsets;  // the first are positions, and then samples
    std::unique_ptr<int32_t[]> files;
  };

  size_t samples_in(std::span<const int64_t> sizes) const;  // throws Failure (kInvalidArgument)
  void clear_if_taken(Queue& queue);
  Batch places_of_runs(size_t samples);

  const size_t most_samples_, file_count_;
  std::optional<Ordered> ordered_;
  Queue front_;  // is taken from. When it is empty, the two are swapped
  std::mutex mutex_;
  Queue back_;  // is added to. Guarded by mutex_
};

}  // namespace gdsdata
