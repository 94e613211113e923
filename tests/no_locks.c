/* A library for LD_PRELOAD that stands for a file system without locks. Each way to take a lock fails
   with the errno that NO_LOCKS_ERRNO names. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/file.h>

static int refused(void) {
  errno = atoi(getenv("NO_LOCKS_ERRNO"));
  return -1;
}

int flock(int fd, int operation) {
  (void)fd;
  (void)operation;
  return refused();
}

static int is_lock(int command) {
  return command == F_OFD_SETLK || command == F_OFD_SETLKW || command == F_SETLK || command == F_SETLKW;
}

#define ARGUMENT(command)           \
  va_list more;                     \
  va_start(more, command);          \
  void *argument = va_arg(more, void *); \
  va_end(more);

int fcntl(int fd, int command, ...) {
  ARGUMENT(command)
  if (is_lock(command)) return refused();
  return ((int (*)(int, int, ...))dlsym(RTLD_NEXT, "fcntl"))(fd, command, argument);
}

int fcntl64(int fd, int command, ...) {
  ARGUMENT(command)
  if (is_lock(command)) return refused();
  return ((int (*)(int, int, ...))dlsym(RTLD_NEXT, "fcntl64"))(fd, command, argument);
}
