// Puts the bytes of a request's range, as they arrive, where its pieces want them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/types.h"

namespace gdsdata {

class Scatter {
 public:
  explicit Scatter(const Request& request);
  // Takes bytes of the range, each once. Returns how many bytes of pieces they are.
  uint64_t take(uint64_t offset, std::span<const std::byte> bytes);
  // Memory in which the bytes of the range from `offset` on may be put before they are taken; empty
  // if there is none.
  std::span<std::byte> memory_at(uint64_t offset);
  // After all bytes: converts the pieces, if they are converted.
  void finish();

 private:
  void skip_pieces_before(uint64_t offset);

  const Request request_;
  size_t first_ = 0;      // pieces before it end before the bytes taken last
  uint64_t taken_end_ = 0;  // the end of the bytes taken last
  // The whole range of a request with a conversion, because elements may arrive in parts.
  std::vector<std::byte> stored_;
};

}  // namespace gdsdata
