// Python bindings of objects on servers.
#pragma once

#include <pybind11/pybind11.h>

namespace gdsdata {

// Adds `object_version`, `RemoteObject` and `take_access_requests` to the module.
void bind_remote(pybind11::module_& module);

}  // namespace gdsdata
