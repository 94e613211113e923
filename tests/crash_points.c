/* A library for LD_PRELOAD that intercepts the system calls that change files under a folder. At each
   call the process can be ended as by a power cut. Unsynced changes may be lost too: writes then
   reach a file when it is synced. Renames, and removals of a manifest, reach a folder when that is
   synced.

   The process id can be fixed, like that of a container's first process after each restart.

   tests/test_crashes.py calls the functions crash_points_* by ctypes. One thread at a time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char folder[PATH_MAX];
static long crash_at, count;
static int loses;
static pid_t fixed_id;

struct pending {
  enum { WRITE, RENAME, REMOVE } kind;
  dev_t device;
  ino_t inode;
  off_t offset;
  size_t length;
  char *bytes;
  char from[PATH_MAX], to[PATH_MAX];
  struct pending *next;
};
static struct pending *first, **last = &first;

/* Ends the process before call number `at`, counted from 1. 0: never. */
void crash_points_begin(const char *under, long at, int lose_unsynced) {
  snprintf(folder, sizeof folder, "%s", under);
  crash_at = at;
  count = 0;
  loses = lose_unsynced;
}

long crash_points_count(void) { return count; }

/* Makes getpid return `id` from now on, also in children. 0: the real id. */
void crash_points_fix_process_id(int id) { fixed_id = id; }

pid_t getpid(void) { return fixed_id != 0 ? fixed_id : (pid_t)syscall(SYS_getpid); }

void crash_points_die(void) {
  kill((pid_t)syscall(SYS_getpid), SIGKILL);
  pause();
}

static int is_under(const char *path) { return folder[0] && strncmp(path, folder, strlen(folder)) == 0; }

static int path_of(int fd, char *path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, PATH_MAX - 1);
  path[length < 0 ? 0 : length] = 0;
  return is_under(path);
}

static void point(void) {
  if (++count == crash_at) crash_points_die();
}

static struct pending *put_off(int kind) {
  struct pending *one = calloc(1, sizeof *one);
  one->kind = kind;
  *last = one;
  last = &one->next;
  return one;
}

static int is_in(const char *path, const char *directory) {
  const size_t length = strlen(directory);
  return strncmp(path, directory, length) == 0 && path[length] == '/' && strchr(path + length + 1, '/') == NULL;
}

/* Applies the changes that a sync of this descriptor makes durable. */
static void do_pending(int fd, const char *path) {
  struct stat status;
  fstat(fd, &status);
  for (struct pending **link = &first; *link != NULL;) {
    struct pending *one = *link;
    const int of_file = one->kind == WRITE && one->device == status.st_dev && one->inode == status.st_ino;
    const int of_folder = one->kind != WRITE && S_ISDIR(status.st_mode) && is_in(one->to, path);
    if (!of_file && !of_folder) {
      link = &one->next;
      continue;
    }
    if (one->kind == WRITE && REAL(pwrite)(fd, one->bytes, one->length, one->offset) != (ssize_t)one->length) abort();
    if (one->kind == RENAME) REAL(rename)(one->from, one->to);
    if (one->kind == REMOVE) REAL(unlink)(one->to);
    *link = one->next;
    if (last == &one->next) last = link;
    free(one->bytes);
    free(one);
  }
}

ssize_t pwritev(int fd, const struct iovec *parts, int part_count, off_t offset) {
  char path[PATH_MAX];
  if (!path_of(fd, path)) return REAL(pwritev)(fd, parts, part_count, offset);
  pthread_mutex_lock(&mutex);
  point();
  ssize_t moved = 0;
  if (loses) {
    struct stat status;
    fstat(fd, &status);
    for (int i = 0; i < part_count; ++i) {
      struct pending *one = put_off(WRITE);
      one->device = status.st_dev;
      one->inode = status.st_ino;
      one->offset = offset + moved;
      one->length = parts[i].iov_len;
      one->bytes = malloc(one->length);
      memcpy(one->bytes, parts[i].iov_base, one->length);
      moved += (ssize_t)one->length;
    }
  } else {
    moved = REAL(pwritev)(fd, parts, part_count, offset);
  }
  pthread_mutex_unlock(&mutex);
  return moved;
}

int fsync(int fd) {
  char path[PATH_MAX];
  if (!path_of(fd, path)) return REAL(fsync)(fd);
  pthread_mutex_lock(&mutex);
  point();
  do_pending(fd, path);
  pthread_mutex_unlock(&mutex);
  return REAL(fsync)(fd);
}

int rename(const char *from, const char *to) {
  if (!is_under(to)) return REAL(rename)(from, to);
  pthread_mutex_lock(&mutex);
  point();
  int result = 0;
  if (loses) {
    struct pending *one = put_off(RENAME);
    snprintf(one->from, PATH_MAX, "%s", from);
    snprintf(one->to, PATH_MAX, "%s", to);
  } else {
    result = REAL(rename)(from, to);
  }
  pthread_mutex_unlock(&mutex);
  return result;
}

static int taken_away(const char *path, int (*really)(const char *)) {
  if (!is_under(path)) return really(path);
  pthread_mutex_lock(&mutex);
  point();
  const char *name = strrchr(path, '/');
  int result = 0;
  if (loses && name != NULL && strcmp(name, "/manifest.json") == 0) {
    snprintf(put_off(REMOVE)->to, PATH_MAX, "%s", path);
  } else {
    result = really(path);
  }
  pthread_mutex_unlock(&mutex);
  return result;
}

int unlink(const char *path) { return taken_away(path, REAL(unlink)); }
int remove(const char *path) { return taken_away(path, REAL(remove)); }
int rmdir(const char *path) { return taken_away(path, REAL(rmdir)); }

int mkdir(const char *path, mode_t mode) {
  if (is_under(path)) {
    pthread_mutex_lock(&mutex);
    point();
    pthread_mutex_unlock(&mutex);
  }
  return REAL(mkdir)(path, mode);
}

int fallocate(int fd, int mode, off_t offset, off_t length) {
  char path[PATH_MAX];
  if (path_of(fd, path)) {
    pthread_mutex_lock(&mutex);
    point();
    pthread_mutex_unlock(&mutex);
  }
  return REAL(fallocate)(fd, mode, offset, length);
}

static int opened(const char *path, int flags, mode_t mode) {
  if ((flags & O_CREAT) != 0 && is_under(path)) {
    pthread_mutex_lock(&mutex);
    point();
    pthread_mutex_unlock(&mutex);
  }
  return REAL(open)(path, flags, mode);
}

#define MODE_OF(flags)         \
  mode_t mode = 0;             \
  if ((flags & O_CREAT) != 0) { \
    va_list more;              \
    va_start(more, flags);     \
    mode = va_arg(more, mode_t); \
    va_end(more);              \
  }

int open(const char *path, int flags, ...) {
  MODE_OF(flags)
  return opened(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
  MODE_OF(flags)
  return opened(path, flags | O_LARGEFILE, mode);
}
