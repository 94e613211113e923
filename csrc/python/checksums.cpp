#include "python/checksums.h"

#include <pybind11/numpy.h>

#include <cstddef>
#include <cstdint>

#include "base/crc32.h"

namespace py = pybind11;

namespace gdsdata {

namespace {

// Returns the CRC-32C of each row's bytes.
py::array_t<uint32_t> crc32c_of_rows(const py::array_t<uint8_t, py::array::c_style>& rows) {
  if (rows.ndim() != 2) throw py::value_error("crc32c_of_rows takes an array of two dimensions");
  py::array_t<uint32_t> found(rows.shape(0));
  const auto* row = reinterpret_cast<const std::byte*>(rows.data());
  for (py::ssize_t i = 0; i < rows.shape(0); ++i, row += rows.shape(1)) {
    found.mutable_data()[i] = crc32c(row, static_cast<size_t>(rows.shape(1)));
  }
  return found;
}

}  // namespace

void bind_checksums(py::module_& module) {
  module.def("crc32_joined", &crc32_joined, py::arg("of_first"), py::arg("of_second"), py::arg("second_length"));
  module.def("crc32c_of_rows", &crc32c_of_rows, py::arg("rows"));
}

}  // namespace gdsdata
