/* A library for LD_PRELOAD that counts the entries of folders that a process reads. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>

static long count;

long count_of_readdir(void) { return count; }

struct dirent *readdir(DIR *folder) {
  ++count;
  return ((struct dirent * (*)(DIR *)) dlsym(RTLD_NEXT, "readdir"))(folder);
}
