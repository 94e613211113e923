// The engine's types: requests to a backend, and their results.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>

#include "base/convert.h"
#include "base/error.h"

namespace gdsdata {

class File;

enum class Direction : uint8_t { kRead, kWrite };

// The route that bytes really took, counted where they arrive and not where they were requested.
enum class Route : uint8_t {
  kPageCache,
  kDirect,
  kBuffered,
  kGds,           // the disk's DMA into the device
  kGdsCompat,     // copied through host memory by cuFile
  kPinnedCache,   // gathered by the device from registered page cache
  kRemote,        // from a server, straight to where it was wanted
  kCacheFill,     // from a server, and into the local cache on the way
  kLocalCache,    // from a block that the local cache had
};
inline constexpr size_t kRouteCount = 9;
inline constexpr std::array<const char*, kRouteCount> kRouteNames = {"page_cache", "direct",     "buffered",
                                                                     "gds",        "gds_compat", "pinned_page_cache",
                                                                     "remote",     "cache_fill", "local_cache"};

struct RouteBytes {
  std::array<uint64_t, kRouteCount> bytes{};
  uint64_t& operator[](Route route) { return bytes[static_cast<size_t>(route)]; }
  uint64_t operator[](Route route) const { return bytes[static_cast<size_t>(route)]; }
  RouteBytes& operator+=(const RouteBytes& other) {
    for (size_t i = 0; i < kRouteCount; ++i) bytes[i] += other.bytes[i];
    return *this;
  }
  uint64_t total() const { return std::accumulate(bytes.begin(), bytes.end(), uint64_t{0}); }
};

// An extent of a file and the memory it is read into or written from.
struct Transfer {
  uint32_t file = 0;  // index in a FileTable
  uint64_t offset = 0;
  uint64_t length = 0;
  std::byte* memory = nullptr;
};

// The part of a request that is read to, or written from, one place in memory.
struct Piece {
  uint64_t offset = 0;  // in the file
  uint64_t length = 0;
  std::byte* memory = nullptr;
  // For writes, may be null: a CRC-32 that is updated with these bytes when the request is taken.
  // Used by backends whose pieces are in memory that the processor can read.
  uint32_t* checksum = nullptr;
};

// A request to a backend: one contiguous range of one file, with any alignment, and the wanted
// pieces of it. The caller owns file and pieces, and keeps them until it reaps the completion.
struct Request {
  uint64_t tag = 0;  // set by the caller, returned in the completion
  Direction direction = Direction::kRead;
  Conversion conversion = Conversion::kNone;
  File* file = nullptr;
  uint64_t offset = 0;
  uint64_t length = 0;            // not 0
  std::span<const Piece> pieces;  // for a write: the complete range, in order
  // A read of one piece may overwrite all pages that it touches, because they hold no other data.
  bool owns_pages = false;
  // A read whose bytes are on a server, at least some of them. It may be longer than the backend's
  // other requests.
  bool remote = false;
  // True once nobody wants the bytes of a remote read. May be null.
  const std::atomic<bool>* canceled = nullptr;
  bool is_canceled() const { return canceled != nullptr && canceled->load(std::memory_order_relaxed); }
};

// If there is no error, every piece is in place, or every byte is written to the file.
struct Completion {
  uint64_t tag = 0;
  RouteBytes bytes;            // delivered, by route
  uint64_t storage_bytes = 0;  // moved to or from storage, including alignment and gaps
  std::optional<Error> error;
};

}  // namespace gdsdata
