// The extension module gdsdata._engine. gdsdata/io/engine.py is its only user.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "backend/cufile_api.h"
#include "base/descriptors.h"
#include "base/fallbacks.h"
#include "base/heads.h"
#include "base/pickle.h"
#include "base/processor.h"
#include "device/anonymous_memory.h"
#include "device/device.h"
#include "engine/engine.h"
#include "python/batches.h"
#include "python/block_cache.h"
#include "python/buffer.h"
#include "python/calls.h"
#include "python/checksums.h"
#include "python/gil.h"
#include "python/names.h"
#include "python/page_memory.h"
#include "python/parts.h"
#include "python/path.h"
#include "python/remote.h"
#include "python/samples.h"
#include "python/state_pickler.h"
#include "python/values.h"
#include "tuning.h"

namespace py = pybind11;
using namespace gdsdata;

namespace {

std::string_view text_of(const Array<uint8_t>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), static_cast<size_t>(bytes.size())};
}

py::list texts_of(const std::vector<std::string>& messages) {
  py::list texts;
  for (const std::string& message : messages) texts.append(text_with_paths(message));
  return texts;
}

std::shared_ptr<FileTable> make_file_table(const Array<uint8_t>& joined_paths, const Array<int64_t>& size_bytes,
                                           const Array<int64_t>& mtime_ns, std::vector<std::shared_ptr<File>> opened) {
  const auto count = static_cast<size_t>(size_bytes.size());
  if (size_bytes.size() != mtime_ns.size()) {
    throw py::value_error("a file table needs a size and a modification time for each path");
  }
  std::vector<FileIdentity> identities;
  identities.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    identities.push_back({static_cast<uint64_t>(size_bytes.data()[i]), mtime_ns.data()[i]});
  }
  return std::make_shared<FileTable>(PathList(text_of(joined_paths), count), std::move(identities), std::move(opened));
}

// For each range, whether all of it is in the page cache. False of a file that cannot be opened.
Array<bool> in_page_cache(FileTable& files, const Array<int32_t>& file, const Array<int64_t>& offset,
                          const Array<int64_t>& length) {
  const py::ssize_t count = file.size();
  if (offset.size() != count || length.size() != count) throw py::value_error("file, offset and length differ in size");
  Array<bool> found(count);
  const WithoutGil nogil;  // opening an object asks a thread for access to it
  for (py::ssize_t i = 0; i < count; ++i) {
    const auto index = static_cast<uint32_t>(file.data()[i]);
    if (index >= files.size()) throw std::out_of_range("a file's index is beyond the table");
    try {
      const auto [begin, size] = std::pair(offset.data()[i], length.data()[i]);
      found.mutable_data()[i] = files.get(index)->residency(static_cast<uint64_t>(begin),
                                                            static_cast<uint64_t>(size)) == File::Residency::kAll;
    } catch (const Failure&) {
      found.mutable_data()[i] = false;
    }
  }
  return found;
}

py::tuple heads_of(const Array<uint8_t>& joined_paths, size_t count, size_t length, size_t threads) {
  const PathList paths(text_of(joined_paths), count);
  const auto files = static_cast<py::ssize_t>(count);
  Array<uint8_t> bytes({files, static_cast<py::ssize_t>(length)});
  Array<int64_t> read_bytes(files), size_bytes(files), mtime_ns(files);
  const Heads heads{reinterpret_cast<std::byte*>(bytes.mutable_data()), read_bytes.mutable_data(),
                    size_bytes.mutable_data(), mtime_ns.mutable_data()};
  std::optional<size_t> failed;
  {
    const WithoutGil nogil;
    failed = read_heads(paths, length, threads, heads);
  }
  return py::make_tuple(failed, bytes, read_bytes, size_bytes, mtime_ns);
}

py::tuple statuses_of(const Array<uint8_t>& joined_paths, size_t count, size_t threads) {
  const PathList paths(text_of(joined_paths), count);
  const auto files = static_cast<py::ssize_t>(count);
  Array<int64_t> modes(files), size_bytes(files), mtime_ns(files);
  const Statuses statuses{modes.mutable_data(), size_bytes.mutable_data(), mtime_ns.mutable_data()};
  {
    const WithoutGil nogil;
    find_statuses(paths, threads, statuses);
  }
  return py::make_tuple(modes, size_bytes, mtime_ns);
}

void bind_files(py::module_& module) {
  py::class_<File, std::shared_ptr<File>>(module, "File")
      .def(py::init([](const Path& path) { return File::open_for_reading(path.bytes); }))
      .def_property_readonly("descriptor", &File::buffered);

  module.attr("ANY_TIME") = FileIdentity::kAnyTime;
  py::class_<FileTable, std::shared_ptr<FileTable>>(module, "FileTable")
      .def(py::init(&make_file_table), py::arg("joined_paths"), py::arg("size_bytes"), py::arg("mtime_ns"),
           py::arg("opened") = std::vector<std::shared_ptr<File>>())
      .def(py::init([](const Path& path) {  // not compared with an index
        return std::make_shared<FileTable>(std::vector{path.bytes}, std::vector<FileIdentity>());
      }))
      .def_property_readonly("has_remote", &FileTable::has_remote)
      .def(
          "evict_changed", [](FileTable& files) { files.evict_changed(); }, py::call_guard<WithoutGil>())
      .def("in_page_cache", &in_page_cache, py::arg("file"), py::arg("offset"), py::arg("length"));
}

}  // namespace

PYBIND11_MODULE(_engine, module) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Failure& failure) {
      raise(failure.error());
    } catch (const std::system_error& error) {  // a thread could not start
      Error found{ErrorCode::kIo, std::string("could not start a thread: ") + error.code().message()};
      found.message += "; raise the limit of processes (ulimit -u, or pids.max of the container) or of memory";
      found.system_errno = error.code().value();
      raise(found);
    }
  });
  // While Python still imports, because later an open would wait.
  expect_descriptors(std::min(tuning::kUsualDescriptors, most_cached_descriptors()));
  bind_files(module);
  bind_calls(module);
  bind_batches(module);
  bind_block_cache(module);
  bind_checksums(module);
  bind_names(module);
  bind_page_memory(module);
  bind_samples(module);
  bind_parts(module);
  bind_remote(module);
  bind_state_pickler(module);
  bind_interpreter_end(module);
  module.def(
      "pickle_claims_too_much",
      [](const py::bytes& pickle) {
        const std::string_view bytes = pickle;
        return pickle_claims_too_much({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
      },
      py::arg("pickle"));
  module.attr("ROUTES") = py::cast(kRouteNames).cast<py::tuple>();
  module.def("find_statuses", &statuses_of, py::arg("joined_paths"), py::arg("count"), py::arg("threads"));
  module.def("read_heads", &heads_of, py::arg("joined_paths"), py::arg("count"), py::arg("length"), py::arg("threads"));
  module.def(
      "read_each",
      [](int descriptor, const Path& path, const Array<int64_t>& offset, size_t length) {
        Array<uint8_t> found(static_cast<py::ssize_t>(static_cast<size_t>(offset.size()) * length));
        auto* const out = reinterpret_cast<std::byte*>(found.mutable_data());
        const WithoutGil nogil;
        read_each(descriptor, path.bytes, span_of(offset), length, out);
        return found;
      },
      py::arg("descriptor"), py::arg("path"), py::arg("offset"), py::arg("length"));
  module.def(
      "prefer_huge_pages",
      [](py::object memory) {
        const Buffer buffer = buffer_of(memory, Access::kWrite);
        prefer_huge_pages(buffer.begin, buffer.bytes);
      },
      py::arg("memory"));
  module.def("exchange_capture_mode", &exchange_capture_mode, py::arg("mode"));
  module.def("processor_features", [] { return names_of(processor()); });
  module.def("direct_refusals", [] { return texts_of(direct_refusals()); });
  module.def("set_cufile_search_path", &set_cufile_search_path);
  module.def("cufile_dma_is_possible", &cufile_dma_is_possible);
  module.def("noted_fallbacks", [] { return texts_of(noted_fallbacks()); });
  module.def("stop_cufile_statistics", &stop_cufile_statistics);
}
