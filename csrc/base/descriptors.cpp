#include "base/descriptors.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/per_process.h"
#include "tuning.h"

namespace gdsdata {

namespace {

// Working storage closes its files within this time. Other parts of the program may never.
constexpr std::chrono::seconds kPatience{30};
// No file may be in use at the moment that this is asked, though all were when a descriptor was
// wanted. So a few more looks follow.
constexpr std::chrono::milliseconds kPatienceWithoutUsers{100};
// No event says that a descriptor is free again, so the wait polls.
constexpr std::chrono::milliseconds kLooksAgain{2};
// A new process has place for so many (Linux).
constexpr size_t kFewDescriptors = 64;

void make_place_for(size_t count) {
  const Descriptor lowest(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  rlimit limit{};
  if (lowest.get() < 0 || ::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t highest = std::min<rlim_t>(static_cast<rlim_t>(lowest.get()) + count, limit.rlim_cur - 1);
  const Descriptor of_its_place(::fcntl(lowest.get(), F_DUPFD_CLOEXEC, static_cast<int>(highest)));
}

// Returns another number for a descriptor that has a standard stream's.
int beside_standard_streams(int fd) {
  if (fd < 0 || fd > STDERR_FILENO) return fd;
  const int moved = ::fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int refusal = errno;
  ::close(fd);
  errno = refusal;
  return moved;
}

}  // namespace

// Order of locks: this one, then a cache's own, then that of the pins.
struct Caches {
  std::mutex mutex;
  std::vector<FileCache*> members;      // guarded by mutex; the one that needed room last is the last
  std::atomic<ssize_t> descriptors{0};  // of all open files, cached or not
  std::atomic<ssize_t> evicted{0};      // files that readers keep open; written under the mutex

  // Evicts one idle file for the cache `opening`, or for none, and closes all that are no longer
  // read. Caches that have not needed room for longest come first: the data sets of others may no
  // longer be read. Returns false if nothing was evicted or closed, or if `closes` and none closed.
  bool make_idle(const FileCache* opening, bool closes) {
    std::vector<std::shared_ptr<void>> closing;  // destroyed, and so closed, after the lock is released
    std::lock_guard lock(mutex);
    const auto own = std::find(members.begin(), members.end(), opening);
    if (own != members.end()) std::rotate(own, own + 1, members.end());
    const size_t most_evicted = most_cached_descriptors() / tuning::kEvictedPart + 1;
    for (FileCache* cache : members) close_unused(*cache, closing);
    if (!closing.empty()) return true;
    for (FileCache* cache : members) {
      if (cache->evicted_.size() >= most_evicted || !evict(*cache, [cache] { return cache->evict(); })) continue;
      close_unused(*cache, closing);
      if (!closes || !closing.empty()) return true;
    }
    return false;
  }
  // The same until one more descriptor fits into the limit `most`. Returns false if all files are
  // in use.
  bool make_room(const FileCache* opening, size_t most) {
    while (descriptors - evicted >= static_cast<ssize_t>(most)) {
      if (!make_idle(opening, /*closes=*/false)) return false;
    }
    return true;
  }
  void evict_each(FileCache& cache, const std::function<Limbo::Object()>& take) {
    std::vector<std::shared_ptr<void>> closing;  // as in `make_idle`
    std::lock_guard lock(mutex);
    while (evict(cache, take)) {
    }
    close_unused(cache, closing);
  }
  bool has_used_files() {
    std::lock_guard lock(mutex);
    return std::any_of(members.begin(), members.end(),
                       [](FileCache* cache) { return cache->evicted_.size() > 0 || cache->has_used_files(); });
  }
  void remove(FileCache& cache) {
    std::lock_guard lock(mutex);
    std::erase(members, &cache);
    evicted -= static_cast<ssize_t>(cache.evicted_.size());
  }

 private:
  template <typename Take>
  bool evict(FileCache& cache, Take take) {
    const bool found = cache.evicted_.add(take);
    evicted += found ? 1 : 0;
    return found;
  }
  void close_unused(FileCache& cache, std::vector<std::shared_ptr<void>>& closing) {
    const size_t before = closing.size();
    cache.evicted_.take_unused(closing);
    evicted -= static_cast<ssize_t>(closing.size() - before);
  }
};

namespace {

Caches& caches() { return of_this_process<Caches>(); }

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

int with_descriptors(const std::function<int()>& call, WhenTaken when_taken) {
  const auto begun = std::chrono::steady_clock::now();
  while (true) {
    const int result = call();
    if (result >= 0 || !is_out_of_descriptors(errno)) return result;
    const int refusal = errno;
    if (caches().make_idle(nullptr, /*closes=*/true)) continue;
    const std::chrono::milliseconds patience = caches().has_used_files() ? kPatience : kPatienceWithoutUsers;
    errno = refusal;
    if (when_taken == WhenTaken::kGiveUp || std::chrono::steady_clock::now() >= begun + patience) return -1;
    std::this_thread::sleep_for(kLooksAgain);
  }
}

int open_descriptor(const std::function<int()>& open, WhenTaken when_taken) {
  return with_descriptors([&] { return beside_standard_streams(open()); }, when_taken);
}

size_t most_cached_descriptors() {
  constexpr size_t kMost = tuning::kMostCachedDescriptors;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kMost;
  return std::clamp<size_t>(limit.rlim_cur / 2, 1, kMost);
}

void expect_descriptors(size_t count) {
  static std::atomic<size_t> expected{kFewDescriptors};  // a forked child has its parent's table
  size_t before = expected;
  while (before < count && !expected.compare_exchange_weak(before, count)) {
  }
  if (before >= count) return;
  try {
    std::thread(make_place_for, count).detach();
  } catch (const std::system_error&) {  // no thread is available
  }
}

void make_room_for_descriptor() { caches().make_room(nullptr, most_cached_descriptors()); }

void DescriptorShare::add_one() {
  Caches& all = caches();
  if (counted_in_ == nullptr) counted_in_ = &all;
  if (counted_in_ != &all) return;  // opened in the parent process
  ++count_;
  all.descriptors.fetch_add(1, std::memory_order_relaxed);
}

void DescriptorShare::move_to(DescriptorShare& other) {
  other.counted_in_ = std::exchange(counted_in_, nullptr);
  other.count_ = std::exchange(count_, 0);
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
  if (caches_ == &all) all.remove(*this);  // else it never joined, or joined in the parent process
}

bool FileCache::make_room(size_t most) { return caches().make_room(this, most); }

void FileCache::evict_each(const std::function<Limbo::Object()>& take) {
  Caches& all = caches();
  if (caches_ == &all) all.evict_each(*this, take);  // see `leave`
}

}  // namespace gdsdata
