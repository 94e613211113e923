// Batches as DLPack capsules: how tensors cross to any torch version without a symbol of it.
#pragma once

#include <ATen/dlpack.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "python/lease.h"

namespace gdsdata {

// What a batch looks like: its elements, and one sample's shape and strides (in elements).
struct TensorLayout {
  DLDataType type{kDLUInt, 8, 1};
  std::vector<int64_t> sample_shape;
  std::vector<int64_t> sample_strides;
  int64_t sample_elements = 0;
  DLDevice device{kDLCPU, 0};
};

// A capsule "dltensor" of shape (samples, *sample_shape) over leased memory from `offset` on; the
// lease ends with the tensor made of it.
pybind11::capsule to_dlpack(const TensorLayout& layout, std::unique_ptr<Lease> lease, size_t offset, size_t samples);

}  // namespace gdsdata
