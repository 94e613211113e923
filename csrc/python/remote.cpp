#include "python/remote.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backend/http_client.h"
#include "backend/http_exchange.h"
#include "base/block_cache.h"
#include "base/remote_object.h"
#include "base/url.h"
#include "python/buffer.h"
#include "python/gil.h"
#include "python/path.h"
#include "python/values.h"

namespace py = pybind11;

namespace gdsdata {

namespace {

// Headers may have any bytes; Python's str has Latin-1 then.
py::object decoded(const std::string& text) {
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeLatin1(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr));
}

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

std::optional<double> refused_age_s(const RemoteObject& object) {
  const auto granted = object.refused_grant();
  if (!granted) return std::nullopt;
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - *granted).count();
}

ErrorCode code_of(const std::string& kind) {
  if (kind == "not_found") return ErrorCode::kNotFound;
  if (kind == "invalid_argument") return ErrorCode::kInvalidArgument;
  if (kind == "unavailable") return ErrorCode::kUnavailable;
  if (kind == "io") return ErrorCode::kIo;
  throw py::value_error("refuse: there are not_found, invalid_argument, unavailable and io, not '" + kind + "'");
}

void refuse(RemoteObject& object, const std::string& kind, std::string message, int system_errno) {
  const Error error{code_of(kind), std::move(message), shown_url(object.location()), 0, 0, system_errno};
  const WithoutGil nogil;
  object.refuse(error);
}

py::tuple exchange(std::string method, std::string url, std::vector<std::string> headers, const py::object& body,
                   double timeout_s, size_t most_body_bytes) {
  HttpRequest request;
  request.method = std::move(method);
  request.url = std::move(url);
  request.headers = std::move(headers);
  if (!body.is_none()) {
    const Buffer buffer = buffer_of(body, Access::kRead);
    request.body = {buffer.begin, static_cast<size_t>(buffer.bytes)};
  }
  request.timeout = std::chrono::duration_cast<std::chrono::milliseconds>(duration_of(timeout_s));
  HttpResponse response;
  {
    const WithoutGil nogil;
    response = http_exchange(request, most_body_bytes, &check_signals);
  }
  py::list found;
  for (const auto& [name, value] : response.head.headers) {
    found.append(py::make_tuple(py::str(decoded(name)), py::str(decoded(value))));
  }
  return py::make_tuple(response.head.status, found,
                        py::bytes(reinterpret_cast<const char*>(response.body.data()), response.body.size()));
}

void configure(size_t connections, size_t reactors, double connect_timeout_s, double stall_timeout_s, double deadline_s,
               double least_backoff_s, double most_backoff_s, bool hedge) {
  const auto ms = [](double seconds) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(duration_of(seconds));
  };
  configure_http_client({connections, reactors, ms(connect_timeout_s), ms(stall_timeout_s), ms(deadline_s),
                         ms(least_backoff_s), ms(most_backoff_s), hedge});
}

py::dict statistics() {
  const auto client = http_client();
  const HttpStatistics& counted = client->statistics();
  py::dict dict;
  dict["requests"] = counted.requests.load();
  dict["retries"] = counted.retries.load();
  dict["throttled"] = counted.throttled.load();
  dict["hedges"] = counted.hedges.load();
  dict["bytes"] = counted.bytes.load();
  dict["connections"] = client->connections_made();
  return dict;
}

}  // namespace

void bind_remote(py::module_& module) {
  module.def("unsigned_url", [](const Path& url) { return text_with_paths(unsigned_url(url.bytes)); }, py::arg("url"));
  module.def("object_version", [](const std::string& tag) { return object_version(tag); }, py::arg("tag"));
  module.def("take_access_requests", &take_access_requests, py::arg("most"), py::arg("timeout_s"));
  py::class_<RemoteObject, std::shared_ptr<RemoteObject>>(module, "RemoteObject")
      .def_property_readonly("location", &RemoteObject::location)
      .def_property_readonly("refused_age_s", &refused_age_s)
      .def("grant", &grant, py::arg("url"), py::arg("headers"), py::arg("lifetime_s"))
      .def("refuse", &refuse, py::arg("kind"), py::arg("message"), py::arg("system_errno") = EIO);
  module.def(
      "use_cache",
      [](const std::optional<Path>& folder, uint64_t most_bytes, uint64_t block_bytes) {
        const WithoutGil nogil;
        use_cache(folder ? BlockCache::open(folder->bytes, most_bytes, block_bytes) : nullptr);
      },
      py::arg("folder"), py::arg("most_bytes"), py::arg("block_bytes"));
  module.def("http_refusal", [] { return CurlApi::refusal(); });
  module.def("http_exchange", &exchange, py::arg("method"), py::arg("url"), py::arg("headers"), py::arg("body"),
             py::arg("timeout_s"), py::arg("most_body_bytes"));
  const HttpOptions defaults;
  const auto seconds = [](std::chrono::milliseconds time) { return std::chrono::duration<double>(time).count(); };
  module.def("configure_http", &configure, py::kw_only(), py::arg("connections") = defaults.connections,
             py::arg("reactors") = defaults.reactors, py::arg("connect_timeout_s") = seconds(defaults.connect_timeout),
             py::arg("stall_timeout_s") = seconds(defaults.stall_timeout),
             py::arg("deadline_s") = seconds(defaults.deadline),
             py::arg("least_backoff_s") = seconds(defaults.least_backoff),
             py::arg("most_backoff_s") = seconds(defaults.most_backoff), py::arg("hedge") = defaults.hedge);
  module.def("http_statistics", &statistics);
  module.def("close_http", [] {
    const WithoutGil nogil;
    close_http_client();
  });
}

}  // namespace gdsdata
