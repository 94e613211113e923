// Python bindings of objects on servers.
#pragma once

#include <pybind11/pybind11.h>

namespace gdsdata {

// Adds `RemoteObject`, `object_version`, `take_access_requests`, and `http_...` to the module.
void bind_remote(pybind11::module_& module);

}  // namespace gdsdata
