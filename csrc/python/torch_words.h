// The names and functions of torch that a pickler of states needs. Python hands them over once,
// because no source here includes torch.
#pragma once

#include <ATen/dlpack.h>
#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <optional>

namespace gdsdata {

// Returns a new reference that a function of Python's has returned. Throws its exception if there
// is none.
inline pybind11::object owned(PyObject* result) {
  if (result == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(result);
}

inline pybind11::object call(const pybind11::object& function, PyObject* argument) {
  return owned(PyObject_CallOneArg(function.ptr(), argument));
}

// A storage, as a pickle refers to it.
struct StorageReference {
  pybind11::object storage;
  PyObject* dtype = nullptr;          // in which its size is counted
  PyObject* storage_class = nullptr;  // the name of that dtype in pickles
  pybind11::object location;          // torch's name of its device
  int64_t device = -1;                // the number of its GPU; -1: the CPU
  uint64_t address = 0;
  uint64_t bytes = 0;
  uint64_t elements = 0;
};

// A tensor that torch pickles by `rebuild_tensor` alone.
struct PlainTensor {
  StorageReference reference;  // without a location
  DLTensor view;
  uint64_t first_element;  // in its storage
  bool requires_grad;
};

class TorchWords {
 public:
  // `about` has the attributes that this constructor reads; gdsdata/_engine.pyi describes them.
  explicit TorchWords(const pybind11::object& about);

  // Returns nothing for a tensor that torch pickles with state, metadata, or a warning.
  std::optional<PlainTensor> plain(PyObject* tensor) const;
  // Returns the storage that Python has described by a `storage_reference`.
  StorageReference reference_in(const pybind11::object& described) const;
  // Returns a number that all Python objects of one storage have in common.
  uint64_t id_of(const StorageReference& reference) const;

  pybind11::object tensor, rebuild_tensor, ordered_dict, new_object, storage_reference;
  pybind11::object location_of, described, pickled_int;  // functions
  pybind11::object storage_word;

 private:
  // A dtype that pickles have a storage class for. torch keeps both for ever.
  struct StoredType {
    PyObject* dtype = nullptr;
    PyObject* storage_class = nullptr;
  };
  static constexpr size_t kCodes = 16, kBytes = 32;

  void find_memory(StorageReference& reference) const;

  pybind11::object types_;  // owns what `by_code_` names
  std::array<std::array<StoredType, kBytes>, kCodes> by_code_;  // by DLPack's code and the size in bytes
  const DLPackExchangeAPI* exchange_;
  pybind11::object is_conjugate_;
  pybind11::tuple refusals_;  // functions that return something true for a tensor that is not plain
  pybind11::object untyped_storage_, storage_id_, storage_address_, storage_bytes_, storage_offset_, requires_grad_,
      dtype_;
};

}  // namespace gdsdata
