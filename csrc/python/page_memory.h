// Python bindings of memory on whole pages, which may be pinned.
#pragma once

#include <pybind11/pybind11.h>

namespace gdsdata {

// Adds `PageMemory` and `touch` to the module.
void bind_page_memory(pybind11::module_& module);

}  // namespace gdsdata
