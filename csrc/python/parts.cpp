#include "python/parts.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/copy.h"
#include "base/crc32.h"
#include "python/buffer.h"
#include "python/gil.h"
#include "python/values.h"

namespace py = pybind11;

namespace gdsdata {

namespace {

// Copies `length` bytes from each address to `place` in the target. The GIL is released during the
// copies. The caller keeps what lies at the addresses.
void copy_parts(const Array<uint64_t>& address, const Array<int64_t>& length, const py::object& target,
                const Array<int64_t>& place) {
  const std::vector<Transfer> parts = transfers_of(1, {{}, place, length, place}, target, Access::kWrite);
  if (address.size() != place.size()) throw py::value_error("each part needs an address");
  const WithoutGil nogil;
  for (size_t i = 0; i < parts.size(); ++i) {
    copy_bytes(parts[i].memory, reinterpret_cast<const std::byte*>(address.data()[i]), parts[i].length);
  }
}

// Returns the CRC-32 of `length` bytes from `begin` on, for each part of a memory. The GIL is
// released meanwhile.
Array<uint32_t> crc32_of_parts(const py::object& memory, const Array<int64_t>& begin, const Array<int64_t>& length) {
  const std::vector<Transfer> parts = transfers_of(1, {{}, begin, length, begin}, memory, Access::kRead);
  Array<uint32_t> found(static_cast<py::ssize_t>(parts.size()));
  uint32_t* const crc32s = found.mutable_data();
  const WithoutGil nogil;
  std::ranges::transform(parts, crc32s, [](const Transfer& part) { return crc32(part.memory, part.length); });
  return found;
}

}  // namespace

void bind_parts(py::module_& module) {
  module.def("copy_parts", &copy_parts, py::arg("address"), py::arg("length"), py::arg("target"), py::arg("place"));
  module.def("crc32_of_parts", &crc32_of_parts, py::arg("memory"), py::arg("begin"), py::arg("length"));
}

}  // namespace gdsdata
