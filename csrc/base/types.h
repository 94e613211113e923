// The words of the engine: what is asked of a backend, and what comes back.
#pragma once

#include <array>
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

// Which way bytes really went. Counted where they arrive, never where they were asked for.
enum class Route : uint8_t {
  kPageCache,
  kDirect,
  kBuffered,
  kGds,           // by the disk's own DMA into the device
  kGdsCompat,     // by cuFile, which copied it through host memory
  kPinnedCache,   // gathered by the device out of page cache that is registered with it
};
inline constexpr size_t kRouteCount = 6;
inline constexpr std::array<const char*, kRouteCount> kRouteNames = {"page_cache", "direct",     "buffered",
                                                                     "gds",        "gds_compat", "pinned_page_cache"};

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

// The part of a request that lands at one place in memory, or comes from there.
struct Piece {
  uint64_t offset = 0;  // in the file
  uint64_t length = 0;
  std::byte* memory = nullptr;
  // Of a write, if not null: a CRC-32 that goes on with its bytes when the request is taken, by
  // backends whose pieces are memory that the processor reads.
  uint32_t* checksum = nullptr;
};

// What a backend sees: one contiguous range of one file, of any alignment, and the pieces of it
// that somebody wants. File and pieces belong to the caller and live until the completion is
// reaped.
struct Request {
  uint64_t tag = 0;  // the caller's; comes back in the completion
  Direction direction = Direction::kRead;
  Conversion conversion = Conversion::kNone;
  File* file = nullptr;
  uint64_t offset = 0;
  uint64_t length = 0;            // not 0
  std::span<const Piece> pieces;  // for a write: all of the range, one behind the other
  // A read of one piece may write the whole pages that it lies on: nobody else's bytes are there.
  bool owns_pages = false;
};

// Without an error, every piece of the request is in place (or every byte of it is handed to the
// file).
struct Completion {
  uint64_t tag = 0;
  RouteBytes bytes;            // delivered, by route
  uint64_t storage_bytes = 0;  // moved to or from storage for it: alignment and gaps make it more
  std::optional<Error> error;
};

}  // namespace gdsdata
