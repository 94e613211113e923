// Finds samples' files, and the offsets of samples of one size: gdsdata/formats/index.py describes
// both. A sample that no file has gets the first or the last one.
#pragma once

#include <cstdint>
#include <span>

namespace gdsdata {

// File f has the samples [first[f], first[f + 1]); `first` rises from 0. It takes constant time if
// the files have about equally many samples, and else a binary search.
void find_files(std::span<const int64_t> samples, std::span<const int64_t> first, std::span<int32_t> files);

// The same, and their offsets. The samples of file f are `stride[f]` bytes apart from `base[f]` on.
struct SamplesOfFiles {
  std::span<const int64_t> first, base, stride;
};
void locate(std::span<const int64_t> samples, const SamplesOfFiles& all, std::span<int32_t> files,
            std::span<int64_t> offsets);

}  // namespace gdsdata
