// A file mapped into memory for copying out of the page cache: no system call a record, and a
// processor copies faster than the kernel does. A file truncated meanwhile ends in an error, not in
// a signal.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tuning.h"

namespace gdsdata {

uint64_t page_bytes();  // of the machine: 4096, or 65536 on some ARM kernels

// Whether to map ranges of a file's page cache that are to be copied once: where it cost little for
// the one before, or one has not been tried for a while. Folios differ within a file: read-ahead
// starts with small ones, so that the first tens of MiB say nothing of the rest
// (docs/design-decisions.md).
class MappingTrial {
 public:
  bool is_due();
  void took(std::chrono::nanoseconds a_page);

 private:
  std::atomic<bool> last_was_dear_{false};
  std::atomic<uint32_t> left_out_{0};
};

class Mapping {
 public:
  // Null where the file is empty or cannot be mapped.
  static std::unique_ptr<Mapping> make(int fd, uint64_t size_bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  const std::byte* data() const { return data_; }
  uint64_t size_bytes() const { return size_bytes_; }

  // By mincore; File::residency asks the cheaper cachestat first.
  uint64_t resident_pages(uint64_t offset, uint64_t length) const;

  // Regions that were seen to be wholly in the page cache. A hint that lasts: pages may be evicted
  // later, which costs a page fault that reads them back; whoever sees such faults calls
  // forget_residency.
  static constexpr uint64_t kRegionBytes = 64 * 1024;
  size_t region_count() const { return regions_.size(); }
  bool region_known_resident(size_t region) const {
    return (regions_[region].load(std::memory_order_relaxed) & kResident) != 0;
  }
  void mark_region_resident(size_t region) { regions_[region].fetch_or(kResident, std::memory_order_relaxed); }
  void forget_residency();

  // Whether a range that is in the page cache is to be copied from here, and if so, its pages are
  // mapped now. Mapping pages one by one costs about what copying them does: it pays for what is
  // read again. Those of large folios are mapped many at a time, which pays at once; MappingTrial
  // finds out. What it leaves is mapped when it comes for the second time.
  bool map_for_copying(uint64_t offset, uint64_t length);

  // Somebody touched a part of the file that was gone: from this offset on, what was read may be
  // zeros.
  static constexpr uint64_t kNothingLost = UINT64_MAX;
  uint64_t lost_from() const { return lost_from_.load(); }

  // Whether an area of kAreaBytes is nearly all in the page cache, asked of `share` (which is slow:
  // a microsecond for each few dozen pages) at most once a second.
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
  bool every_region(size_t first, size_t last, uint8_t states) const;  // each in one of these
  void mark(size_t first, size_t last, RegionState state);
  bool populate(uint64_t offset, uint64_t length) const;

  const std::byte* data_;
  uint64_t size_bytes_;
  std::vector<std::atomic<uint8_t>> regions_;  // of RegionState
  MappingTrial trial_;
  std::vector<std::atomic<int64_t>> areas_;  // when asked, in ms, times two, plus the answer; 0: never
  std::atomic<uint64_t> lost_from_{kNothingLost};
};

// While one lives, touching pages of `mapping` that the file no longer has reads zeros on this
// thread instead of raising SIGBUS, and the mapping's lost_from() says from where on. One at a time
// on a thread, and install_handler must have been called since another library may have put in its
// own.
//
// Sources: mmap(2) on SIGBUS beyond the end of a file; sigaction(2) on si_addr. Every other SIGBUS
// goes to the handlers that were there before (sigbus.h).
class MappingGuard {
 public:
  static void install_handler();
  explicit MappingGuard(Mapping& mapping);
  ~MappingGuard();
  MappingGuard(const MappingGuard&) = delete;
  MappingGuard& operator=(const MappingGuard&) = delete;
};

}  // namespace gdsdata
