#include "base/locate.h"

#include <algorithm>
#include <cstddef>

namespace gdsdata {

namespace {

// Looks where the file would be if all had equally many samples, and from there in steps twice as
// long each time.
class FileSearch {
 public:
  explicit FileSearch(std::span<const int64_t> first)
      : ends_(first.subspan(1)),
        files_a_sample_(static_cast<double>(ends_.size()) / static_cast<double>(std::max<int64_t>(1, first.back()))) {}

  // The first file that ends behind the sample.
  size_t operator()(int64_t sample) const {
    const size_t last = ends_.size() - 1;
    const double guess = std::max(0.0, static_cast<double>(sample) * files_a_sample_);
    size_t low = std::min(last, static_cast<size_t>(guess)), high = low;
    for (size_t step = 1; low > 0 && ends_[low - 1] > sample; step *= 2) {
      high = low;
      low -= std::min(low, step);
    }
    for (size_t step = 1; high < last && ends_[high] <= sample; step *= 2) {
      low = high + 1;
      high += std::min(last - high, step);
    }
    const auto begin = ends_.begin();
    return static_cast<size_t>(
        std::upper_bound(begin + static_cast<ptrdiff_t>(low), begin + static_cast<ptrdiff_t>(high), sample) - begin);
  }

 private:
  std::span<const int64_t> ends_;
  double files_a_sample_;
};

}  // namespace

void find_files(std::span<const int64_t> samples, std::span<const int64_t> first, std::span<int32_t> files) {
  const FileSearch search(first);
  for (size_t i = 0; i < samples.size(); ++i) files[i] = static_cast<int32_t>(search(samples[i]));
}

void locate(std::span<const int64_t> samples, const SamplesOfFiles& all, std::span<int32_t> files,
            std::span<int64_t> offsets) {
  const FileSearch search(all.first);
  for (size_t i = 0; i < samples.size(); ++i) {
    const size_t file = search(samples[i]);
    files[i] = static_cast<int32_t>(file);
    offsets[i] = all.base[file] + (samples[i] - all.first[file]) * all.stride[file];
  }
}

}  // namespace gdsdata
