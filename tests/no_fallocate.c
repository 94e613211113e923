/* A library for LD_PRELOAD in which no file can be allocated, with FALLOCATE_ERRNO. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>

int fallocate(int file, int mode, off_t offset, off_t length) {
  (void)file, (void)mode, (void)offset, (void)length;
  errno = atoi(getenv("FALLOCATE_ERRNO"));
  return -1;
}

int fallocate64(int file, int mode, off_t offset, off_t length) { return fallocate(file, mode, offset, length); }
