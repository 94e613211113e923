// Copies bytes and changes their element type or byte order in the same pass.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/processor.h"

namespace gdsdata {

enum class Conversion : uint8_t {
  kNone,
  kU8ToI64,
  kU16ToI64,
  kI16ToI64,
  kI32ToI64,
  kU32ToI64,
  kF32ToF16,  // these six round to nearest, ties to even
  kF32ToBf16,
  kF16ToF32,
  kF16ToBf16,
  kBf16ToF32,
  kBf16ToF16,
  kSwap2,  // swaps the byte order of 2-byte elements
  kSwap4,
  kSwap8,
};

// The bytes of one stored element (1 for kNone), and the bytes it becomes.
size_t stored_element_bytes(Conversion conversion);
size_t result_element_bytes(Conversion conversion);

inline size_t result_bytes(Conversion conversion, size_t stored_bytes) {
  return stored_bytes / stored_element_bytes(conversion) * result_element_bytes(conversion);
}

// Converts while copying. `stored_bytes` is a multiple of the stored element's size. Neither side
// has to be aligned.
void convert(Conversion conversion, std::byte* result, const std::byte* stored, size_t stored_bytes,
             const Processor& has = processor());

}  // namespace gdsdata
