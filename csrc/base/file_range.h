// Ranges of a sparse file: allocated, written, read and freed. Each returns 0 or errno.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace gdsdata {

// Returns true if this errno of an allocation says that the bytes will not fit.
bool is_lack_of_space(int system_errno);
// A full disk is an error here, and not of a later write. Where nothing can be allocated in advance
// (some network file systems), this does nothing, and writes allocate.
int allocate_range(int fd, uint64_t offset, uint64_t length);
int write_range(int fd, uint64_t offset, std::span<const std::byte> bytes);
// The bytes up to `end` become a hole, if the file system has holes.
int free_range(int fd, uint64_t offset, uint64_t end);
// The CRC-32C of a range. EIO if the file is shorter.
int checksum_range(int fd, uint64_t offset, uint64_t length, uint32_t& checksum);

}  // namespace gdsdata
