#include "python/page_memory.h"

#include <memory>
#include <utility>

#include "device/anonymous_memory.h"
#include "device/device.h"
#include "python/buffer.h"
#include "python/gil.h"

namespace py = pybind11;

namespace gdsdata {

namespace {

// -1 means the processor, other values a CUDA device.
std::shared_ptr<PinnedBuffer> make(int cuda_ordinal, size_t bytes) {
  std::unique_ptr<PinnedBuffer> memory;
  {
    const WithoutGil nogil;
    memory = (cuda_ordinal < 0 ? host_device() : cuda_device(cuda_ordinal))->allocate_pinned(bytes);
  }
  return ends_without_gil(std::move(memory));
}

}  // namespace

void bind_page_memory(py::module_& module) {
  py::class_<PinnedBuffer, std::shared_ptr<PinnedBuffer>>(module, "PageMemory", py::buffer_protocol())
      .def(py::init(&make), py::kw_only(), py::arg("cuda_ordinal"), py::arg("bytes"))
      .def_buffer([](PinnedBuffer& memory) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(memory.data()),
                               static_cast<py::ssize_t>(memory.size_bytes()));
      });
  module.def(
      "touch",
      [](const py::object& memory) {
        const Buffer buffer = buffer_of(memory, Access::kWrite);
        const WithoutGil nogil;
        touch(buffer.begin, buffer.bytes);
      },
      py::arg("memory"));
}

}  // namespace gdsdata
