#include "python/torch_words.h"

#include <algorithm>
#include <limits>

namespace py = pybind11;

namespace gdsdata {

namespace {

const DLPackExchangeAPI* exchange_of(const py::object& tensor) {
  const py::object capsule = tensor.attr("__dlpack_c_exchange_api__");
  const auto* api = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (api == nullptr) throw py::error_already_set();
  if (api->header.version.major != DLPACK_MAJOR_VERSION) throw py::import_error("another version of DLPack");
  return api;
}

bool is_true(const py::object& object) {
  const int found = PyObject_IsTrue(object.ptr());
  if (found < 0) throw py::error_already_set();
  return found != 0;
}

uint64_t unsigned_of(const py::object& number) {
  const unsigned long long value = PyLong_AsUnsignedLongLong(number.ptr());
  if (value == std::numeric_limits<unsigned long long>::max() && PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  return value;
}

}  // namespace

TorchWords::TorchWords(const py::object& about)
    : tensor(about.attr("tensor")),
      rebuild_tensor(about.attr("rebuild_tensor")),
      ordered_dict(about.attr("ordered_dict")),
      new_object(about.attr("new_object")),
      storage_reference(about.attr("storage_reference")),
      location_of(about.attr("location_of")),
      described(about.attr("described")),
      pickled_int(about.attr("pickled_int")),
      storage_word(owned(PyUnicode_InternFromString("storage"))),
      types_(about.attr("types")),
      exchange_(exchange_of(tensor)),
      is_conjugate_(about.attr("is_conjugate")),
      refusals_(about.attr("refusals")),
      untyped_storage_(about.attr("untyped_storage")),
      storage_id_(about.attr("storage_id")),
      storage_address_(about.attr("storage_address")),
      storage_bytes_(about.attr("storage_bytes")),
      storage_offset_(about.attr("storage_offset")),
      requires_grad_(owned(PyUnicode_InternFromString("requires_grad"))),
      dtype_(owned(PyUnicode_InternFromString("dtype"))) {
  for (const py::handle one : types_) {
    const auto row = py::cast<py::tuple>(one);
    by_code_.at(row[0].cast<size_t>()).at(row[1].cast<size_t>()) = {row[2].ptr(), row[3].ptr()};
  }
}

std::optional<PlainTensor> TorchWords::plain(PyObject* tensor) const {
  PlainTensor found{};
  if (exchange_->dltensor_from_py_object_no_sync(tensor, &found.view) != 0) {
    PyErr_Clear();  // sparse, quantized, nested, on the meta device, or of an unusual dtype
    return std::nullopt;
  }
  const auto& [data, device, dimensions, type, shape, strides, byte_offset] = found.view;
  const bool is_on_gpu = device.device_type == kDLCUDA;
  if ((device.device_type != kDLCPU && !is_on_gpu) || type.lanes != 1 || byte_offset != 0) return std::nullopt;
  const size_t element_bytes = (size_t{type.bits} + 7) / 8;
  if (type.code >= kCodes || element_bytes >= kBytes || element_bytes == 0) return std::nullopt;
  const StoredType& stored = by_code_[type.code][element_bytes];
  if (stored.dtype == nullptr) return std::nullopt;
  // torch shows its uint1 to uint7 as uint8, and its int1 to int7 as int8.
  const bool is_maybe_narrower = element_bytes == 1 && (type.code == kDLInt || type.code == kDLUInt);
  if (is_maybe_narrower && owned(PyObject_GetAttr(tensor, dtype_.ptr())).ptr() != stored.dtype) return std::nullopt;
  const auto address = reinterpret_cast<uintptr_t>(data);
  const bool is_empty = std::find(shape, shape + dimensions, 0) != shape + dimensions;
  if (address == 0 && !is_empty) return std::nullopt;  // zeros without memory, as autograd makes them
  if (type.code == kDLComplex && is_true(call(is_conjugate_, tensor))) return std::nullopt;
  for (const py::handle refusal : refusals_) {
    if (is_true(owned(PyObject_CallOneArg(refusal.ptr(), tensor)))) return std::nullopt;
  }
  StorageReference& reference = found.reference;
  reference.storage = call(untyped_storage_, tensor);
  reference.dtype = stored.dtype;
  reference.storage_class = stored.storage_class;
  reference.device = is_on_gpu ? device.device_id : -1;
  find_memory(reference);
  reference.elements = reference.bytes / element_bytes;
  found.first_element =
      is_empty ? unsigned_of(call(storage_offset_, tensor)) : (address - reference.address) / element_bytes;
  found.requires_grad = is_true(owned(PyObject_GetAttr(tensor, requires_grad_.ptr())));
  return found;
}

StorageReference TorchWords::reference_in(const py::object& described) const {
  StorageReference found;
  found.storage = described.attr("storage");
  found.dtype = described.attr("dtype").ptr();
  found.storage_class = described.attr("storage_class").ptr();
  found.location = described.attr("location");
  found.device = described.attr("device").cast<int64_t>();
  find_memory(found);
  found.elements = described.attr("elements").cast<uint64_t>();
  return found;
}

void TorchWords::find_memory(StorageReference& reference) const {
  reference.address = unsigned_of(call(storage_address_, reference.storage.ptr()));
  reference.bytes = unsigned_of(call(storage_bytes_, reference.storage.ptr()));
}

uint64_t TorchWords::id_of(const StorageReference& reference) const {
  return unsigned_of(call(storage_id_, reference.storage.ptr()));
}

}  // namespace gdsdata
