// Batches as DLPack capsules, which every torch version accepts without a symbol of libtorch.
#pragma once

#include <ATen/dlpack.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "python/lease.h"

namespace gdsdata {

// The layout of a batch: its element type, and one sample's shape and strides (in elements).
struct TensorLayout {
  DLDataType type{kDLUInt, 8, 1};
  std::vector<int64_t> sample_shape;
  std::vector<int64_t> sample_strides;
  int64_t sample_elements = 0;
  DLDevice device{kDLCPU, 0};
};

// Returns a capsule "dltensor" of shape (samples, *sample_shape) over leased memory, from `offset`
// on. The lease ends with the tensor that is made from it.
pybind11::capsule to_dlpack(const TensorLayout& layout, std::unique_ptr<Lease> lease, size_t offset, size_t samples);

}  // namespace gdsdata
