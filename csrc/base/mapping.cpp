#include "base/mapping.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <fstream>
#include <new>
#include <thread>

#include "base/page_residency.h"
#include "base/sigbus.h"
#include "tuning.h"

namespace gdsdata {

namespace {

struct GuardedRange {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;
  std::atomic<uint64_t>* lost_from = nullptr;
};

// Initial-exec, so that the signal handler never allocates when it reads this.
[[gnu::tls_model("initial-exec")]] thread_local volatile GuardedRange guarded;

bool read_zeros_instead(const siginfo_t& info) {
  const auto* address = static_cast<const std::byte*>(info.si_addr);
  if (info.si_code != BUS_ADRERR || guarded.begin == nullptr || address < guarded.begin || address >= guarded.end) {
    return false;
  }
  // Puts a page of zeros in place of the lost page and lets the copy continue. Its result is
  // discarded. The mark is set first, so another thread that reads these zeros finds it.
  const uint64_t offset = (address - guarded.begin) & ~(page_bytes() - 1);
  uint64_t lost_from = guarded.lost_from->load();
  while (offset < lost_from && !guarded.lost_from->compare_exchange_weak(lost_from, offset)) {
  }
  void* page = const_cast<std::byte*>(guarded.begin) + offset;
  return ::mmap(page, page_bytes(), PROT_READ, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED;
}

}  // namespace

uint64_t page_bytes() {
  static const auto bytes = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

void MappingGuard::install_handler() { put_sigbus_handler_in_front(read_zeros_instead); }

bool Mapping::leaves_enough(uint64_t size_bytes) {
  constexpr uint64_t kShare = 4;
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return true;
  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const uint64_t mapped = mapped_bytes_.load(std::memory_order_relaxed), used = pages * page_bytes();
  const uint64_t used_by_others = used - std::min(used, mapped);
  const uint64_t for_all = limit.rlim_cur - std::min<uint64_t>(limit.rlim_cur, used_by_others);
  return mapped + size_bytes <= for_all / kShare;
}

std::unique_ptr<Mapping> Mapping::make(int fd, uint64_t size_bytes) {
  if (size_bytes == 0) return nullptr;
  void* data = ::mmap(nullptr, size_bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return nullptr;
  // A fault reads its page and no read-ahead. A short file is read whole, and the call has all
  // other threads wait that map memory.
  if (size_bytes > tuning::kLongFileBytes) ::madvise(data, size_bytes, MADV_RANDOM);
  try {
    return std::unique_ptr<Mapping>(new Mapping(static_cast<const std::byte*>(data), size_bytes));
  } catch (const std::bad_alloc&) {  // no memory for the regions
    ::munmap(data, size_bytes);
    return nullptr;
  }
}

Mapping::Mapping(const std::byte* data, uint64_t size_bytes)
    : data_(data),
      size_bytes_(size_bytes),
      regions_((size_bytes + kRegionBytes - 1) / kRegionBytes),
      areas_((size_bytes + kAreaBytes - 1) / kAreaBytes),
      tails_(data, size_bytes) {
  ++count_;
  mapped_bytes_ += size_bytes;
}

size_t Mapping::most() {
  static const size_t half = [] {
    size_t allowed = 65530;  // Linux's default
    std::ifstream("/proc/sys/vm/max_map_count") >> allowed;
    return allowed / 2;
  }();
  return half;
}

int64_t Mapping::clock_ms() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

Mapping::~Mapping() {
  --count_;
  mapped_bytes_ -= size_bytes_;
  const auto unmap = [data = const_cast<std::byte*>(data_), size_bytes = size_bytes_] { ::munmap(data, size_bytes); };
  try {
    // Until it is unmapped, the pages stay in the page cache, and a nameless file on disk.
    if (size_bytes_ >= tuning::kLongToUnmapBytes) {
      std::thread(unmap).detach();
      return;
    }
  } catch (const std::exception&) {  // no thread is available
  }
  unmap();
}

uint64_t Mapping::resident_pages(uint64_t offset, uint64_t length) const {
  if (offset >= size_bytes_) return 0;
  const uint64_t begin = offset / page_bytes() * page_bytes();
  const uint64_t end = length < size_bytes_ - offset ? offset + length : size_bytes_;
  std::vector<unsigned char> pages((end - begin + page_bytes() - 1) / page_bytes());
  if (::mincore(const_cast<std::byte*>(data_) + begin, end - begin, pages.data()) != 0) return 0;
  uint64_t resident = 0;
  for (const unsigned char page : pages) resident += page & 1;
  return resident;
}

bool Mapping::is_in_memory(uint64_t offset) {
  if (offset >= size_bytes_) return false;
  MappingGuard::install_handler();
  const MappingGuard guard(*this);
  const long before = count_major_faults();
  static_cast<void>(*static_cast<const volatile std::byte*>(data_ + offset));
  return count_major_faults() == before;
}

void Mapping::forget_residency() {
  for (auto& region : regions_) region.store(0, std::memory_order_relaxed);
}

bool Mapping::every_region(size_t first, size_t last, uint8_t states) const {
  for (size_t region = first; region <= last; ++region) {
    if ((regions_[region].load(std::memory_order_relaxed) & states) == 0) return false;
  }
  return true;
}

void Mapping::mark(size_t first, size_t last, RegionState state) {
  for (size_t region = first; region <= last; ++region) regions_[region].fetch_or(state, std::memory_order_relaxed);
}

bool Mapping::populate(uint64_t offset, uint64_t length) const {
  constexpr int kMadvPopulateRead = 22;  // Linux 5.14
  const uint64_t begin = offset / page_bytes() * page_bytes();
  return ::madvise(const_cast<std::byte*>(data_) + begin, offset + length - begin, kMadvPopulateRead) == 0;
}

bool Mapping::map_for_copying(uint64_t offset, uint64_t length) {
  const size_t first = offset / kRegionBytes, last = (offset + length - 1) / kRegionBytes;
  if (every_region(first, last, kMapped)) return true;
  if (!every_region(first, last, kReadBefore | kMapped) && !trial_.is_due()) {
    mark(first, last, kReadBefore);
    return false;
  }
  const auto started = std::chrono::steady_clock::now();
  const bool populated = populate(offset, length);
  const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - started;
  const auto pages = static_cast<int64_t>(length / page_bytes() + 1);
  trial_.ended(populated && took / pages < tuning::kCheapPage);
  if (populated) mark(first, last, kMapped);
  return populated;
}

MappingGuard::MappingGuard(Mapping& mapping) {
  guarded.lost_from = &mapping.lost_from_;
  guarded.end = mapping.data() + mapping.size_bytes();
  guarded.begin = mapping.data();
}

MappingGuard::~MappingGuard() { guarded.begin = nullptr; }

}  // namespace gdsdata
