/* Moves the wall clock of single processes, for LD_PRELOAD.
 *
 * The file WALL_CLOCK_FILE holds one int64_t a slot: by how many nanoseconds the clock is wrong. A
 * process has the right time until it calls wall_clock_follow, and its forks follow the same slot.
 * A program that maps the file moves the clocks of those processes at any moment.
 *
 * Covered: what reads the clock, and waits with a deadline of it. They look again every 20 ms,
 * because the kernel ends such a wait at once if the clock is set beyond the deadline. File systems
 * have the right time, like those of a file server.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND INT64_C(1000000000)
#define SLICE (SECOND / 50)
/* Deadlines of a monotonic clock are below: it counts from the start of the machine. */
#define YEAR_2001 (1000000000 * SECOND)

static volatile int64_t* offsets = NULL;
static int slots = 0, slot = -1;

static int (*real_cond_timedwait)(pthread_cond_t*, pthread_mutex_t*, const struct timespec*);
static int (*real_cond_clockwait)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);
static int (*real_mutex_timedlock)(pthread_mutex_t*, const struct timespec*);
static int (*real_sem_timedwait)(sem_t*, const struct timespec*);
static int (*real_sem_clockwait)(sem_t*, clockid_t, const struct timespec*);
static int (*real_gettime)(clockid_t, struct timespec*);

/* The oldest version of this function has another layout of pthread_cond_t. */
static void* newest(const char* name) {
  void* found = NULL;
#if defined(__x86_64__)
  found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");
#endif
  return found != NULL ? found : dlsym(RTLD_NEXT, name);
}

__attribute__((constructor)) static void begin(void) {
  real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
  real_cond_timedwait = newest("pthread_cond_timedwait");
  real_cond_clockwait = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
  real_mutex_timedlock = dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
  real_sem_timedwait = dlsym(RTLD_NEXT, "sem_timedwait");
  real_sem_clockwait = dlsym(RTLD_NEXT, "sem_clockwait");
  const char* path = getenv("WALL_CLOCK_FILE");
  const int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
  struct stat status;
  if (file >= 0 && fstat(file, &status) == 0 && status.st_size > 0) {
    void* mapped = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) offsets = mapped, slots = (int)(status.st_size / (off_t)sizeof(int64_t));
  }
  if (file >= 0) close(file);
}

/* Returns 0, or -1 if there is no such slot. */
int wall_clock_follow(int wanted) {
  if (wanted >= slots) return -1;
  slot = wanted;
  return 0;
}

static int64_t wrong_by(void) { return slot < 0 ? 0 : offsets[slot]; }
static int is_wall(clockid_t id) { return id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE; }
static int64_t count_of(const struct timespec* time) { return time->tv_sec * SECOND + time->tv_nsec; }
static struct timespec time_of(int64_t count) {
  return (struct timespec){.tv_sec = count / SECOND, .tv_nsec = count % SECOND};
}

static int64_t right_now(void) {
  struct timespec now;
  if (real_gettime == NULL) {
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
  } else {
    real_gettime(CLOCK_REALTIME, &now);
  }
  return count_of(&now);
}

int clock_gettime(clockid_t id, struct timespec* time) {
  const int result = real_gettime == NULL ? (int)syscall(SYS_clock_gettime, id, time) : real_gettime(id, time);
  if (result == 0 && is_wall(id)) *time = time_of(count_of(time) + wrong_by());
  return result;
}

int timespec_get(struct timespec* time, int base) {
  if (base != TIME_UTC) return 0;
  return clock_gettime(CLOCK_REALTIME, time) == 0 ? base : 0;
}

int gettimeofday(struct timeval* restrict time, void* restrict zone) {
  (void)zone;
  const struct timespec now = time_of(right_now() + wrong_by());
  time->tv_sec = now.tv_sec, time->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* kept) {
  const time_t now = (right_now() + wrong_by()) / SECOND;
  if (kept != NULL) *kept = now;
  return now;
}

/* Calls a wait with deadlines of at most a slice, until it ends or the moved clock reaches `until`. */
#define WAIT(CALL, RAN_OUT)                                                     \
  for (;;) {                                                                    \
    const int64_t now = right_now(), left = count_of(until) - now - wrong_by(); \
    const struct timespec slice = time_of(now + (left < SLICE ? left : SLICE)); \
    const int result = (CALL);                                                  \
    if (!(RAN_OUT) || left <= SLICE) return result;                             \
  }

static int has_right_time(const struct timespec* until) { return slot < 0 || count_of(until) < YEAR_2001; }

int pthread_cond_timedwait(pthread_cond_t* restrict cond, pthread_mutex_t* restrict mutex,
                           const struct timespec* restrict until) {
  if (has_right_time(until)) return real_cond_timedwait(cond, mutex, until);
  WAIT(real_cond_timedwait(cond, mutex, &slice), result == ETIMEDOUT)
}

int pthread_cond_clockwait(pthread_cond_t* restrict cond, pthread_mutex_t* restrict mutex, clockid_t id,
                           const struct timespec* restrict until) {
  if (!is_wall(id) || slot < 0) return real_cond_clockwait(cond, mutex, id, until);
  WAIT(real_cond_clockwait(cond, mutex, id, &slice), result == ETIMEDOUT)
}

int pthread_mutex_timedlock(pthread_mutex_t* restrict mutex, const struct timespec* restrict until) {
  if (slot < 0) return real_mutex_timedlock(mutex, until);
  WAIT(real_mutex_timedlock(mutex, &slice), result == ETIMEDOUT)
}

int sem_timedwait(sem_t* restrict semaphore, const struct timespec* restrict until) {
  if (slot < 0) return real_sem_timedwait(semaphore, until);
  WAIT(real_sem_timedwait(semaphore, &slice), result != 0 && errno == ETIMEDOUT)
}

int sem_clockwait(sem_t* restrict semaphore, clockid_t id, const struct timespec* restrict until) {
  if (!is_wall(id) || slot < 0) return real_sem_clockwait(semaphore, id, until);
  WAIT(real_sem_clockwait(semaphore, id, &slice), result != 0 && errno == ETIMEDOUT)
}
