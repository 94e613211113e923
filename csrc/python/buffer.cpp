#include "python/buffer.h"

#include <string>

namespace py = pybind11;

namespace gdsdata {

namespace {

enum class Kind : uint8_t { kTensor, kStorage, kOther };

// An attribute's name as a Python string, created once. It is never freed, because the interpreter
// may end before static destructors run.
class Name {
 public:
  explicit Name(const char* text) : name_(PyUnicode_InternFromString(text)) {}
  PyObject* get() const { return name_; }

 private:
  PyObject* name_;
};

py::object owned(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

py::object call(py::handle object, const Name& method) {
  return owned(PyObject_CallMethodNoArgs(object.ptr(), method.get()));
}

uint64_t unsigned_of(const py::object& number) {
  const unsigned long long value = PyLong_AsUnsignedLongLong(number.ptr());
  if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

std::byte* pointer_of(const py::object& number) { return reinterpret_cast<std::byte*>(unsigned_of(number)); }

// A tensor that is not contiguous may still fill its memory without gaps, in another order. An
// expanded tensor has more bytes than memory.
void check_tensor_has_its_bytes(py::handle tensor, const Buffer& buffer) {
  static const Name is_contiguous("is_contiguous"), untyped_storage("untyped_storage"), data_ptr("data_ptr"),
      nbytes("nbytes");
  if (PyObject_HasAttr(tensor.ptr(), is_contiguous.get()) == 0)
    return;  // an object that only has an address and a size
  if (call(tensor, is_contiguous).is(py::bool_(true))) return;
  const py::object storage = call(tensor, untyped_storage);
  const std::byte* const end = pointer_of(call(storage, data_ptr)) + unsigned_of(call(storage, nbytes));
  if (buffer.begin > end || buffer.bytes > static_cast<uint64_t>(end - buffer.begin)) {
    throw py::value_error("a tensor of " + std::to_string(buffer.bytes) +
                          " bytes reaches beyond its storage: give a contiguous one");
  }
}

Buffer buffer_by_protocol(py::handle object, Access access) {
  Py_buffer view;
  if (PyObject_GetBuffer(object.ptr(), &view, access == Access::kWrite ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
    py::error_already_set cause;
    const std::string why = py::str(cause.value()).cast<std::string>();
    const std::string type = Py_TYPE(object.ptr())->tp_name;
    if (cause.matches(PyExc_TypeError)) throw py::type_error("an object of type " + type + " has no memory: " + why);
    throw py::value_error("the memory of the object of type " + type + " cannot be used: " + why);
  }
  const Buffer buffer{static_cast<std::byte*>(view.buf), static_cast<uint64_t>(view.len)};
  PyBuffer_Release(&view);
  return buffer;
}

void check_within(const Buffer& buffer, int64_t place, uint64_t bytes, py::ssize_t row) {
  if (place < 0 || static_cast<uint64_t>(place) > buffer.bytes || bytes > buffer.bytes - static_cast<uint64_t>(place)) {
    throw py::value_error("transfer " + std::to_string(row) + ": " + std::to_string(bytes) + " bytes at " +
                          std::to_string(place) + " are not within its buffer of " + std::to_string(buffer.bytes) +
                          " bytes");
  }
}

Kind kind_of(py::handle object) {
  static const Name data_ptr("data_ptr"), is_contiguous("is_contiguous");
  if (PyObject_HasAttr(object.ptr(), data_ptr.get()) == 0) return Kind::kOther;
  return PyObject_HasAttr(object.ptr(), is_contiguous.get()) != 0 ? Kind::kTensor : Kind::kStorage;
}

Buffer buffer_of_kind(Kind kind, py::handle object, Access access) {
  static const Name data_ptr("data_ptr"), nbytes("nbytes");
  if (kind == Kind::kOther) return buffer_by_protocol(object, access);
  Buffer buffer;
  buffer.begin = pointer_of(call(object, data_ptr));
  const py::object bytes = owned(PyObject_GetAttr(object.ptr(), nbytes.get()));
  if (PyLong_Check(bytes.ptr()) == 0) {  // a storage has a method
    buffer.bytes = unsigned_of(owned(PyObject_CallNoArgs(bytes.ptr())));
    return buffer;
  }
  buffer.bytes = unsigned_of(bytes);
  if (kind == Kind::kTensor) check_tensor_has_its_bytes(object, buffer);
  return buffer;
}

}  // namespace

Buffer buffer_of(py::handle object, Access access) { return buffer_of_kind(kind_of(object), object, access); }

std::vector<Transfer> transfers_of(size_t files, const TransferColumns& columns, const py::object& memory,
                                   Access access, Conversion conversion) {
  const py::ssize_t count = columns.offset.size();
  const bool has_file = columns.file.size() != 0, has_list = PyList_Check(memory.ptr()) != 0;
  if ((has_file && columns.file.size() != count) || columns.length.size() != count || columns.place.size() != count) {
    throw py::value_error("transfers need a file, an offset, a length and a place each");
  }
  if (has_list && PyList_Size(memory.ptr()) != count) {
    throw py::value_error("a list of buffers needs one for each of " + std::to_string(count) + " transfers, not " +
                          std::to_string(PyList_Size(memory.ptr())));
  }
  Buffer buffer;
  py::handle last;
  const PyTypeObject* last_type = nullptr;
  Kind kind = Kind::kOther;  // of last_type, because the look-up takes as long as all the rest
  if (!has_list) buffer = buffer_of(memory, access);
  std::vector<Transfer> transfers;
  transfers.reserve(static_cast<size_t>(count));
  for (py::ssize_t i = 0; i < count; ++i) {
    const int32_t index = has_file ? columns.file.data()[i] : 0;
    const int64_t offset = columns.offset.data()[i], length = columns.length.data()[i];
    const int64_t place = columns.place.data()[i];
    if (index < 0 || static_cast<size_t>(index) >= files) {
      throw py::value_error("no file has the index " + std::to_string(index));
    }
    if (offset < 0 || length < 0) throw py::value_error("an offset or a length is negative");
    if (has_list) {
      const py::handle object = PyList_GET_ITEM(memory.ptr(), i);
      if (Py_TYPE(object.ptr()) != last_type) kind = kind_of(object);
      if (!object.is(last)) buffer = buffer_of_kind(kind, object, access);  // rows of one tensor are consecutive
      last = object;
      last_type = Py_TYPE(object.ptr());
    }
    check_within(buffer, place, result_bytes(conversion, static_cast<uint64_t>(length)), i);
    transfers.push_back({static_cast<uint32_t>(index), static_cast<uint64_t>(offset), static_cast<uint64_t>(length),
                         buffer.begin + place});
  }
  return transfers;
}

}  // namespace gdsdata
