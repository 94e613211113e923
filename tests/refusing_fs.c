/* A FUSE mount of a folder that accepts open(O_DIRECT) and answers EINVAL to each read and write made
 * with it, like some network and FUSE file systems. The first refusals wait for one another, so that
 * several requests are in flight at the first refusal:
 *   refusing_fs FOLDER TOGETHER MOUNTPOINT -f -o default_permissions
 */
#define FUSE_USE_VERSION 31
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static int folder = -1;
static int wanted_together = 1, waiting = 0, refused = 0;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static const char *below(const char *path) { return path[1] == '\0' ? "." : path + 1; }
static int result_of(int result) { return result < 0 ? -errno : result; }

/* Waits until enough refusals wait here, for at most a second. */
static int refuse(void) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += 1;
  pthread_mutex_lock(&lock);
  if (++waiting >= wanted_together) refused = 1;
  pthread_cond_broadcast(&changed);
  while (!refused && pthread_cond_timedwait(&changed, &lock, &until) != ETIMEDOUT) {
  }
  refused = 1;
  pthread_mutex_unlock(&lock);
  return -EINVAL;
}

static int fs_getattr(const char *path, struct stat *status, struct fuse_file_info *info) {
  if (info != NULL) return result_of(fstat((int)info->fh, status));
  return result_of(fstatat(folder, below(path), status, AT_SYMLINK_NOFOLLOW));
}

static int fs_open(const char *path, struct fuse_file_info *info) {
  const int file = openat(folder, below(path), info->flags & ~O_DIRECT);
  if (file < 0) return -errno;
  info->fh = (uint64_t)file;
  return 0;
}

static int fs_create(const char *path, mode_t mode, struct fuse_file_info *info) {
  const int file = openat(folder, below(path), (info->flags & ~O_DIRECT) | O_CREAT, mode);
  if (file < 0) return -errno;
  info->fh = (uint64_t)file;
  return 0;
}

static int fs_read(const char *path, char *bytes, size_t count, off_t offset, struct fuse_file_info *info) {
  (void)path;
  return info->flags & O_DIRECT ? refuse() : result_of((int)pread((int)info->fh, bytes, count, offset));
}

static int fs_write(const char *path, const char *bytes, size_t count, off_t offset, struct fuse_file_info *info) {
  (void)path;
  return info->flags & O_DIRECT ? refuse() : result_of((int)pwrite((int)info->fh, bytes, count, offset));
}

static int fs_release(const char *path, struct fuse_file_info *info) {
  (void)path;
  return result_of(close((int)info->fh));
}

static int fs_fsync(const char *path, int only_data, struct fuse_file_info *info) {
  (void)path, (void)only_data;
  return result_of(fsync((int)info->fh));
}

static int fs_truncate(const char *path, off_t size, struct fuse_file_info *info) {
  (void)path;
  return info == NULL ? -EBADF : result_of(ftruncate((int)info->fh, size));
}

static int fs_fallocate(const char *path, int mode, off_t offset, off_t length, struct fuse_file_info *info) {
  (void)path;
  return result_of(fallocate((int)info->fh, mode, offset, length));
}

static int fs_unlink(const char *path) { return result_of(unlinkat(folder, below(path), 0)); }

static int fs_rename(const char *from, const char *to, unsigned flags) {
  return flags != 0 ? -EINVAL : result_of(renameat(folder, below(from), folder, below(to)));
}

static const struct fuse_operations operations = {
    .getattr = fs_getattr, .open = fs_open,         .create = fs_create,       .read = fs_read,
    .write = fs_write,     .release = fs_release,   .fsync = fs_fsync,         .truncate = fs_truncate,
    .fallocate = fs_fallocate, .unlink = fs_unlink, .rename = fs_rename,
};

int main(int count, char **arguments) {
  if (count < 4 || (folder = open(arguments[1], O_RDONLY | O_DIRECTORY)) < 0) {
    fprintf(stderr, "usage: refusing_fs FOLDER TOGETHER MOUNTPOINT [FUSE_OPTION...]\n");
    return 2;
  }
  wanted_together = atoi(arguments[2]);
  arguments[2] = arguments[0];
  return fuse_main(count - 2, arguments + 2, &operations, NULL);
}
