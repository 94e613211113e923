#include "python/dlpack.h"

#include <utility>

namespace gdsdata {

namespace {

struct Tensor {
  DLManagedTensor managed{};
  std::unique_ptr<Lease> lease;
  std::vector<int64_t> shape_and_strides;
};

void drop_tensor(DLManagedTensor* managed) { delete static_cast<Tensor*>(managed->manager_ctx); }

// Called when a capsule is freed. If a tensor was made from it, its name is different.
void drop_capsule(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor") == 0) return;
  drop_tensor(static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor")));
}

}  // namespace

pybind11::capsule to_dlpack(const TensorLayout& layout, std::unique_ptr<Lease> lease, size_t offset, size_t samples) {
  auto tensor = std::make_unique<Tensor>();
  const size_t dimensions = layout.sample_shape.size() + 1;
  auto& numbers = tensor->shape_and_strides;
  numbers.reserve(2 * dimensions);
  numbers.push_back(static_cast<int64_t>(samples));
  numbers.insert(numbers.end(), layout.sample_shape.begin(), layout.sample_shape.end());
  numbers.push_back(layout.sample_elements);
  numbers.insert(numbers.end(), layout.sample_strides.begin(), layout.sample_strides.end());
  DLTensor& view = tensor->managed.dl_tensor;
  view.data = lease->data() + offset;
  view.device = layout.device;
  view.ndim = static_cast<int32_t>(dimensions);
  view.dtype = layout.type;
  view.shape = numbers.data();
  view.strides = numbers.data() + dimensions;
  tensor->lease = std::move(lease);
  tensor->managed.manager_ctx = tensor.get();
  tensor->managed.deleter = drop_tensor;
  PyObject* capsule = PyCapsule_New(&tensor->managed, "dltensor", drop_capsule);
  if (capsule == nullptr) throw pybind11::error_already_set();
  tensor.release();
  return pybind11::reinterpret_steal<pybind11::capsule>(capsule);
}

}  // namespace gdsdata
