// Memory that a Python caller passes to the engine for one call, with its bounds.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/convert.h"
#include "base/types.h"

namespace gdsdata {

// How the engine accesses the memory.
enum class Access : uint8_t { kRead, kWrite };

struct Buffer {
  std::byte* begin = nullptr;
  uint64_t bytes = 0;
};

// Returns the memory of a tensor, of a torch storage, or of an object with Python's buffer
// protocol. The caller keeps the object alive. Throws ValueError if the memory has gaps or is
// read-only, TypeError if there is none.
Buffer buffer_of(pybind11::handle object, Access access);

// Columns of equal length, one row for each transfer. An empty `file` means the first file for all.
struct TransferColumns {
  const pybind11::array_t<int32_t, pybind11::array::c_style>& file;
  const pybind11::array_t<int64_t, pybind11::array::c_style>& offset;  // bytes, in the file
  const pybind11::array_t<int64_t, pybind11::array::c_style>& length;  // bytes, in the file
  const pybind11::array_t<int64_t, pybind11::array::c_style>& place;  // bytes, in the transfer's buffer
};

// Returns the transfers of these rows. `memory` is one buffer for all of them, or a list with one
// for each. Throws ValueError if a transfer's bytes, after `conversion`, exceed its buffer.
std::vector<Transfer> transfers_of(size_t files, const TransferColumns& columns, const pybind11::object& memory,
                                   Access access, Conversion conversion = Conversion::kNone);

}  // namespace gdsdata
