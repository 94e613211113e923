#include "base/locate.h"

#include <algorithm>
#include <cstddef>

namespace gdsdata {

void locate(const SamplesOfFiles& all, std::span<const int64_t> samples, std::span<int32_t> files,
            std::span<int64_t> offsets) {
  const size_t count = all.base.size();
  // Where the file would be if all had equally many samples. Often they have.
  const double files_a_sample =
      static_cast<double>(count) / static_cast<double>(std::max<int64_t>(1, all.first[count]));
  for (size_t i = 0; i < samples.size(); ++i) {
    const int64_t sample = samples[i];
    const double guess = std::max(0.0, static_cast<double>(sample) * files_a_sample);
    size_t file = std::min(count - 1, static_cast<size_t>(guess));
    if (sample < all.first[file] || sample >= all.first[file + 1]) {
      const auto later = std::upper_bound(all.first.begin() + 1, all.first.end() - 1, sample);
      file = static_cast<size_t>(later - all.first.begin()) - 1;
    }
    files[i] = static_cast<int32_t>(file);
    offsets[i] = all.base[file] + (sample - all.first[file]) * all.stride[file];
  }
}

}  // namespace gdsdata
