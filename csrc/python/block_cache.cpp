#include "python/block_cache.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/block_cache.h"
#include "python/buffer.h"
#include "python/gil.h"
#include "python/path.h"

namespace py = pybind11;

namespace gdsdata {

namespace {

std::shared_ptr<BlockCache> open_cache(const Path& folder, std::optional<uint64_t> most_bytes, uint64_t block_bytes) {
  const WithoutGil nogil;
  return BlockCache::open(folder.bytes, most_bytes.value_or(UINT64_MAX), block_bytes);
}

py::dict statistics(const BlockCache& cache) {
  const BlockCacheStatistics counted = cache.statistics();
  py::dict dict;
  dict["used_bytes"] = counted.used_bytes;
  dict["most_bytes"] = counted.most_bytes;
  dict["block_bytes"] = counted.block_bytes;
  dict["filled_blocks"] = counted.filled_blocks;
  dict["filled_bytes"] = counted.filled_bytes;
  dict["evicted_objects"] = counted.evicted_objects;
  dict["evicted_bytes"] = counted.evicted_bytes;
  dict["damaged_blocks"] = counted.damaged_blocks;
  dict["refused_blocks"] = counted.refused_blocks;
  return dict;
}

py::list list_objects(const BlockCache& cache) {
  std::vector<CachedObjectSummary> found;
  {
    const WithoutGil nogil;
    found = cache.list();
  }
  py::list list;
  for (const CachedObjectSummary& object : found) {
    list.append(py::make_tuple(object.name, py::bytes(object.about), object.size_bytes, object.held_bytes,
                               object.last_use_ns, object.is_in_use));
  }
  return list;
}

// Returns how many blocks are right, and how many were wrong; None if there is no such object.
std::optional<std::pair<size_t, size_t>> verify(BlockCache& cache, const std::string& name) {
  const WithoutGil nogil;
  const auto object = cache.object_named(name);
  if (object == nullptr) return std::nullopt;
  const auto verified = object->verify();
  return std::pair(verified.right, verified.wrong);
}

const char* name_of(CachedObject::Claim claim) {
  switch (claim) {
    case CachedObject::Claim::kPresent:
      return "present";
    case CachedObject::Claim::kClaimed:
      return "claimed";
    case CachedObject::Claim::kElsewhere:
      return "elsewhere";
    case CachedObject::Claim::kNoRoom:
      break;
  }
  return "no room";
}

bool fill(CachedObject& object, size_t block, const py::object& memory) {
  const Buffer buffer = buffer_of(memory, Access::kRead);
  const WithoutGil nogil;
  return object.fill(block, {buffer.begin, static_cast<size_t>(buffer.bytes)});
}

}  // namespace

void bind_block_cache(py::module_& module) {
  using WithoutGilCall = py::call_guard<WithoutGil>;
  py::class_<CachedObject, std::shared_ptr<CachedObject>>(module, "CachedObject")
      .def_property_readonly("data_path",
                             [](const CachedObject& object) { return text_with_paths(object.data_path()); })
      .def_property_readonly("block_bytes", &CachedObject::block_bytes)
      .def_property_readonly("block_count", &CachedObject::block_count)
      .def("holds", &CachedObject::holds, py::arg("offset"), py::arg("length"))
      .def(
          "claim",
          [](CachedObject& object, size_t block) {
            CachedObject::Claim claim{};
            {
              const WithoutGil nogil;
              claim = object.claim(block);
            }
            return name_of(claim);
          },
          py::arg("block"))
      .def("fill", &fill, py::arg("block"), py::arg("memory"))
      .def("release", &CachedObject::release, py::arg("block"), WithoutGilCall());
  py::class_<BlockCache, std::shared_ptr<BlockCache>>(module, "BlockCache")
      .def(py::init(&open_cache), py::arg("folder"), py::arg("most_bytes"), py::arg("block_bytes"))
      .def_property_readonly("folder", [](const BlockCache& cache) { return text_with_paths(cache.folder()); })
      .def("statistics", &statistics)
      .def("object", &BlockCache::object, py::arg("location"), py::arg("version"), py::arg("size_bytes"),
           py::arg("tag"), WithoutGilCall())
      .def("objects", &list_objects)
      .def("verify", &verify, py::arg("name"))
      .def("evict", &BlockCache::evict, py::arg("name"), WithoutGilCall());
}

}  // namespace gdsdata
