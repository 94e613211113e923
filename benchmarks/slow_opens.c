/* A library for LD_PRELOAD: opens and looks at files below $SLOW_BELOW take $SLOW_US longer. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A sleep holds no lock, so several threads wait at the same time, as on a network. */
static void wait_for(const char *path) {
  const char *below = getenv("SLOW_BELOW"), *us = getenv("SLOW_US");
  if (below && us && atoi(us) && path && strncmp(path, below, strlen(below)) == 0) usleep(atoi(us));
}

static int mode_in(int flags, va_list more) {
  return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(more, int) : 0;
}

#define OPEN(name)                                                                                 \
  int name(const char *path, int flags, ...) {                                                     \
    va_list more;                                                                                  \
    va_start(more, flags);                                                                         \
    const int mode = mode_in(flags, more);                                                         \
    va_end(more);                                                                                  \
    wait_for(path);                                                                                \
    return ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name))(path, flags, mode);          \
  }

#define OPENAT(name)                                                                               \
  int name(int folder, const char *path, int flags, ...) {                                         \
    va_list more;                                                                                  \
    va_start(more, flags);                                                                         \
    const int mode = mode_in(flags, more);                                                         \
    va_end(more);                                                                                  \
    wait_for(path);                                                                                \
    return ((int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, #name))(folder, path, flags, mode); \
  }

#define STAT(name, type)                                                                           \
  int name(const char *path, struct type *status) {                                                \
    wait_for(path);                                                                                \
    return ((int (*)(const char *, struct type *))dlsym(RTLD_NEXT, #name))(path, status);          \
  }

#define STATAT(name, type)                                                                         \
  int name(int folder, const char *path, struct type *status, int flags) {                         \
    wait_for(path);                                                                                \
    return ((int (*)(int, const char *, struct type *, int))dlsym(RTLD_NEXT, #name))(folder, path, status, flags); \
  }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
STAT(stat, stat)
STAT(stat64, stat64)
STATAT(fstatat, stat)
STATAT(fstatat64, stat64)
