// Batches as DLPack capsules: how tensors cross to any torch version without a symbol of it.
#pragma once

#include <ATen/dlpack.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "device/device.h"

namespace gdsdata {

// What a batch looks like: its elements, and one sample's shape and strides (in elements).
struct TensorLayout {
  uint8_t type_code = kDLUInt;
  uint8_t type_bits = 8;
  std::vector<int64_t> sample_shape;
  std::vector<int64_t> sample_strides;
  int64_t sample_elements = 0;
};

// A capsule "dltensor" of shape (samples, *sample_shape) over `buffer` from `offset` on, which it keeps until
// the tensor made of it is gone.
pybind11::capsule to_dlpack(const TensorLayout& layout, std::shared_ptr<DeviceBuffer> buffer, size_t offset,
                            size_t samples);

}  // namespace gdsdata
