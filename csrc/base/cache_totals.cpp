#include "base/cache_totals.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>

#include "base/error.h"
#include "base/file_lock.h"

namespace gdsdata {

namespace {

constexpr const char* kName = "cache.state";
constexpr std::array<char, 8> kMagic = {'g', 'd', 's', 'c', 'a', 'c', 'h', 'e'};
constexpr uint32_t kFormat = 1;
constexpr uint64_t kFileBytes = 4096;
constexpr uint64_t kUsersByte = kFirstLockByte;
constexpr unsigned kLeastShift = 16, kMostShift = 26;

}  // namespace

struct CacheTotals::Shared {
  std::array<char, 8> magic;
  uint32_t format;
  uint32_t shift;
  std::atomic<uint32_t> boot;  // of the last count
  std::atomic<uint64_t> used_bytes;
  std::atomic<uint64_t> unsettled;
  std::atomic<uint64_t> most_bytes;
};

CacheTotals::CacheTotals(int folder, const std::string& folder_path, unsigned shift) {
  static_assert(sizeof(Shared) <= kFileBytes && std::atomic<uint64_t>::is_always_lock_free);
  const std::string path = folder_path + "/" + kName;
  constexpr int kFlags = O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  file_ = Descriptor(open_descriptor([&] { return ::openat(folder, kName, kFlags, 0666); }));
  if (file_.get() < 0) throw Failure(system_error("open the cache's file", path, errno));
  Lock lock = lock_description(file_.get(), F_WRLCK, kUsersByte);
  is_alone_ = lock == Lock::kTaken;
  if (lock == Lock::kHeld) lock = wait_for_shared(file_.get(), kUsersByte);
  if (lock != Lock::kTaken) {
    throw Failure({ErrorCode::kInvalidArgument,
                   "the cache folder '" + folder_path +
                       "' is on a file system without locks; choose a folder on a disk of this machine",
                   path});
  }
  struct stat status{};
  if (::fstat(file_.get(), &status) != 0) throw Failure(system_error("examine", path, errno));
  if (status.st_size < static_cast<off_t>(kFileBytes)) {
    int error = 0;
    do {
      error = ::posix_fallocate(file_.get(), 0, static_cast<off_t>(kFileBytes));
    } while (error == EINTR);
    if (error != 0) throw Failure(system_error("reserve space for", path, error, 0, kFileBytes));
  }
  void* const mapped = ::mmap(nullptr, kFileBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
  if (mapped == MAP_FAILED) throw Failure(system_error("map", path, errno));
  shared_ = static_cast<Shared*>(mapped);
  try {
    begin(path, shift);
  } catch (...) {
    ::munmap(shared_, kFileBytes);
    throw;
  }
}

CacheTotals::~CacheTotals() { ::munmap(shared_, kFileBytes); }

void CacheTotals::begin(const std::string& path, unsigned shift) {
  // Zeros: a new file, or one whose content a crash of the machine took.
  if (is_alone_ && shared_->magic == std::array<char, 8>{}) {
    shared_->format = kFormat;
    shared_->shift = shift;
    shared_->boot = 0;
    shared_->magic = kMagic;
  }
  const bool is_ours = shared_->magic == kMagic && shared_->format == kFormat && shared_->shift >= kLeastShift &&
                       shared_->shift <= kMostShift;
  if (is_ours) return;
  throw Failure({ErrorCode::kInvalidArgument,
                 "'" + path + "' is not the state of a cache that this version knows; choose another cache folder",
                 path});
}

unsigned CacheTotals::shift() const { return shared_->shift; }

void CacheTotals::share() {
  if (!is_alone_) return;
  lock_description(file_.get(), F_RDLCK, kUsersByte);
  is_alone_ = false;
}

bool CacheTotals::must_recount(uint32_t boot) const { return shared_->boot != boot || shared_->unsettled != 0; }

void CacheTotals::recounted(uint64_t used_bytes, uint32_t boot) {
  shared_->used_bytes = used_bytes;
  shared_->unsettled = 0;
  shared_->boot = boot;
}

bool CacheTotals::reserve(uint64_t bytes, uint64_t most_bytes) {
  unsettle();
  uint64_t used = shared_->used_bytes;
  while (bytes <= most_bytes && used <= most_bytes - bytes) {
    if (shared_->used_bytes.compare_exchange_weak(used, used + bytes)) return true;
  }
  settle();
  return false;
}

void CacheTotals::unsettle() { ++shared_->unsettled; }

void CacheTotals::settle() { --shared_->unsettled; }

void CacheTotals::subtract(uint64_t bytes) {
  uint64_t used = shared_->used_bytes;
  while (!shared_->used_bytes.compare_exchange_weak(used, used - std::min(used, bytes))) {
  }
}

uint64_t CacheTotals::used_bytes() const { return shared_->used_bytes; }

void CacheTotals::note_most_bytes(uint64_t most_bytes) { shared_->most_bytes = most_bytes; }

uint64_t CacheTotals::most_bytes() const { return shared_->most_bytes; }

}  // namespace gdsdata
