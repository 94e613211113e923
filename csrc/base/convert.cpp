#include "base/convert.h"

#include <cstring>

// One build serves every x86-64: it has a version for each named level, and the loader chooses.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define GDSDATA_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define GDSDATA_MULTIVERSION
#endif

namespace gdsdata {

namespace {

// memcpy, because neither side is aligned. It compiles to plain vector loads and stores.
template <typename Stored, typename Result>
[[gnu::always_inline]] inline void widen(std::byte* result, const std::byte* stored, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    Stored value;
    std::memcpy(&value, stored + i * sizeof(Stored), sizeof(Stored));
    const Result wide = value;
    std::memcpy(result + i * sizeof(Result), &wide, sizeof(Result));
  }
}

template <typename Word>
[[gnu::always_inline]] inline Word swapped(Word word) {
  if constexpr (sizeof(Word) == 2) return __builtin_bswap16(word);
  if constexpr (sizeof(Word) == 4) return __builtin_bswap32(word);
  if constexpr (sizeof(Word) == 8) return __builtin_bswap64(word);
}

template <typename Word>
[[gnu::always_inline]] inline void swap(std::byte* result, const std::byte* stored, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    Word word;
    std::memcpy(&word, stored + i * sizeof(Word), sizeof(Word));
    word = swapped(word);
    std::memcpy(result + i * sizeof(Word), &word, sizeof(Word));
  }
}

GDSDATA_MULTIVERSION void widen_u8(std::byte* r, const std::byte* s, size_t n) { widen<uint8_t, int64_t>(r, s, n); }
GDSDATA_MULTIVERSION void widen_u16(std::byte* r, const std::byte* s, size_t n) { widen<uint16_t, int64_t>(r, s, n); }
GDSDATA_MULTIVERSION void widen_i16(std::byte* r, const std::byte* s, size_t n) { widen<int16_t, int64_t>(r, s, n); }
GDSDATA_MULTIVERSION void widen_i32(std::byte* r, const std::byte* s, size_t n) { widen<int32_t, int64_t>(r, s, n); }
GDSDATA_MULTIVERSION void widen_u32(std::byte* r, const std::byte* s, size_t n) { widen<uint32_t, int64_t>(r, s, n); }
GDSDATA_MULTIVERSION void swap_2(std::byte* r, const std::byte* s, size_t n) { swap<uint16_t>(r, s, n); }
GDSDATA_MULTIVERSION void swap_4(std::byte* r, const std::byte* s, size_t n) { swap<uint32_t>(r, s, n); }
GDSDATA_MULTIVERSION void swap_8(std::byte* r, const std::byte* s, size_t n) { swap<uint64_t>(r, s, n); }

}  // namespace

size_t stored_element_bytes(Conversion conversion) {
  switch (conversion) {
    case Conversion::kNone:
    case Conversion::kU8ToI64:
      return 1;
    case Conversion::kU16ToI64:
    case Conversion::kI16ToI64:
    case Conversion::kSwap2:
      return 2;
    case Conversion::kI32ToI64:
    case Conversion::kU32ToI64:
    case Conversion::kSwap4:
      return 4;
    case Conversion::kSwap8:
      return 8;
  }
  return 1;
}

size_t result_element_bytes(Conversion conversion) {
  switch (conversion) {
    case Conversion::kU8ToI64:
    case Conversion::kU16ToI64:
    case Conversion::kI16ToI64:
    case Conversion::kI32ToI64:
    case Conversion::kU32ToI64:
      return 8;
    default:
      return stored_element_bytes(conversion);
  }
}

void convert(Conversion conversion, std::byte* result, const std::byte* stored, size_t stored_bytes) {
  const size_t count = stored_bytes / stored_element_bytes(conversion);
  switch (conversion) {
    case Conversion::kNone:
      std::memcpy(result, stored, stored_bytes);
      return;
    case Conversion::kU8ToI64:
      return widen_u8(result, stored, count);
    case Conversion::kU16ToI64:
      return widen_u16(result, stored, count);
    case Conversion::kI16ToI64:
      return widen_i16(result, stored, count);
    case Conversion::kI32ToI64:
      return widen_i32(result, stored, count);
    case Conversion::kU32ToI64:
      return widen_u32(result, stored, count);
    case Conversion::kSwap2:
      return swap_2(result, stored, count);
    case Conversion::kSwap4:
      return swap_4(result, stored, count);
    case Conversion::kSwap8:
      return swap_8(result, stored, count);
  }
}

}  // namespace gdsdata
