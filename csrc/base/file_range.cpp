#include "base/file_range.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "base/crc32.h"

namespace gdsdata {

namespace {

constexpr uint64_t kReadAtOnceBytes = 1 << 20;

}  // namespace

bool is_lack_of_space(int system_errno) {
  return system_errno == ENOSPC || system_errno == EDQUOT || system_errno == EFBIG;
}

int allocate_range(int fd, uint64_t offset, uint64_t length) {
  while (::fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(length)) != 0) {
    if (is_lack_of_space(errno)) return errno;
    if (errno != EINTR) return 0;
  }
  return 0;
}

int write_range(int fd, uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return written < 0 ? errno : EIO;
    offset += static_cast<uint64_t>(written);
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
  return 0;
}

int free_range(int fd, uint64_t offset, uint64_t end) {
  constexpr int kMode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  while (::fallocate(fd, kMode, static_cast<off_t>(offset), static_cast<off_t>(end - offset)) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

int checksum_range(int fd, uint64_t offset, uint64_t length, uint32_t& checksum) {
  checksum = 0;
  std::vector<std::byte> part(std::min(length, kReadAtOnceBytes));
  while (length > 0) {
    const ssize_t got = ::pread(fd, part.data(), std::min<uint64_t>(length, part.size()), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got < 0 ? errno : EIO;
    checksum = crc32c(part.data(), static_cast<size_t>(got), checksum);
    offset += static_cast<uint64_t>(got);
    length -= static_cast<uint64_t>(got);
  }
  return 0;
}

}  // namespace gdsdata
