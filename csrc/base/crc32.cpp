// Sources: RFC 1952, section 8 (the polynomial and its table). V. Gopal et al., "Fast CRC
// Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009: folding, with the
// constants of its page 22. RFC 3720, appendix B.4 (CRC-32C).
#include "base/crc32.h"

#include <array>
#include <cstring>

#include "base/processor.h"
#include "tuning.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#endif

namespace gdsdata {

namespace {

// Bit 31 is x^0.
constexpr uint32_t kIeee = 0xEDB88320, kCastagnoli = 0x82F63B78;
constexpr size_t kTables = 8;

using Tables = std::array<std::array<uint32_t, 256>, kTables>;

// tables[k][b]: the remainder of byte b followed by k zero bytes.
constexpr Tables make_tables(uint32_t polynomial) {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? polynomial : 0);
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

constexpr auto kIeeeTables = make_tables(kIeee), kCastagnoliTables = make_tables(kCastagnoli);

// `state` is the complement of the checksum so far.
uint32_t by_table(const Tables& tables, uint32_t state, const std::byte* bytes, size_t length) {
  for (; length >= kTables; bytes += kTables, length -= kTables) {
    uint64_t word = 0;
    for (size_t i = 0; i < kTables; ++i) word |= static_cast<uint64_t>(bytes[i]) << (8 * i);
    word ^= state;
    state = 0;
    for (size_t i = 0; i < kTables; ++i) state ^= tables[kTables - 1 - i][(word >> (8 * i)) & 255];
  }
  for (; length > 0; ++bytes, --length) state = (state >> 8) ^ tables[0][(state ^ static_cast<uint32_t>(*bytes)) & 255];
  return state;
}

#if defined(__x86_64__)

constexpr size_t kFoldedAtOnce = 64;

__attribute__((target("pclmul,sse4.1"))) inline __m128i load(const std::byte* bytes) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
}

// Moves `value` on by the number of bits that `distance` encodes, and adds it to `there`.
__attribute__((target("pclmul,sse4.1"))) inline __m128i fold(__m128i value, __m128i distance, __m128i there) {
  const __m128i low = _mm_clmulepi64_si128(value, distance, 0x00), high = _mm_clmulepi64_si128(value, distance, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), there);
}

// `length` must be a multiple of 16, and at least 64.
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
  // The remaining 16 bytes have the same remainder as all the input.
  std::array<std::byte, 16> rest{};
  std::memcpy(rest.data(), &sum, rest.size());
  return by_table(kIeeeTables, 0, rest.data(), rest.size());
}

#endif

// Multiplies two polynomials of degree 31 at most, modulo a third.
constexpr uint32_t multiplied(uint32_t polynomial, uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = uint32_t{1} << 31; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = (b >> 1) ^ ((b & 1) != 0 ? polynomial : 0);
  }
  return product;
}

// Returns x^(8 * bytes): a remainder times this is the remainder with that many bytes behind it.
constexpr uint32_t power_of_bytes(uint32_t polynomial, uint64_t bytes) {
  uint32_t product = uint32_t{1} << 31, power = uint32_t{1} << 23;  // x^0, x^8
  for (; bytes > 0; bytes >>= 1) {
    if ((bytes & 1) != 0) product = multiplied(polynomial, product, power);
    power = multiplied(polynomial, power, power);
  }
  return product;
}

uint32_t joined(uint32_t polynomial, uint32_t of_first, uint32_t of_second, uint64_t second_length) {
  return multiplied(polynomial, of_first, power_of_bytes(polynomial, second_length)) ^ of_second;
}

#if defined(__x86_64__) || defined(__aarch64__)

#if defined(__x86_64__)
#if defined(__clang__)  // some builds of clang do not count the instruction to SSE4.2
#define GDSDATA_CRC32C_TARGET __attribute__((target("sse4.2,crc32")))
#else
#define GDSDATA_CRC32C_TARGET __attribute__((target("sse4.2")))
#endif
GDSDATA_CRC32C_TARGET inline uint32_t step(uint32_t state, uint64_t word) {
  return static_cast<uint32_t>(_mm_crc32_u64(state, word));
}
GDSDATA_CRC32C_TARGET inline uint32_t step(uint32_t state, std::byte byte) {
  return _mm_crc32_u8(state, static_cast<uint8_t>(byte));
}
#else
#define GDSDATA_CRC32C_TARGET __attribute__((target("+crc")))
GDSDATA_CRC32C_TARGET inline uint32_t step(uint32_t state, uint64_t word) { return __crc32cd(state, word); }
GDSDATA_CRC32C_TARGET inline uint32_t step(uint32_t state, std::byte byte) {
  return __crc32cb(state, static_cast<uint8_t>(byte));
}
#endif

GDSDATA_CRC32C_TARGET inline uint64_t word_at(const std::byte* bytes) {
  uint64_t word = 0;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

constexpr size_t kLaneBytes = tuning::kCrcLaneBytes;
constexpr uint32_t kBehindOneLane = power_of_bytes(kCastagnoli, kLaneBytes);
constexpr uint32_t kBehindTwoLanes = power_of_bytes(kCastagnoli, 2 * kLaneBytes);

GDSDATA_CRC32C_TARGET uint32_t by_instruction(uint32_t state, const std::byte* bytes, size_t length) {
  for (; length >= 3 * kLaneBytes; bytes += 3 * kLaneBytes, length -= 3 * kLaneBytes) {
    uint32_t second = 0, third = 0;
    for (size_t at = 0; at < kLaneBytes; at += sizeof(uint64_t)) {
      state = step(state, word_at(bytes + at));
      second = step(second, word_at(bytes + kLaneBytes + at));
      third = step(third, word_at(bytes + 2 * kLaneBytes + at));
    }
    state = multiplied(kCastagnoli, state, kBehindTwoLanes) ^ multiplied(kCastagnoli, second, kBehindOneLane) ^ third;
  }
  for (; length >= sizeof(uint64_t); bytes += sizeof(uint64_t), length -= sizeof(uint64_t)) {
    state = step(state, word_at(bytes));
  }
  for (; length > 0; ++bytes, --length) state = step(state, *bytes);
  return state;
}

#endif

}  // namespace

uint32_t crc32_by_table(const std::byte* bytes, size_t length, uint32_t before) {
  return ~by_table(kIeeeTables, ~before, bytes, length);
}

uint32_t crc32(const std::byte* bytes, size_t length, uint32_t before) {
#if defined(__x86_64__)
  if (processor().pclmul && length >= kFoldedAtOnce) {
    const size_t folded = length / 16 * 16;
    const uint32_t state = by_folding(~before, bytes, folded);
    return ~by_table(kIeeeTables, state, bytes + folded, length - folded);
  }
#endif
  return crc32_by_table(bytes, length, before);
}

uint32_t crc32_joined(uint32_t of_first, uint32_t of_second, uint64_t second_length) {
  return joined(kIeee, of_first, of_second, second_length);
}

uint32_t crc32c_by_table(const std::byte* bytes, size_t length, uint32_t before) {
  return ~by_table(kCastagnoliTables, ~before, bytes, length);
}

uint32_t crc32c(const std::byte* bytes, size_t length, uint32_t before) {
#if defined(__x86_64__) || defined(__aarch64__)
  if (processor().crc32c) return ~by_instruction(~before, bytes, length);
#endif
  return crc32c_by_table(bytes, length, before);
}

uint32_t crc32c_joined(uint32_t of_first, uint32_t of_second, uint64_t second_length) {
  return joined(kCastagnoli, of_first, of_second, second_length);
}

uint32_t checksum_of(Checksum kind, const std::byte* bytes, size_t length) {
  return kind == Checksum::kCrc32c ? crc32c(bytes, length) : crc32(bytes, length);
}

uint32_t joined_checksums(Checksum kind, uint32_t of_first, uint32_t of_second, uint64_t second_length) {
  return joined(kind == Checksum::kCrc32c ? kCastagnoli : kIeee, of_first, of_second, second_length);
}

}  // namespace gdsdata
