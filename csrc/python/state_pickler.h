// Pickles states as Python's pickler does, byte for byte, in a fraction of its time.
#pragma once

#include <pybind11/pybind11.h>

namespace gdsdata {

// Adds `StatePickler` to the module.
void bind_state_pickler(pybind11::module_& module);

}  // namespace gdsdata
