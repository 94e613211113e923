#include "base/convert.h"

#include <bit>
#include <cstring>

namespace gdsdata {

namespace {

template <typename Stored>
[[gnu::always_inline]] inline int64_t widened(Stored value) {
  return value;
}

template <typename Word>
[[gnu::always_inline]] inline Word swapped(Word word) {
  if constexpr (sizeof(Word) == 2) return __builtin_bswap16(word);
  if constexpr (sizeof(Word) == 4) return __builtin_bswap32(word);
  if constexpr (sizeof(Word) == 8) return __builtin_bswap64(word);
}

// Floating-point numbers are their bits here. The arithmetic is right also in a program that has
// the processor take a subnormal f32 for zero.
constexpr uint32_t kF32Sign = 0x80000000, kF32Infinity = 0x7F800000;
// An f16 has 5 bits of exponent and 10 of mantissa, an f32 has 8 and 23. The biases of their
// exponents differ by 112. An f16 below 2^-14 is subnormal.
constexpr uint32_t kBiasDifference = 112 << 23, kLeastNormal = kBiasDifference + (1 << 23);
constexpr float kLeastNormalNumber = 0x1p-14F;

[[gnu::always_inline]] inline float number_of(uint32_t f32) { return std::bit_cast<float>(f32); }
[[gnu::always_inline]] inline uint32_t f32_of(float number) { return std::bit_cast<uint32_t>(number); }

// The upper half of the bits. A NaN remains one: its upper bits may all be zero.
[[gnu::always_inline]] inline uint16_t bf16_of_f32(uint32_t f32) {
  constexpr uint32_t kQuietNan = 0x40;
  const uint32_t upper = f32 >> 16;
  const uint32_t rounded = (f32 + 0x7FFF + (upper & 1)) >> 16;
  return static_cast<uint16_t>((f32 & ~kF32Sign) > kF32Infinity ? upper | kQuietNan : rounded);
}

[[gnu::always_inline]] inline uint32_t f32_of_bf16(uint16_t bf16) { return static_cast<uint32_t>(bf16) << 16; }

[[gnu::always_inline]] inline uint32_t f32_of_f16(uint16_t f16) {
  constexpr uint32_t kShifted = 0x7FFF << 13, kShiftedInfinity = 0x7C00 << 13, kShiftedNormal = 1 << 23;
  const uint32_t shifted = (static_cast<uint32_t>(f16) << 13) & kShifted;
  const uint32_t subnormal = f32_of(number_of(shifted + kLeastNormal) - kLeastNormalNumber);
  const uint32_t finite = shifted < kShiftedNormal ? subnormal : shifted + kBiasDifference;
  const uint32_t magnitude = shifted >= kShiftedInfinity ? shifted | kF32Infinity : finite;
  return magnitude | (static_cast<uint32_t>(f16) & 0x8000) << 16;
}

[[gnu::always_inline]] inline uint16_t f16_of_f32(uint32_t f32) {
  constexpr uint32_t kTooLarge = 0x47800000;  // 2^16
  constexpr uint32_t kInfinity = 0x7C00, kQuietNan = 0x7E00;
  const uint32_t magnitude = f32 & ~kF32Sign;
  const uint32_t normal = (magnitude - kBiasDifference + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  // The last bit of a sum with 1/2 is worth 2^-24, as that of a subnormal f16.
  const uint32_t subnormal = f32_of(number_of(magnitude) + 0.5F) - f32_of(0.5F);
  const uint32_t finite = magnitude < kLeastNormal ? subnormal : normal;
  const uint32_t other = magnitude > kF32Infinity ? kQuietNan : kInfinity;
  return static_cast<uint16_t>((magnitude >= kTooLarge ? other : finite) | (f32 & kF32Sign) >> 16);
}

[[gnu::always_inline]] inline uint16_t bf16_of_f16(uint16_t f16) { return bf16_of_f32(f32_of_f16(f16)); }
[[gnu::always_inline]] inline uint16_t f16_of_bf16(uint16_t bf16) { return f16_of_f32(f32_of_bf16(bf16)); }

// memcpy, because neither side is aligned. It compiles to plain vector loads and stores.
template <typename Stored, auto kResultOf>
[[gnu::always_inline]] inline void each(std::byte* result, const std::byte* stored, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    Stored value;
    std::memcpy(&value, stored + i * sizeof(Stored), sizeof(Stored));
    const auto made = kResultOf(value);
    std::memcpy(result + i * sizeof(made), &made, sizeof(made));
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
    case Conversion::kF16ToF32:
    case Conversion::kF16ToBf16:
    case Conversion::kBf16ToF32:
    case Conversion::kBf16ToF16:
    case Conversion::kSwap2:
      return 2;
    case Conversion::kI32ToI64:
    case Conversion::kU32ToI64:
    case Conversion::kF32ToF16:
    case Conversion::kF32ToBf16:
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
    case Conversion::kF32ToF16:
    case Conversion::kF32ToBf16:
      return 2;
    case Conversion::kF16ToF32:
    case Conversion::kBf16ToF32:
      return 4;
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
      return run<each<uint8_t, widened<uint8_t>>>(result, stored, count, has);
    case Conversion::kU16ToI64:
      return run<each<uint16_t, widened<uint16_t>>>(result, stored, count, has);
    case Conversion::kI16ToI64:
      return run<each<int16_t, widened<int16_t>>>(result, stored, count, has);
    case Conversion::kI32ToI64:
      return run<each<int32_t, widened<int32_t>>>(result, stored, count, has);
    case Conversion::kU32ToI64:
      return run<each<uint32_t, widened<uint32_t>>>(result, stored, count, has);
    case Conversion::kF32ToF16:
      return run<each<uint32_t, f16_of_f32>>(result, stored, count, has);
    case Conversion::kF32ToBf16:
      return run<each<uint32_t, bf16_of_f32>>(result, stored, count, has);
    case Conversion::kF16ToF32:
      return run<each<uint16_t, f32_of_f16>>(result, stored, count, has);
    case Conversion::kF16ToBf16:
      return run<each<uint16_t, bf16_of_f16>>(result, stored, count, has);
    case Conversion::kBf16ToF32:
      return run<each<uint16_t, f32_of_bf16>>(result, stored, count, has);
    case Conversion::kBf16ToF16:
      return run<each<uint16_t, f16_of_bf16>>(result, stored, count, has);
    case Conversion::kSwap2:
      return run<each<uint16_t, swapped<uint16_t>>>(result, stored, count, has);
    case Conversion::kSwap4:
      return run<each<uint32_t, swapped<uint32_t>>>(result, stored, count, has);
    case Conversion::kSwap8:
      return run<each<uint64_t, swapped<uint64_t>>>(result, stored, count, has);
  }
}

}  // namespace gdsdata
