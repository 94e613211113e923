// Python bindings of the engine: reads and writes of ranges, and whole files.
#pragma once

#include <pybind11/pybind11.h>

namespace gdsdata {

// Adds `Engine`, `Mark`, `Endings`, `BegunRead` and `Output` to the module.
void bind_calls(pybind11::module_& module);

}  // namespace gdsdata
