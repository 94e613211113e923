// CRC-32 as zip has it (IEEE 802.3, reflected polynomial 0xEDB88320), at memory's speed where the processor multiplies
// without carries.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gdsdata {

// `before`: that of the bytes before these.
uint32_t crc32(const std::byte* bytes, size_t length, uint32_t before = 0);

// Of A followed by B, from that of A, that of B and B's length.
uint32_t crc32_joined(uint32_t of_first, uint32_t of_second, uint64_t second_length);

// What computes it, for tests: a table on any processor, folding on x86-64 with PCLMULQDQ.
uint32_t crc32_by_table(const std::byte* bytes, size_t length, uint32_t before = 0);

}  // namespace gdsdata
