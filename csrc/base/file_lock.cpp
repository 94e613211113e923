#include "base/file_lock.h"

#include <unistd.h>

#include <cerrno>

namespace gdsdata {

namespace {

struct flock one_byte(short type, uint64_t byte) {
  struct flock range{};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = static_cast<off_t>(byte);
  range.l_len = 1;
  return range;
}

Lock set_lock(int fd, int command, short type, uint64_t byte) {
  struct flock range = one_byte(type, byte);
  while (::fcntl(fd, command, &range) != 0) {
    if (errno == EAGAIN || errno == EACCES) return Lock::kHeld;
    if (errno != EINTR) return Lock::kUnsupported;
  }
  return Lock::kTaken;
}

}  // namespace

Lock lock_description(int fd, short type, uint64_t byte) { return set_lock(fd, F_OFD_SETLK, type, byte); }

Lock lock_process(int fd, short type, uint64_t byte) { return set_lock(fd, F_SETLK, type, byte); }

Lock wait_for_shared(int fd, uint64_t byte) { return set_lock(fd, F_OFD_SETLKW, F_RDLCK, byte); }

bool is_locked(int fd, uint64_t byte) {
  struct flock range = one_byte(F_WRLCK, byte);
  return ::fcntl(fd, F_OFD_GETLK, &range) == 0 && range.l_type != F_UNLCK;
}

bool is_named(int folder, const std::string& name, const struct stat& file) {
  struct stat named{};
  return ::fstatat(folder, name.c_str(), &named, AT_SYMLINK_NOFOLLOW) == 0 && named.st_dev == file.st_dev &&
         named.st_ino == file.st_ino;
}

}  // namespace gdsdata
