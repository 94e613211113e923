// Finds objects in the dictionaries of modules.
#pragma once

#include <pybind11/pybind11.h>

namespace gdsdata {

void bind_names(pybind11::module_& module);

}  // namespace gdsdata
