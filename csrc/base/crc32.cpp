// Sources: RFC 1952, section 8 (the polynomial and its table). V. Gopal et al., "Fast CRC Computation for Generic
// Polynomials Using PCLMULQDQ Instruction", Intel 2009: folding, with the constants of its page 22.
#include "base/crc32.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gdsdata {

namespace {

constexpr uint32_t kPolynomial = 0xEDB88320;  // bit 31 is x^0
constexpr size_t kTables = 8;

// tables[k][b]: the remainder of byte b with k bytes of zeros behind it.
constexpr std::array<std::array<uint32_t, 256>, kTables> make_tables() {
  std::array<std::array<uint32_t, 256>, kTables> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = value;
  }
  for (size_t k = 1; k < kTables; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 255];
    }
  }
  return tables;
}

constexpr auto kTable = make_tables();

// `state` is the complement of the checksum so far.
uint32_t by_table(uint32_t state, const std::byte* bytes, size_t length) {
  for (; length >= kTables; bytes += kTables, length -= kTables) {
    uint64_t word = 0;
    for (size_t i = 0; i < kTables; ++i) word |= static_cast<uint64_t>(bytes[i]) << (8 * i);
    word ^= state;
    state = 0;
    for (size_t i = 0; i < kTables; ++i) state ^= kTable[kTables - 1 - i][(word >> (8 * i)) & 255];
  }
  for (; length > 0; ++bytes, --length) state = (state >> 8) ^ kTable[0][(state ^ static_cast<uint32_t>(*bytes)) & 255];
  return state;
}

#if defined(__x86_64__)

constexpr size_t kFoldedAtOnce = 64;

__attribute__((target("pclmul,sse4.1"))) inline __m128i load(const std::byte* bytes) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
}

// `value` moved on by as many bits as `distance` stands for, and added to what is there.
__attribute__((target("pclmul,sse4.1"))) inline __m128i fold(__m128i value, __m128i distance, __m128i there) {
  const __m128i low = _mm_clmulepi64_si128(value, distance, 0x00), high = _mm_clmulepi64_si128(value, distance, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), there);
}

// Of a multiple of 16 bytes, 64 at least.
__attribute__((target("pclmul,sse4.1"))) uint32_t by_folding(uint32_t state, const std::byte* bytes, size_t length) {
  const __m128i by_512_bits = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  const __m128i by_128_bits = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  __m128i sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = load(bytes + 16 * i);
  sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  for (bytes += kFoldedAtOnce, length -= kFoldedAtOnce; length >= kFoldedAtOnce; length -= kFoldedAtOnce) {
    for (int i = 0; i < 4; ++i, bytes += 16) sums[i] = fold(sums[i], by_512_bits, load(bytes));
  }
  __m128i sum = sums[0];
  for (int i = 1; i < 4; ++i) sum = fold(sum, by_128_bits, sums[i]);
  for (; length >= 16; bytes += 16, length -= 16) sum = fold(sum, by_128_bits, load(bytes));
  // The 16 bytes that are left have the remainder that all had.
  std::array<std::byte, 16> rest{};
  std::memcpy(rest.data(), &sum, rest.size());
  return by_table(0, rest.data(), rest.size());
}

#endif

// The product of two polynomials of degree 31 at most, modulo kPolynomial.
uint32_t multiplied(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = uint32_t{1} << 31; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = (b >> 1) ^ ((b & 1) != 0 ? kPolynomial : 0);
  }
  return product;
}

}  // namespace

uint32_t crc32_by_table(const std::byte* bytes, size_t length, uint32_t before) {
  return ~by_table(~before, bytes, length);
}

uint32_t crc32(const std::byte* bytes, size_t length, uint32_t before) {
#if defined(__x86_64__)
  static const bool multiplies = __builtin_cpu_supports("pclmul") != 0 && __builtin_cpu_supports("sse4.1") != 0;
  if (multiplies && length >= kFoldedAtOnce) {
    const size_t folded = length / 16 * 16;
    const uint32_t state = by_folding(~before, bytes, folded);
    return ~by_table(state, bytes + folded, length - folded);
  }
#endif
  return crc32_by_table(bytes, length, before);
}

uint32_t crc32_joined(uint32_t of_first, uint32_t of_second, uint64_t second_length) {
  // The first moves on by the second's bits: it is multiplied by x^(8 * second_length).
  uint32_t power = uint32_t{1} << 23;  // x^8
  for (; second_length > 0; second_length >>= 1) {
    if ((second_length & 1) != 0) of_first = multiplied(of_first, power);
    power = multiplied(power, power);
  }
  return of_first ^ of_second;
}

}  // namespace gdsdata
