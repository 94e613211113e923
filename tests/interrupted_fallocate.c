/* A library for LD_PRELOAD in which a signal interrupts each allocation of a file, as in tmpfs before Linux 6.10. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>

int fallocate(int file, int mode, off_t offset, off_t length) {
  (void)file, (void)mode, (void)offset, (void)length;
  errno = EINTR;
  return -1;
}

int fallocate64(int file, int mode, off_t offset, off_t length) { return fallocate(file, mode, offset, length); }
