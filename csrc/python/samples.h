// Python bindings of what places samples: their order, their files and offsets.
#pragma once

#include <pybind11/pybind11.h>

namespace gdsdata {

// Adds `permute`, `permute_each`, `find_files`, `locate` and `unpack_extents` to the module.
void bind_samples(pybind11::module_& module);

}  // namespace gdsdata
