// Maps a file into memory to copy from the page cache. A copy then needs no system call, and the
// processor copies faster than the kernel does. If the file is truncated meanwhile, the copy
// returns an error and no signal is raised. A copy that has lost zeros only may be right instead.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/page_tails.h"
#include "base/trial.h"
#include "tuning.h"

namespace gdsdata {

uint64_t page_bytes();  // of the machine: 4096, or 65536 on some ARM kernels

class alignas(64) Mapping {
 public:
  // The mappings of this process. There should be at most `most`, half of what the system allows,
  // because the program needs some too.
  static size_t count() { return count_.load(std::memory_order_relaxed); }
  static size_t most();
  // Whether a file may be mapped to copy from it. If the process's address space is limited
  // (ulimit -v), mappings get a fourth of it, because others may need the rest.
  static bool leaves_enough(uint64_t size_bytes);
  // Returns null if the file is empty or cannot be mapped.
  static std::unique_ptr<Mapping> make(int fd, uint64_t size_bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  const std::byte* data() const { return data_; }
  uint64_t size_bytes() const { return size_bytes_; }

  // Uses mincore. File::residency tries the cheaper cachestat first.
  uint64_t resident_pages(uint64_t offset, uint64_t length) const;

  // By a page fault, which reads the page if it is not.
  bool is_in_memory(uint64_t offset);

  // Regions that were completely in the page cache when they were checked. This is a hint: if pages
  // are evicted later, a page fault reads them again. A caller that sees such faults calls
  // forget_residency.
  static constexpr uint64_t kRegionBytes = 64 * 1024;
  size_t region_count() const { return regions_.size(); }
  bool region_known_resident(size_t region) const {
    return (regions_[region].load(std::memory_order_relaxed) & kResident) != 0;
  }
  void mark_region_resident(size_t region) { regions_[region].fetch_or(kResident, std::memory_order_relaxed); }
  void mark_resident() { mark(0, regions_.size() - 1, kResident); }
  bool known_resident() const { return every_region(0, regions_.size() - 1, kResident); }
  void forget_residency();

  // Returns true if a range that is in the page cache should be copied from this mapping, and maps
  // its pages. Mapping pages one by one takes about as long as copying them, so that pays only for
  // ranges that are read again: they are mapped the second time. Pages of large folios are mapped
  // many at a time, which pays at once. A trial finds out which kind they are, again and again:
  // folios differ in size within a file, because read-ahead starts with small ones, for the first
  // tens of MiB (docs/design-decisions.md).
  bool map_for_copying(uint64_t offset, uint64_t length);

  // Bytes from this offset on may be zeros, because a part of the file was gone when it was read.
  static constexpr uint64_t kNothingLost = UINT64_MAX;
  uint64_t lost_from() const { return lost_from_.load(); }

  PageTails& tails() { return tails_; }

  // Returns true if more than 90 % of an area is in the page cache. It calls `share` for that at
  // most once a second, because `share` takes 1 us for each few dozen pages.
  static constexpr uint64_t kAreaBytes = tuning::kHoleAreaBytes;
  template <typename Share>
  bool area_mostly_resident(uint64_t offset, Share share) {
    std::atomic<int64_t>& known = areas_[offset / kAreaBytes];
    const int64_t now_ms = clock_ms();
    const int64_t before = known.load(std::memory_order_relaxed);
    if (before != 0 && now_ms - before / 2 < 1000) return before % 2 == 1;
    const bool mostly = share(offset / kAreaBytes * kAreaBytes) > 0.9;
    known.store(now_ms * 2 + (mostly ? 1 : 0), std::memory_order_relaxed);
    return mostly;
  }

 private:
  friend class MappingGuard;
  Mapping(const std::byte* data, uint64_t size_bytes);
  static int64_t clock_ms();
  enum RegionState : uint8_t { kResident = 1, kReadBefore = 2, kMapped = 4 };
  bool every_region(size_t first, size_t last, uint8_t states) const;  // true if each is in one of `states`
  void mark(size_t first, size_t last, RegionState state);
  bool populate(uint64_t offset, uint64_t length) const;

  inline static std::atomic<size_t> count_{0};
  inline static std::atomic<uint64_t> mapped_bytes_{0};

  // Short copies need these only: one cache line, which is hardly ever written.
  const std::byte* data_;
  uint64_t size_bytes_;
  std::atomic<uint64_t> lost_from_{kNothingLost};
  std::vector<std::atomic<uint8_t>> regions_;  // bits of RegionState

  std::vector<std::atomic<int64_t>> areas_;  // the time of the last check in ms * 2 + its result; 0: never checked
  Trial trial_;
  PageTails tails_;
};

// While a guard lives, a read of a page that the file no longer has yields zeros on this thread and
// does not raise SIGBUS. The mapping's lost_from() then says from which offset on. A thread has at
// most one guard. Call install_handler before each use: another library may have replaced it.
//
// Sources: mmap(2) on SIGBUS beyond the end of a file; sigaction(2) on si_addr. Every other SIGBUS
// goes to the earlier handlers (sigbus.h).
class MappingGuard {
 public:
  static void install_handler();
  explicit MappingGuard(Mapping& mapping);
  ~MappingGuard();
  MappingGuard(const MappingGuard&) = delete;
  MappingGuard& operator=(const MappingGuard&) = delete;
};

}  // namespace gdsdata
