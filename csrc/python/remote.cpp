#include "python/remote.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/remote_object.h"
#include "python/gil.h"

namespace py = pybind11;

namespace gdsdata {

namespace {

// An access that outlives the process needs no exact time.
constexpr double kMostLifetimeS = 30 * 86400.0;

std::vector<std::shared_ptr<RemoteObject>> take_access_requests(size_t most, double timeout_s) {
  const WithoutGil nogil;
  return access_desk().take(most, std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1e3)));
}

void grant(RemoteObject& object, std::string url, std::vector<std::string> headers, double lifetime_s) {
  const auto lifetime = std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(std::min(lifetime_s, kMostLifetimeS)));
  const WithoutGil nogil;
  object.grant({std::move(url), std::move(headers), std::chrono::steady_clock::now() + lifetime});
}

void refuse(RemoteObject& object, int code, std::string message) {
  const WithoutGil nogil;
  object.refuse({static_cast<ErrorCode>(code), std::move(message), object.location()});
}

}  // namespace

void bind_remote(py::module_& module) {
  module.def("object_version", [](const std::string& tag) { return object_version(tag); }, py::arg("tag"));
  module.def("take_access_requests", &take_access_requests, py::arg("most"), py::arg("timeout_s"));
  py::class_<RemoteObject, std::shared_ptr<RemoteObject>>(module, "RemoteObject")
      .def_property_readonly("location", &RemoteObject::location)
      .def("grant", &grant, py::arg("url"), py::arg("headers"), py::arg("lifetime_s"))
      .def("refuse", &refuse, py::arg("code"), py::arg("message"));
}

}  // namespace gdsdata
