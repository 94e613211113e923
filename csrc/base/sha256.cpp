#include "base/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace gdsdata {

namespace {

constexpr size_t kChunk = 64;

// FIPS 180-4, section 4.2.2: the first 32 bits of the fractions of the cube roots of the first 64
// primes.
constexpr std::array<uint32_t, 64> kRounds = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using State = std::array<uint32_t, 8>;

void add_chunk(State& state, const uint8_t* chunk) {
  std::array<uint32_t, 64> words{};
  for (size_t i = 0; i < 16; ++i) {
    words[i] = uint32_t{chunk[4 * i]} << 24 | uint32_t{chunk[4 * i + 1]} << 16 | uint32_t{chunk[4 * i + 2]} << 8 |
               uint32_t{chunk[4 * i + 3]};
  }
  for (size_t i = 16; i < 64; ++i) {
    const uint32_t older = words[i - 15], newer = words[i - 2];
    words[i] = words[i - 16] + (std::rotr(older, 7) ^ std::rotr(older, 18) ^ older >> 3) + words[i - 7] +
               (std::rotr(newer, 17) ^ std::rotr(newer, 19) ^ newer >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t first =
        h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) + kRounds[i] + words[i];
    const uint32_t second = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + first;
    d = c, c = b, b = a, a = first + second;
  }
  const State added = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < state.size(); ++i) state[i] += added[i];
}

}  // namespace

std::array<uint8_t, 32> sha256(std::string_view text) {
  State state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const uint64_t bits = uint64_t{text.size()} * 8;
  const auto* bytes = reinterpret_cast<const uint8_t*>(text.data());
  for (; text.size() >= kChunk; text.remove_prefix(kChunk), bytes += kChunk) add_chunk(state, bytes);
  // The rest, a bit of 1, zeros, and the length: one chunk or two.
  std::array<uint8_t, 2 * kChunk> last{};
  if (!text.empty()) std::memcpy(last.data(), bytes, text.size());
  last[text.size()] = 0x80;
  const size_t end = text.size() + 9 <= kChunk ? kChunk : 2 * kChunk;
  for (size_t i = 0; i < 8; ++i) last[end - 1 - i] = static_cast<uint8_t>(bits >> (8 * i));
  for (size_t at = 0; at < end; at += kChunk) add_chunk(state, last.data() + at);
  std::array<uint8_t, 32> digest{};
  for (size_t i = 0; i < digest.size(); ++i) digest[i] = static_cast<uint8_t>(state[i / 4] >> (24 - i % 4 * 8));
  return digest;
}

std::string sha256_hex(std::string_view text, size_t digits) {
  std::string hex;
  for (const uint8_t byte : sha256(text)) {
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  hex.resize(std::min(digits, hex.size()));
  return hex;
}

}  // namespace gdsdata
