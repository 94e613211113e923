#include "python/samples.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

#include "base/extents.h"
#include "python/gil.h"

namespace py = pybind11;

namespace gdsdata {

namespace {

template <typename T>
std::span<T> writable(Array<T>& array) {
  return {array.mutable_data(), static_cast<size_t>(array.size())};
}

Array<int64_t> images_of(const Permutation& permutation, const Array<int64_t>& positions) {
  Array<int64_t> images(positions.size());
  const auto from = span_of(positions);
  const auto to = writable(images);
  const WithoutGil nogil;
  permute(permutation, from, to);
  return images;
}

Array<int64_t> images_of_each(const Array<int64_t>& positions, const Array<int64_t>& n, const Array<uint64_t>& keys) {
  if (n.size() != positions.size() || keys.size() != positions.size()) {
    throw py::value_error("permute_each takes a size and a key for each position");
  }
  Array<int64_t> images(positions.size());
  const auto to = writable(images);
  const WithoutGil nogil;
  permute_each(span_of(positions), span_of(n), span_of(keys), to);
  return images;
}

Array<int32_t> files_of(const Array<int64_t>& samples, const Array<int64_t>& first_sample) {
  if (first_sample.size() < 2) throw py::value_error("find_files takes a first sample for each file, and their number");
  Array<int32_t> files(samples.size());
  const auto to = writable(files);
  const WithoutGil nogil;
  find_files(span_of(samples), span_of(first_sample), to);
  return files;
}

std::pair<Array<int32_t>, Array<int64_t>> places_of(const Array<int64_t>& samples, const Array<int64_t>& first_sample,
                                                    const Array<int64_t>& base_bytes,
                                                    const Array<int64_t>& stride_bytes) {
  const SamplesOfFiles all = samples_of_files(first_sample, base_bytes, stride_bytes);
  Array<int32_t> files(samples.size());
  Array<int64_t> offsets(samples.size());
  const auto files_to = writable(files);
  const auto offsets_to = writable(offsets);
  {
    const WithoutGil nogil;
    locate(span_of(samples), all, files_to, offsets_to);
  }
  return {std::move(files), std::move(offsets)};
}

std::pair<Array<int64_t>, Array<int64_t>> extents_of(const Array<uint8_t>& rows, const Array<int64_t>& samples,
                                                     const Array<int64_t>& widths, const Array<int64_t>& least,
                                                     const Array<int64_t>& order, int64_t alignment) {
  const auto fields = order.size();
  const auto in_range = [](int64_t end) { return [end](int64_t one) { return 0 <= one && one < end; }; };
  const auto all_widths = span_of(widths), fields_order = span_of(order);
  const int64_t row_bytes = std::accumulate(all_widths.begin(), all_widths.end(), int64_t{0});
  if (rows.ndim() != 2 || (rows.shape(0) == 0 && samples.size() > 0) || widths.size() != 2 * fields ||
      least.size() != 2 * fields || alignment < 1 || !std::has_single_bit(static_cast<uint64_t>(alignment)) ||
      rows.shape(1) != row_bytes || !std::all_of(all_widths.begin(), all_widths.end(), in_range(9)) ||
      !std::all_of(fields_order.begin(), fields_order.end(), in_range(fields))) {
    throw py::value_error("unpack_extents takes rows of columns, two for each field, and a power of two");
  }
  Array<int64_t> begins({samples.size(), fields}), lengths({samples.size(), fields});
  const auto begins_to = writable(begins), lengths_to = writable(lengths);
  {
    const PackedExtents packed{std::as_bytes(span_of(rows)),
                               static_cast<size_t>(rows.shape(0)),
                               all_widths,
                               span_of(least),
                               fields_order,
                               alignment};
    const WithoutGil nogil;
    unpack_extents(packed, span_of(samples), begins_to, lengths_to);
  }
  return {std::move(begins), std::move(lengths)};
}

}  // namespace

Permutation permutation_of(uint64_t n, uint64_t a, uint64_t b, const Array<uint64_t>& keys) {
  if (a < 1 || b < 1 || a > kLongestSide || b > kLongestSide || keys.size() % 2 != 0) {
    throw py::value_error("permute takes a rectangle with sides of 1 to 2**31 + 33, and an even number of keys");
  }
  return {n, a, b, span_of(keys)};
}

SamplesOfFiles samples_of_files(const Array<int64_t>& first_sample, const Array<int64_t>& base_bytes,
                                const Array<int64_t>& stride_bytes) {
  if (base_bytes.size() < 1 || stride_bytes.size() != base_bytes.size() ||
      first_sample.size() != base_bytes.size() + 1) {
    throw py::value_error("locate takes a first sample, an offset and a stride for each file, and the samples' number");
  }
  return {span_of(first_sample), span_of(base_bytes), span_of(stride_bytes)};
}

void bind_samples(py::module_& module) {
  module.def(
      "permute",
      [](const Array<int64_t>& positions, uint64_t n, uint64_t a, uint64_t b, const Array<uint64_t>& keys) {
        return images_of(permutation_of(n, a, b, keys), positions);
      },
      py::arg("positions"), py::arg("n"), py::arg("a"), py::arg("b"), py::arg("keys"));
  module.def("permute_each", &images_of_each, py::arg("positions"), py::arg("n"), py::arg("keys"));
  module.def("find_files", &files_of, py::arg("samples"), py::arg("first_sample"));
  module.def("locate", &places_of, py::arg("samples"), py::arg("first_sample"), py::arg("base_bytes"),
             py::arg("stride_bytes"));
  module.def("unpack_extents", &extents_of, py::arg("rows"), py::arg("samples"), py::arg("widths"), py::arg("least"),
             py::arg("order"), py::arg("alignment"));
}

}  // namespace gdsdata
