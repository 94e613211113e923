#include "python/values.h"

#include <algorithm>
#include <map>

#include "python/path.h"

namespace py = pybind11;

namespace gdsdata {

Array<uint32_t> array_of(const std::vector<uint32_t>& values) {
  return Array<uint32_t>(static_cast<py::ssize_t>(values.size()), values.data());
}

std::chrono::nanoseconds duration_of(double seconds) {
  constexpr double kLongest = 1e9;  // in seconds; fits into a duration
  return std::chrono::nanoseconds(static_cast<int64_t>(std::min(seconds, kLongest) * 1e9));
}

DirectMode direct_mode(const std::string& name) {
  if (name == "auto") return DirectMode::kAuto;
  if (name == "always") return DirectMode::kAlways;
  if (name == "never") return DirectMode::kNever;
  throw py::value_error("direct must be 'auto', 'always' or 'never', not '" + name + "'");
}

Checksum checksum_of(const std::string& name) {
  if (name == "none") return Checksum::kNone;
  if (name == "crc32") return Checksum::kCrc32;
  if (name == "crc32c") return Checksum::kCrc32c;
  throw py::value_error("unknown checksum '" + name + "'");
}

Conversion conversion_of(const std::string& name) {
  static const std::map<std::string, Conversion> kNames = {
      {"none", Conversion::kNone},
      {"u8_to_i64", Conversion::kU8ToI64},
      {"u16_to_i64", Conversion::kU16ToI64},
      {"i16_to_i64", Conversion::kI16ToI64},
      {"i32_to_i64", Conversion::kI32ToI64},
      {"u32_to_i64", Conversion::kU32ToI64},
      {"f32_to_f16", Conversion::kF32ToF16},
      {"f32_to_bf16", Conversion::kF32ToBf16},
      {"f16_to_f32", Conversion::kF16ToF32},
      {"f16_to_bf16", Conversion::kF16ToBf16},
      {"bf16_to_f32", Conversion::kBf16ToF32},
      {"bf16_to_f16", Conversion::kBf16ToF16},
      {"swap_2", Conversion::kSwap2},
      {"swap_4", Conversion::kSwap4},
      {"swap_8", Conversion::kSwap8},
  };
  const auto found = kNames.find(name);
  if (found == kNames.end()) throw py::value_error("unknown conversion '" + name + "'");
  return found->second;
}

py::dict by_route(const RouteBytes& bytes) {
  py::dict result;
  for (size_t i = 0; i < kRouteCount; ++i) result[kRouteNames[i]] = bytes.bytes[i];
  return result;
}

namespace {

py::dict to_dict(const LatencySummary& latency) {
  py::dict result;
  result["count"] = latency.count;
  result["p50_us"] = latency.p50_us;
  result["p90_us"] = latency.p90_us;
  result["p99_us"] = latency.p99_us;
  result["p999_us"] = latency.p999_us;
  return result;
}

}  // namespace

py::dict to_dict(const EngineStatistics& statistics) {
  py::dict result;
  result["bytes"] = by_route(statistics.bytes);
  result["storage_bytes"] = statistics.storage_bytes;
  result["transfers"] = statistics.transfers;
  result["requests"] = statistics.requests;
  result["segments"] = statistics.segments;
  result["errors"] = statistics.errors;
  result["retries"] = statistics.retries;
  result["worker_idle_s"] = statistics.worker_idle_s;
  result["worker_active_s"] = statistics.worker_active_s;
  result["worker_storage_s"] = statistics.worker_storage_s;
  result["worker_link_s"] = statistics.worker_link_s;
  result["worker_device_s"] = statistics.worker_device_s;
  result["segment_latency"] = to_dict(statistics.segment_latency);
  return result;
}

py::dict to_dict(const PrefetchStatistics& statistics) {
  py::dict result;
  result["bytes"] = by_route(statistics.bytes);
  result["batches"] = statistics.batches;
  result["stalls"] = statistics.stalls;
  result["stall_s"] = statistics.stall_s;
  result["ring_full_s"] = statistics.ring_full_s;
  result["mean_ready"] = statistics.mean_ready;
  result["ready"] = statistics.ready;
  result["filling"] = statistics.filling;
  return result;
}

py::list to_list(const std::vector<Spans>& of_workers) {
  py::list result;
  for (const Spans& of_worker : of_workers) {
    py::list spans;
    for (const Span& span : of_worker.spans) {
      spans.append(py::make_tuple(kWorkNames[static_cast<size_t>(span.work)], span.begin_ns, span.end_ns, span.bytes));
    }
    result.append(py::make_tuple(spans, of_worker.dropped));
  }
  return result;
}

void raise(const Error& error) {
  const py::module_ errors = py::module_::import("gdsdata.errors");
  const py::str message = text_with_paths(error.message), path = text_with_paths(error.path);
  py::object exception;
  switch (error.code) {
    case ErrorCode::kInvalidArgument:
      exception = py::reinterpret_borrow<py::object>(PyExc_ValueError)(message);
      break;
    case ErrorCode::kNotFound:
      exception = py::reinterpret_borrow<py::object>(PyExc_FileNotFoundError)(error.system_errno, message);
      exception.attr("path") = path;
      break;
    case ErrorCode::kUnavailable:
      exception = errors.attr("BackendUnavailable")(message, py::make_tuple(message));
      break;
    case ErrorCode::kIo:
      exception = errors.attr("IoError")(error.system_errno, message, path, error.offset, error.length);
      break;
    case ErrorCode::kNotReplaceable:
      exception = errors.attr("NotReplaceable")(error.system_errno, message, path);
      break;
    case ErrorCode::kCorrupt:
      exception = errors.attr("CorruptData")(message, path, error.offset, error.length);
      break;
    case ErrorCode::kDevice:
      exception = errors.attr("DeviceError")(message);
      break;
    case ErrorCode::kStalled:
      exception = errors.attr("StallError")(message);
      break;
    case ErrorCode::kClosed:
      exception = errors.attr("EngineClosed")(message);
      break;
  }
  PyErr_SetObject(py::type::of(exception).ptr(), exception.ptr());
}

}  // namespace gdsdata
