// Converts values between the engine and Python: names of options, arrays, statistics, errors.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/convert.h"
#include "base/crc32.h"
#include "base/error.h"
#include "engine/engine.h"
#include "engine/prefetcher.h"

namespace gdsdata {

template <typename T>
using Array = pybind11::array_t<T, pybind11::array::c_style>;

template <typename T>
std::span<const T> span_of(const Array<T>& array) {
  return {array.data(), static_cast<size_t>(array.size())};
}

Array<uint32_t> array_of(const std::vector<uint32_t>& values);
std::chrono::nanoseconds duration_of(double seconds);

// Convert from names in Python. They throw ValueError if a name is unknown.
DirectMode direct_mode(const std::string& name);
Checksum checksum_of(const std::string& name);
Conversion conversion_of(const std::string& name);

pybind11::dict by_route(const RouteBytes& bytes);
pybind11::dict to_dict(const EngineStatistics& statistics);
pybind11::dict to_dict(const PrefetchStatistics& statistics);

// Returns each worker's spans (work, begin and end in ns, bytes), and how many were dropped.
pybind11::list to_list(const std::vector<Spans>& of_workers);

// Sets the Python exception for an error: one of gdsdata.errors or a built-in one.
void raise(const Error& error);

}  // namespace gdsdata
