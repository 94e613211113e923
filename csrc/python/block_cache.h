// Python bindings of the cache of blocks.
#pragma once

#include <pybind11/pybind11.h>

namespace gdsdata {

// Adds `BlockCache` and `CachedObject` to the module.
void bind_block_cache(pybind11::module_& module);

}  // namespace gdsdata
