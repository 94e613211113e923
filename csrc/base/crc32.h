// CRC-32 as zip has it (IEEE 802.3, reflected polynomial 0xEDB88320), at memory's speed where the
// processor multiplies without carries; and CRC-32C as TFRecord has it (Castagnoli, 0x82F63B78), at
// that speed where the processor has an instruction for it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gdsdata {

// `before`: that of the bytes before these.
uint32_t crc32(const std::byte* bytes, size_t length, uint32_t before = 0);

// Of A followed by B, from that of A, that of B and B's length.
uint32_t crc32_joined(uint32_t of_first, uint32_t of_second, uint64_t second_length);

uint32_t crc32c(const std::byte* bytes, size_t length, uint32_t before = 0);
uint32_t crc32c_joined(uint32_t of_first, uint32_t of_second, uint64_t second_length);

enum class Checksum : uint8_t { kNone, kCrc32, kCrc32c };

// For every kind but kNone.
uint32_t checksum_of(Checksum kind, const std::byte* bytes, size_t length);
uint32_t joined_checksums(Checksum kind, uint32_t of_first, uint32_t of_second, uint64_t second_length);

// What computes it, for tests: a table on any processor, folding on x86-64 with PCLMULQDQ.
uint32_t crc32_by_table(const std::byte* bytes, size_t length, uint32_t before = 0);

// The same for CRC-32C: a table, or the instruction of x86-64 with SSE4.2 and of ARMv8 with CRC32.
uint32_t crc32c_by_table(const std::byte* bytes, size_t length, uint32_t before = 0);

}  // namespace gdsdata
