// Python bindings of the prefetcher, the buffer pool and the residence.
#pragma once

#include <pybind11/pybind11.h>

namespace gdsdata {

// Adds `Residence`, `BufferPool`, `Batches` and `record_stream` to the module.
void bind_batches(pybind11::module_& module);

}  // namespace gdsdata
