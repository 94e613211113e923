// Paths and URLs that Python gives, and text that has some in it.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace gdsdata {

// A parameter's type: a str or bytes, as the bytes that os.fsencode makes. A name on Linux need not
// be UTF-8.
struct Path {
  std::string bytes;
};

// The opposite, for messages: bytes that are not UTF-8 become what os.fsdecode makes of them.
inline pybind11::str text_with_paths(const std::string& text) {
  PyObject* const decoded = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogateescape");
  if (decoded == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::str>(decoded);
}

}  // namespace gdsdata

template <>
struct pybind11::detail::type_caster<gdsdata::Path> {
  PYBIND11_TYPE_CASTER(gdsdata::Path, const_name("str"));

  bool load(handle source, bool) {
    object encoded = reinterpret_borrow<object>(source);
    if (PyUnicode_Check(source.ptr()) != 0) {
      encoded = reinterpret_steal<object>(PyUnicode_EncodeFSDefault(source.ptr()));
      if (!encoded) throw error_already_set();
    }
    if (PyBytes_Check(encoded.ptr()) == 0) return false;
    value.bytes = reinterpret_borrow<pybind11::bytes>(encoded);
    if (value.bytes.find('\0') == std::string::npos) return true;
    throw value_error(std::string(repr(source)) + " contains a NUL, and no path may: give the file's name without it");
  }
};
