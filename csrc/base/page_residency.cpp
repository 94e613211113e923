#include "base/page_residency.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <map>
#include <mutex>
#include <string>

#include "base/mapping.h"

namespace gdsdata {

namespace {

struct CachestatRange {
  uint64_t offset, length;
};
struct Cachestat {
  uint64_t cached, dirty, writeback, evicted, recently_evicted;
};
constexpr long kSysCachestat = 451;  // since Linux 6.5, the same number on every architecture

// Nothing if the kernel has no such call, or if this user may not see the pages (since 6.14).
std::optional<uint64_t> ask_cachestat(int fd, PageRange pages) {
  static std::atomic<bool> has_cachestat{true};
  if (!has_cachestat.load(std::memory_order_relaxed)) return std::nullopt;
  CachestatRange range{pages.first * page_bytes(), pages.count * page_bytes()};
  Cachestat found{};
  if (::syscall(kSysCachestat, fd, &range, &found, 0) == 0) return found.cached;
  if (errno == ENOSYS) has_cachestat = false;
  return std::nullopt;
}

// Asks each file system once: a statfs of a network file system takes a round trip.
bool is_in_overlay(int fd, const struct stat& status) {
  static auto* mutex = new std::mutex;  // never destroyed: workers may outlive static destructors
  static auto* known = new std::map<dev_t, bool>;
  std::lock_guard lock(*mutex);
  const auto [found, is_new] = known->emplace(status.st_dev, false);
  if (is_new) {
    struct statfs system{};
    found->second = ::fstatfs(fd, &system) == 0 && system.f_type == OVERLAYFS_SUPER_MAGIC;
  }
  return found->second;
}

// The kernel's own condition.
bool may_see_pages(int fd, const struct stat& status) {
  const uid_t user = ::geteuid();
  if (user == 0 || user == status.st_uid) return true;
  const std::string same = "/proc/self/fd/" + std::to_string(fd);
  return ::faccessat(AT_FDCWD, same.c_str(), W_OK, AT_EACCESS) == 0;
}

}  // namespace

PageRange::PageRange(uint64_t offset, uint64_t length)
    : first(offset / page_bytes()), count((offset + length + page_bytes() - 1) / page_bytes() - first) {}

void advise(int fd, PageRange pages, int advice) {
  ::posix_fadvise(fd, static_cast<off_t>(pages.first * page_bytes()), static_cast<off_t>(pages.count * page_bytes()),
                  advice);
}

PagesSeenBy pages_seen_by(int fd) {
  struct stat status{};
  if (::fstat(fd, &status) != 0) return PagesSeenBy::kPageFaults;
  if (!is_in_overlay(fd, status) && ask_cachestat(fd, PageRange(0, 1))) return PagesSeenBy::kCachestat;
  if (may_see_pages(fd, status)) return PagesSeenBy::kMincore;
  return is_cached(fd, 0) ? PagesSeenBy::kReading : PagesSeenBy::kPageFaults;
}

uint64_t cached_pages(int fd, PageRange pages) { return ask_cachestat(fd, pages).value_or(0); }

std::optional<bool> is_cached(int fd, uint64_t offset) {
  std::byte byte{};
  const iovec one{&byte, 1};
  if (::preadv2(fd, &one, 1, static_cast<off_t>(offset), RWF_NOWAIT) == 1) return true;
  return errno == EAGAIN ? std::optional(false) : std::nullopt;
}

long count_major_faults() {
  rusage usage{};
  ::getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_majflt;
}

}  // namespace gdsdata
