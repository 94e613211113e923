// Python bindings of checksums.
#pragma once

#include <pybind11/pybind11.h>

namespace gdsdata {

// Adds `crc32_joined` and `crc32c_of_rows` to the module.
void bind_checksums(pybind11::module_& module);

}  // namespace gdsdata
