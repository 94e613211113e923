#include "engine/planned_batches.h"

#include <numeric>
#include <string>
#include <utility>

#include "base/error.h"

namespace gdsdata {

namespace {

[[noreturn]] void refuse(std::string why) { throw Failure({ErrorCode::kInvalidArgument, std::move(why)}); }

// Throws unless each size is the sum of the next lengths.
void check_runs(std::span<const int64_t> begins, std::span<const int64_t> lengths, std::span<const int64_t> sizes,
                int64_t positions) {
  if (begins.size() != lengths.size()) refuse("planned runs have as many begins as lengths");
  size_t run = 0;
  for (int64_t left : sizes) {
    for (; left > 0 && run < begins.size(); ++run) {
      if (begins[run] < 0 || lengths[run] < 1 || lengths[run] > positions - begins[run]) {
        refuse("a planned run has positions outside of the epoch's " + std::to_string(positions));
      }
      left -= lengths[run];
    }
    if (left != 0) refuse("the planned runs do not end where the batches do");
  }
  if (run != begins.size()) refuse("the planned batches have fewer runs than were given");
}

}  // namespace

size_t PlannedBatches::samples_in(std::span<const int64_t> sizes) const {
  size_t samples = 0;
  for (const int64_t size : sizes) {
    if (size < 1 || static_cast<size_t>(size) > most_samples_) {
      refuse("a planned batch has " + std::to_string(size) + " samples, not 1 to " + std::to_string(most_samples_));
    }
    samples += static_cast<size_t>(size);
  }
  return samples;
}

void PlannedBatches::clear_if_taken(Queue& queue) {
  if (!queue.sizes.empty()) return;
  queue.files.clear();
  queue.offsets.clear();
  queue.runs.clear();
  queue.taken = queue.taken_runs = 0;
}

void PlannedBatches::add(std::span<const int32_t> files, std::span<const int64_t> offsets,
                         std::span<const int64_t> sizes) {
  if (ordered_) refuse("samples of an order are planned as runs");
  const size_t samples = samples_in(sizes);
  if (samples != files.size() || samples != offsets.size()) {
    refuse("the sizes of the planned batches do not add up to their extents");
  }
  for (const int32_t file : files) {
    if (file < 0 || static_cast<size_t>(file) >= file_count_) refuse("no file has the index " + std::to_string(file));
  }
  const std::lock_guard lock(mutex_);
  clear_if_taken(back_);
  // Allocations come first.
  back_.files.reserve(back_.files.size() + files.size());
  back_.offsets.reserve(back_.offsets.size() + offsets.size());
  back_.sizes.insert(back_.sizes.end(), sizes.begin(), sizes.end());
  back_.files.insert(back_.files.end(), files.begin(), files.end());
  back_.offsets.insert(back_.offsets.end(), offsets.begin(), offsets.end());
}

void PlannedBatches::set_order(const SampleOrder& order) {
  const SamplesOfFiles& files = order.files;
  if (files.base.size() != file_count_ || files.stride.size() != file_count_ || files.first.size() != file_count_ + 1) {
    refuse("the order has " + std::to_string(files.base.size()) + " files, not " + std::to_string(file_count_));
  }
  if (static_cast<uint64_t>(files.first.back()) != order.permutation.n) {
    refuse("the order has " + std::to_string(order.permutation.n) + " samples, and its files have " +
           std::to_string(files.first.back()));
  }
  ordered_ = Ordered{order, std::make_unique_for_overwrite<int64_t[]>(most_samples_),
                     std::make_unique_for_overwrite<int64_t[]>(most_samples_),
                     std::make_unique_for_overwrite<int32_t[]>(most_samples_)};
}

void PlannedBatches::add_runs(std::span<const int64_t> begins, std::span<const int64_t> lengths,
                              std::span<const int64_t> sizes) {
  if (!ordered_) refuse("runs are planned in an order, and none was set");
  samples_in(sizes);
  check_runs(begins, lengths, sizes, ordered_->order.files.first.back());
  const std::lock_guard lock(mutex_);
  clear_if_taken(back_);
  back_.runs.reserve(back_.runs.size() + begins.size());  // allocations come first
  back_.sizes.insert(back_.sizes.end(), sizes.begin(), sizes.end());
  for (size_t i = 0; i < begins.size(); ++i) back_.runs.push_back({begins[i], lengths[i]});
}

PlannedBatches::Batch PlannedBatches::take() {
  if (front_.sizes.empty()) {
    const std::lock_guard lock(mutex_);
    // One by one, because a deque that is moved allocates.
    front_.sizes.swap(back_.sizes);
    front_.files.swap(back_.files);
    front_.offsets.swap(back_.offsets);
    front_.runs.swap(back_.runs);
    std::swap(front_.taken, back_.taken);
    std::swap(front_.taken_runs, back_.taken_runs);
  }
  const size_t samples = front_.sizes.front();
  front_.sizes.pop_front();
  if (ordered_) return places_of_runs(samples);
  const size_t first = std::exchange(front_.taken, front_.taken + samples);
  return {std::span(front_.files).subspan(first, samples), std::span(front_.offsets).subspan(first, samples)};
}

PlannedBatches::Batch PlannedBatches::places_of_runs(size_t samples) {
  const std::span of_batch(ordered_->samples.get(), samples);
  for (auto rest = of_batch; !rest.empty();) {
    const auto [begin, length] = front_.runs[front_.taken_runs++];
    const auto of_run = rest.first(static_cast<size_t>(length));
    std::iota(of_run.begin(), of_run.end(), begin);
    rest = rest.subspan(of_run.size());
  }
  const SampleOrder& order = ordered_->order;
  if (!order.permutation.keys.empty()) permute(order.permutation, of_batch, of_batch);
  const std::span files(ordered_->files.get(), samples);
  const std::span offsets(ordered_->offsets.get(), samples);
  locate(of_batch, order.files, files, offsets);
  return {files, offsets};
}

}  // namespace gdsdata
