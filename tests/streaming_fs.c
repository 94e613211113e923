/* A library for LD_PRELOAD: files as `rclone mount` has them without a cache. A file that is removed
 * while it is open is there again, because its close makes it. The size of a file can be set only
 * where FTRUNCATE_ERRNO is not set in the environment. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int is_open(const char *path) {
  char link[64], target[4096];
  for (int file = 0; file < 1024; ++file) {
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    const ssize_t length = readlink(link, target, sizeof target - 1);
    if (length < 0) continue;
    target[length] = '\0';
    if (strcmp(target, path) == 0) return 1;
  }
  return 0;
}

int unlink(const char *path) {
  static int (*next)(const char *) = NULL;
  if (next == NULL) next = (int (*)(const char *))dlsym(RTLD_NEXT, "unlink");
  const int was_open = is_open(path), result = next(path);
  if (result == 0 && was_open) close(open(path, O_WRONLY | O_CREAT, 0666));
  return result;
}

int ftruncate(int file, off_t length) {
  static int (*next)(int, off_t) = NULL;
  if (next == NULL) next = (int (*)(int, off_t))dlsym(RTLD_NEXT, "ftruncate");
  const char *refusal = getenv("FTRUNCATE_ERRNO");
  if (refusal == NULL) return next(file, length);
  errno = atoi(refusal);
  return -1;
}

int ftruncate64(int file, off_t length) { return ftruncate(file, length); }
