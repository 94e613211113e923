// Python bindings of work on many parts of memory, in one call.
#pragma once

#include <pybind11/pybind11.h>

namespace gdsdata {

// Adds `copy_parts` and `crc32_of_parts` to the module.
void bind_parts(pybind11::module_& module);

}  // namespace gdsdata
