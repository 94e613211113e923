// CRC-32 of zip (IEEE 802.3, reflected polynomial 0xEDB88320) and CRC-32C of TFRecord (Castagnoli,
// 0x82F63B78). They run at memory speed if the processor has carry-less multiplication, or an
// instruction for CRC-32C.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gdsdata {

// `before`: the checksum of the preceding bytes.
uint32_t crc32(const std::byte* bytes, size_t length, uint32_t before = 0);

// Returns the checksum of A followed by B, from the checksums of both and the length of B.
uint32_t crc32_joined(uint32_t of_first, uint32_t of_second, uint64_t second_length);

uint32_t crc32c(const std::byte* bytes, size_t length, uint32_t before = 0);
uint32_t crc32c_joined(uint32_t of_first, uint32_t of_second, uint64_t second_length);

enum class Checksum : uint8_t { kNone, kCrc32, kCrc32c };

// `kind` must not be kNone.
uint32_t checksum_of(Checksum kind, const std::byte* bytes, size_t length);
uint32_t joined_checksums(Checksum kind, uint32_t of_first, uint32_t of_second, uint64_t second_length);

// For tests: the implementation for processors without such instructions.
uint32_t crc32_by_table(const std::byte* bytes, size_t length, uint32_t before = 0);

uint32_t crc32c_by_table(const std::byte* bytes, size_t length, uint32_t before = 0);

}  // namespace gdsdata
