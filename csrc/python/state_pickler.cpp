#include "python/state_pickler.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "python/pickle_memo.h"
#include "python/torch_words.h"

namespace py = pybind11;

namespace gdsdata {

namespace {

// Only Python's own pickler can pickle the state, or say why it cannot.
struct Unusual {};

// Guards the stack of the processor while objects contain one another.
class Recursion {
 public:
  Recursion() {
    if (Py_EnterRecursiveCall(" while pickling an object") != 0) throw py::error_already_set();
  }
  ~Recursion() { Py_LeaveRecursiveCall(); }
  Recursion(const Recursion&) = delete;
  Recursion& operator=(const Recursion&) = delete;
};

// The result of a pickling.
struct Pickled {
  py::bytes bytes;
  py::list storages;  // in order, and for each of them:
  std::vector<uint64_t> addresses;
  std::vector<int64_t> sizes_bytes;
  std::vector<int32_t> devices;  // the number of its GPU; -1: the CPU
  bool has_only_plain_tensors = true;
};

// One pickle in protocol 2. Source of the instructions and of their order: Python's pickle module.
class Pickling {
 public:
  explicit Pickling(const TorchWords& torch) : torch_(torch) { bytes_ = "\x80\x02"; }

  Pickled pickled(PyObject* value) {
    save(value);
    put('.');
    found_.bytes = py::bytes(bytes_);
    return std::move(found_);
  }

 private:
  static constexpr Py_ssize_t kBatch = 1000;  // items of one instruction

  struct KnownStorage {
    uint64_t id;
    PyObject* dtype;
    py::object key;
  };

  void save(PyObject* object) {
    const PyTypeObject* const type = Py_TYPE(object);
    if (object == Py_None) return put('N');
    if (type == &PyBool_Type) return put(object == Py_True ? '\x88' : '\x89');
    if (type == &PyLong_Type) return save_int(object);
    if (type == &PyFloat_Type) return save_float(PyFloat_AS_DOUBLE(object));
    if (const auto number = memo_.number_of(object)) return put_number('h', 'j', *number);
    if (type == &PyUnicode_Type) return save_text(object);
    const Recursion guard;
    if (type == &PyDict_Type) return save_dict(object);
    if (type == &PyList_Type) return save_list(object);
    if (type == &PyTuple_Type) return save_tuple(object);
    if (reinterpret_cast<const PyObject*>(type) == torch_.tensor.ptr()) {
      if (const auto plain = torch_.plain(object)) return save_tensor(object, *plain);
    }
    return save_other(object);
  }

  void save_int(PyObject* number) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (overflow == 0 && std::in_range<int32_t>(value)) return put_int(static_cast<int32_t>(value));
    bytes_ += std::string(py::bytes(call(torch_.pickled_int, number)));
  }

  void save_int(uint64_t value) {
    if (std::in_range<int32_t>(value)) return put_int(static_cast<int32_t>(value));
    save_int(owned(PyLong_FromUnsignedLongLong(value)).ptr());
  }

  void put_int(int32_t value) {
    if (std::in_range<uint8_t>(value)) {
      put('K');
      put_little(static_cast<uint32_t>(value), 1);
    } else if (std::in_range<uint16_t>(value)) {
      put('M');
      put_little(static_cast<uint32_t>(value), 2);
    } else {
      put('J');
      put_little(static_cast<uint32_t>(value), 4);
    }
  }

  void save_float(double value) {
    put('G');
    const auto bits = std::bit_cast<uint64_t>(value);
    for (int shift = 56; shift >= 0; shift -= 8) put(static_cast<char>(bits >> shift));
  }

  void save_text(PyObject* text) {
    Py_ssize_t size = 0;
    const char* const utf8 = PyUnicode_AsUTF8AndSize(text, &size);
    if (utf8 == nullptr) throw py::error_already_set();
    if (!std::in_range<uint32_t>(size)) throw Unusual();
    put('X');
    put_little(static_cast<uint32_t>(size), 4);
    bytes_.append(utf8, static_cast<size_t>(size));
    memoize(text);
  }

  void save_dict(PyObject* dict) {
    put('}');
    memoize(dict);
    const Py_ssize_t count = PyDict_Size(dict);
    if (count == 0) return;
    Py_ssize_t at = 0, in_batch = 0;
    PyObject *key = nullptr, *value = nullptr;
    do {
      if (count > 1) put('(');
      for (in_batch = 0; in_batch < kBatch && PyDict_Next(dict, &at, &key, &value) != 0; ++in_batch) {
        const py::object held_key = py::reinterpret_borrow<py::object>(key);
        const py::object held_value = py::reinterpret_borrow<py::object>(value);
        save(key);
        save(value);
        if (PyDict_Size(dict) != count) throw Unusual();  // an object's own code has changed it
      }
      put(count > 1 ? 'u' : 's');
    } while (in_batch == kBatch);
  }

  void save_list(PyObject* list) {
    put(']');
    memoize(list);
    const Py_ssize_t count = PyList_GET_SIZE(list);
    for (Py_ssize_t i = 0; i < count;) {
      if (count > 1) put('(');
      for (const Py_ssize_t end = std::min(count, i + kBatch); i < end; ++i) {
        save(py::reinterpret_borrow<py::object>(PyList_GET_ITEM(list, i)).ptr());
        if (PyList_GET_SIZE(list) != count) throw Unusual();  // an object's own code has changed it
      }
      put(count > 1 ? 'e' : 'a');
    }
  }

  void save_tuple(PyObject* tuple) {
    const Py_ssize_t count = PyTuple_GET_SIZE(tuple);
    if (count == 0) return put(')');
    if (count > 3) put('(');
    for (Py_ssize_t i = 0; i < count; ++i) save(PyTuple_GET_ITEM(tuple, i));
    if (memo_.number_of(tuple)) throw Unusual();  // it contains itself
    put_tuple_end(count);
    memoize(tuple);
  }

  void put_tuple_end(Py_ssize_t count) { put(count > 3 ? 't' : static_cast<char>('\x84' + count)); }

  // --- tensors and storages ----------------------------------------------------------------------

  void save_tensor(PyObject* tensor, const PlainTensor& plain) {
    const DLTensor& view = plain.view;
    save(torch_.rebuild_tensor.ptr());
    put('(');
    save_storage(plain.reference, location_of(plain.reference));
    save_int(plain.first_element);
    save_numbers(view.shape, view.ndim);
    save_numbers(view.strides, view.ndim);
    put(plain.requires_grad ? '\x88' : '\x89');
    save(torch_.ordered_dict.ptr());  // of its hooks, of which it has none
    put(')');
    put('R');
    memoize_unused();
    put('t');
    memoize_unused();
    put('R');
    memoize(tensor);
  }

  // Saves a tuple that nothing refers to again.
  void save_numbers(const int64_t* numbers, int count) {
    if (count == 0) return put(')');
    if (count > 3) put('(');
    for (int i = 0; i < count; ++i) save_int(static_cast<uint64_t>(numbers[i]));
    put_tuple_end(count);
    memoize_unused();
  }

  // torch makes a new string for each storage of a GPU.
  py::object location_of(const StorageReference& reference) {
    py::object& known = locations_[reference.device];
    if (!known) known = call(torch_.location_of, reference.storage.ptr());
    if (reference.device < 0) return known;
    Py_ssize_t size = 0;
    const char* const utf8 = PyUnicode_AsUTF8AndSize(known.ptr(), &size);
    if (utf8 == nullptr) throw py::error_already_set();
    return owned(PyUnicode_FromStringAndSize(utf8, size));
  }

  void save_storage(const StorageReference& reference, const py::object& location) {
    const py::object key = key_of(reference);
    put('(');
    save(torch_.storage_word.ptr());
    save(reference.storage_class);
    save(key.ptr());
    save(location.ptr());
    save_int(reference.elements);
    put('t');
    memoize_unused();
    put('Q');
  }

  // Throws Unusual if storages that share memory are counted in different dtypes.
  py::object key_of(const StorageReference& reference) {
    if (reference.bytes > 0 && reference.address != 0) {  // storages on the meta device have no address
      NumberByAddress& at = storages_at_[reference.device];
      const auto known = at.find(reference.address);
      if (known && storages_[*known].dtype != reference.dtype) throw Unusual();
      if (known && storages_[*known].id == torch_.id_of(reference)) return storages_[*known].key;
      if (!known) {
        at.add(reference.address, static_cast<uint32_t>(storages_.size()));
        return key_of_new(reference);
      }
    }
    // It has no memory of its own.
    const auto [known, is_new] = others_.try_emplace(torch_.id_of(reference));
    if (is_new) known->second = key_of_new(reference);
    return known->second;
  }

  py::object key_of_new(const StorageReference& reference) {
    const py::object key = owned(PyObject_Str(owned(PyLong_FromSize_t(storages_.size())).ptr()));
    storages_.push_back({torch_.id_of(reference), reference.dtype, key});
    found_.storages.append(reference.storage);
    found_.addresses.push_back(reference.address);
    found_.sizes_bytes.push_back(static_cast<int64_t>(reference.bytes));
    found_.devices.push_back(static_cast<int32_t>(reference.device));
    return key;
  }

  // --- all other objects -------------------------------------------------------------------------

  // Python describes the object: by its name (as bytes of a pickle), as a storage, or as a call
  // that makes it again: function, arguments, state, items of a list and items of a dict.
  void save_other(PyObject* object) {
    if (PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(torch_.tensor.ptr())) != 0) {
      found_.has_only_plain_tensors = false;
    }
    const py::object described = call(torch_.described, object);
    if (PyBytes_CheckExact(described.ptr()) != 0) {
      bytes_ += std::string(py::bytes(described));
      return memoize(object);
    }
    if (py::type::handle_of(described).is(torch_.storage_reference)) {
      const StorageReference reference = torch_.reference_in(described);
      return save_storage(reference, reference.location);
    }
    if (PyTuple_CheckExact(described.ptr()) == 0 || PyTuple_GET_SIZE(described.ptr()) != 5) throw Unusual();
    const auto part = [&](Py_ssize_t i) { return PyTuple_GET_ITEM(described.ptr(), i); };
    if (part(0) == torch_.new_object.ptr()) {
      if (PyTuple_CheckExact(part(1)) == 0 || PyTuple_GET_SIZE(part(1)) == 0) throw Unusual();
      save(PyTuple_GET_ITEM(part(1), 0));
      save(owned(PyTuple_GetSlice(part(1), 1, PyTuple_GET_SIZE(part(1)))).ptr());
      put('\x81');
    } else {
      save(part(0));
      save(part(1));
      put('R');
    }
    if (memo_.number_of(object)) throw Unusual();  // it contains itself
    memoize(object);
    if (part(3) != Py_None) save_items(part(3), 'a', 'e', [&](PyObject* item) { save(item); });
    if (part(4) != Py_None) save_items(part(4), 's', 'u', [&](PyObject* item) { save_pair(item); });
    if (part(2) != Py_None) {
      save(part(2));
      put('b');
    }
  }

  template <typename Save>
  void save_items(PyObject* iterator, char one, char several, Save save_item) {
    const auto next = [&] {
      PyObject* const item = PyIter_Check(iterator) != 0 ? PyIter_Next(iterator) : throw Unusual();
      if (item == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
      return py::reinterpret_steal<py::object>(item);
    };
    Py_ssize_t in_batch = 0;
    do {
      py::object item = next();
      if (!item) return;
      py::object following = next();
      if (!following) {
        save_item(item.ptr());
        return put(one);
      }
      put('(');
      save_item(item.ptr());
      in_batch = 1;
      while (following) {
        save_item(following.ptr());
        if (++in_batch == kBatch) break;
        following = next();
      }
      put(several);
    } while (in_batch == kBatch);
  }

  void save_pair(PyObject* item) {
    if (PyTuple_CheckExact(item) == 0 || PyTuple_GET_SIZE(item) != 2) throw Unusual();
    save(PyTuple_GET_ITEM(item, 0));
    save(PyTuple_GET_ITEM(item, 1));
  }

  // --- bytes -------------------------------------------------------------------------------------

  void memoize(PyObject* object) { put_number('q', 'r', memo_.add(object)); }
  void memoize_unused() { put_number('q', 'r', memo_.skip()); }

  void put_number(char short_one, char long_one, uint32_t number) {
    if (std::in_range<uint8_t>(number)) {
      put(short_one);
      put_little(number, 1);
    } else {
      put(long_one);
      put_little(number, 4);
    }
  }

  void put_little(uint32_t value, int size) {
    for (int i = 0; i < size; ++i) put(static_cast<char>(value >> (8 * i)));
  }

  void put(char byte) { bytes_.push_back(byte); }

  const TorchWords& torch_;
  std::string bytes_;
  PickleMemo memo_;
  Pickled found_;
  std::vector<KnownStorage> storages_;
  std::map<int64_t, NumberByAddress> storages_at_;  // by device: their indices in storages_
  std::unordered_map<uint64_t, py::object> others_;  // keys by id
  std::map<int64_t, py::object> locations_;                           // by device
};

template <typename T>
py::array_t<T> array_of_all(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

// Returns the parts of a `Pickled`; None if only Python's own pickler can do it, or an object's
// own code has raised an exception.
py::object pickled(const TorchWords& torch, const py::object& value) {
  try {
    const Pickled found = Pickling(torch).pickled(value.ptr());
    return py::make_tuple(found.bytes, found.storages, array_of_all(found.addresses), array_of_all(found.sizes_bytes),
                          array_of_all(found.devices), found.has_only_plain_tensors);
  } catch (const Unusual&) {
    return py::none();
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    return py::none();
  }
}

}  // namespace

void bind_state_pickler(py::module_& module) {
  py::class_<TorchWords>(module, "StatePickler")
      .def(py::init<py::object>(), py::arg("about"))
      .def("pickled", &pickled, py::arg("value"));
}

}  // namespace gdsdata
