// Finds the files and offsets of samples of one size, as gdsdata/formats/index.py describes them.
#pragma once

#include <cstdint>
#include <span>

namespace gdsdata {

// Files that have the samples [first[f], first[f + 1]), `stride[f]` bytes apart from `base[f]` on.
// `first` has one more element than the other two, and rises from 0.
struct SamplesOfFiles {
  std::span<const int64_t> first, base, stride;
};

// All three spans are equally long. A sample that no file has gets a file and an offset too, which
// are not its own.
void locate(const SamplesOfFiles& all, std::span<const int64_t> samples, std::span<int32_t> files,
            std::span<int64_t> offsets);

}  // namespace gdsdata
