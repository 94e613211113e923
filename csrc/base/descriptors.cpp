#include "base/descriptors.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "tuning.h"

namespace gdsdata {

namespace {

// Working storage closes its files within this time. Other parts of the program may never.
constexpr std::chrono::seconds kPatience{30};
// No event says that a descriptor is free again, so the wait polls.
constexpr std::chrono::milliseconds kLooksAgain{2};

// All caches of a process. Order of locks: this one, then a cache's own.
struct Caches {
  const pid_t process = ::getpid();
  std::mutex mutex;
  std::vector<FileCache*> members;  // guarded by mutex; the one that needed room last is the last
  std::atomic<ssize_t> descriptors{0};  // of all open files, cached or not

  // Closes one idle file for the cache `opening`, or for none. Caches that have not needed room for
  // longest come first: the data sets of others may no longer be read. Returns false if there is no
  // idle file.
  bool close_idle(const FileCache* opening) {
    std::vector<std::shared_ptr<void>> idle;  // destroyed, and so closed, after the lock is released
    std::lock_guard lock(mutex);
    const auto own = std::find(members.begin(), members.end(), opening);
    if (own != members.end()) std::rotate(own, own + 1, members.end());
    for (FileCache* cache : members) {
      cache->take_idle(1, idle);
      if (!idle.empty()) return true;
    }
    return false;
  }
  bool has_used_files() {
    std::lock_guard lock(mutex);
    return std::any_of(members.begin(), members.end(), [](FileCache* cache) { return cache->has_used_files(); });
  }
};

// Never destroyed, because workers may outlive static destructors. A forked child gets its own,
// because the parent's lock may be held by a thread that the child does not have.
Caches& caches() {
  static std::atomic<Caches*> current{new Caches};
  Caches* found = current.load(std::memory_order_acquire);
  while (found->process != ::getpid()) {
    auto* made = new Caches;
    if (current.compare_exchange_strong(found, made)) return *made;
    delete made;
  }
  return *found;
}

}  // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    reset();
    std::swap(fd_, other.fd_);
  }
  return *this;
}

void Descriptor::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

bool is_out_of_descriptors(int system_errno) { return system_errno == EMFILE || system_errno == ENFILE; }

int open_descriptor(const std::function<int()>& open, WhenTaken when_taken) {
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (true) {
    const int fd = open();
    if (fd >= 0 || !is_out_of_descriptors(errno)) return fd;
    const int refusal = errno;
    if (caches().close_idle(nullptr)) continue;
    const bool waits = when_taken == WhenTaken::kWait && caches().has_used_files();
    errno = refusal;
    if (!waits || std::chrono::steady_clock::now() >= until) return -1;
    std::this_thread::sleep_for(kLooksAgain);
  }
}

size_t most_cached_descriptors() {
  constexpr size_t kMost = tuning::kMostCachedDescriptors;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kMost;
  return std::clamp<size_t>(limit.rlim_cur / 2, 1, kMost);
}

void DescriptorShare::add_one() {
  Caches& all = caches();
  if (counted_in_ == nullptr) counted_in_ = &all;
  if (counted_in_ != &all) return;  // opened in the parent process
  ++count_;
  all.descriptors.fetch_add(1, std::memory_order_relaxed);
}

DescriptorShare::~DescriptorShare() {
  Caches& all = caches();
  if (counted_in_ == &all) all.descriptors.fetch_sub(count_, std::memory_order_relaxed);
}

void FileCache::join() {
  Caches& all = caches();
  std::lock_guard lock(all.mutex);
  all.members.push_back(this);
  caches_ = &all;
}

void FileCache::leave() {
  Caches& all = caches();
  if (caches_ != &all) return;  // never joined, or joined in the parent process
  std::lock_guard lock(all.mutex);
  std::erase(all.members, this);
}

bool FileCache::make_room() {
  Caches& all = caches();
  const auto most = static_cast<ssize_t>(most_cached_descriptors());
  while (all.descriptors.load(std::memory_order_relaxed) >= most) {
    if (!all.close_idle(this)) return false;
  }
  return true;
}

}  // namespace gdsdata
