// Copying with a change of element type or byte order on the way, so that bytes are touched once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gdsdata {

enum class Conversion : uint8_t {
  kNone,
  kU8ToI64,
  kU16ToI64,
  kI16ToI64,
  kI32ToI64,
  kU32ToI64,
  kSwap2,  // byte order of 2-byte elements
  kSwap4,
  kSwap8,
};

// Bytes of one stored element (1 for kNone), and how many bytes it becomes.
size_t stored_element_bytes(Conversion conversion);
size_t result_element_bytes(Conversion conversion);

// Bytes that `stored_bytes` become.
inline size_t result_bytes(Conversion conversion, size_t stored_bytes) {
  return stored_bytes / stored_element_bytes(conversion) * result_element_bytes(conversion);
}

// Copies `stored_bytes` bytes, a multiple of the stored element, converting each. Neither side need
// be aligned.
void convert(Conversion conversion, std::byte* result, const std::byte* stored, size_t stored_bytes);

}  // namespace gdsdata
