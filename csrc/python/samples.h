// Python bindings of what places samples: their order, their files and offsets.
#pragma once

#include <pybind11/pybind11.h>

#include "base/locate.h"
#include "base/permutation.h"
#include "python/values.h"

namespace gdsdata {

// Views of the arguments of `permute` and `locate`. They throw ValueError if some do not fit.
Permutation permutation_of(uint64_t n, uint64_t a, uint64_t b, const Array<uint64_t>& keys);
SamplesOfFiles samples_of_files(const Array<int64_t>& first_sample, const Array<int64_t>& base_bytes,
                                const Array<int64_t>& stride_bytes);

// Adds `permute`, `permute_each`, `find_files`, `locate` and `unpack_extents` to the module.
void bind_samples(pybind11::module_& module);

}  // namespace gdsdata
