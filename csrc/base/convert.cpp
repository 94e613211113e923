#include "base/convert.h"

#include <cstring>

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

using Convert = void (*)(std::byte* result, const std::byte* stored, size_t count);

template <Convert kConvert>
void plainly(std::byte* result, const std::byte* stored, size_t count) {
  kConvert(result, stored, count);
}

#ifdef __x86_64__

// One build serves every x86-64, by a version for each level of vector instructions.
template <Convert kConvert>
[[gnu::target("avx2")]] void by_avx2(std::byte* result, const std::byte* stored, size_t count) {
  kConvert(result, stored, count);
}

template <Convert kConvert>
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl")]] void by_avx512(std::byte* result, const std::byte* stored,
                                                                     size_t count) {
  kConvert(result, stored, count);
}

template <Convert kConvert>
void run(std::byte* result, const std::byte* stored, size_t count, const Processor& has) {
  const Convert best = has.avx512 ? by_avx512<kConvert> : has.avx2 ? by_avx2<kConvert> : plainly<kConvert>;
  best(result, stored, count);
}

#else

template <Convert kConvert>
void run(std::byte* result, const std::byte* stored, size_t count, const Processor&) {
  plainly<kConvert>(result, stored, count);
}

#endif

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

void convert(Conversion conversion, std::byte* result, const std::byte* stored, size_t stored_bytes,
             const Processor& has) {
  const size_t count = stored_bytes / stored_element_bytes(conversion);
  switch (conversion) {
    case Conversion::kNone:
      std::memcpy(result, stored, stored_bytes);
      return;
    case Conversion::kU8ToI64:
      return run<widen<uint8_t, int64_t>>(result, stored, count, has);
    case Conversion::kU16ToI64:
      return run<widen<uint16_t, int64_t>>(result, stored, count, has);
    case Conversion::kI16ToI64:
      return run<widen<int16_t, int64_t>>(result, stored, count, has);
    case Conversion::kI32ToI64:
      return run<widen<int32_t, int64_t>>(result, stored, count, has);
    case Conversion::kU32ToI64:
      return run<widen<uint32_t, int64_t>>(result, stored, count, has);
    case Conversion::kSwap2:
      return run<swap<uint16_t>>(result, stored, count, has);
    case Conversion::kSwap4:
      return run<swap<uint32_t>>(result, stored, count, has);
    case Conversion::kSwap8:
      return run<swap<uint64_t>>(result, stored, count, has);
  }
}

}  // namespace gdsdata
