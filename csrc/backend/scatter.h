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
  // Bytes of the range, in order.
  void take(uint64_t offset, std::span<const std::byte> bytes);
  // After all bytes: converts the pieces, if they are converted. Returns the bytes of all pieces.
  uint64_t finish();

 private:
  const Request request_;
  size_t first_ = 0;  // pieces before it are complete
  // The whole range of a request with a conversion, because elements may arrive in parts.
  std::vector<std::byte> stored_;
};

}  // namespace gdsdata
