// SHA-256 (FIPS 180-4), for names that nobody can make equal on purpose.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace gdsdata {

std::array<uint8_t, 32> sha256(std::string_view text);

// The first `digits` hexadecimal digits, at most 64.
std::string sha256_hex(std::string_view text, size_t digits = 64);

}  // namespace gdsdata
