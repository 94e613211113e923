#include "backend/page_cache.h"

#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "backend/request_error.h"
#include "base/copy.h"
#include "tuning.h"

namespace gdsdata {

namespace {

constexpr uint64_t kLineBytes = 64;

// The bytes of a later copy to prefetch. Records lie in random places, which no hardware prefetcher
// predicts.
std::span<const std::byte> prefetched_part(const Mapping& mapping, const Transfer& transfer) {
  return {mapping.data() + transfer.offset, std::min(transfer.length, tuning::kPrefetchedBytes)};
}

void prefetch(std::span<const std::byte> memory) {
  for (uint64_t i = 0; i < memory.size(); i += kLineBytes) __builtin_prefetch(memory.data() + i);
}

// Prefetches one line of `later` for each line that it copies. A burst of requests for all of them
// would hold up the copy (docs/design-decisions.md).
void copy_and_prefetch(std::byte* to, const std::byte* from, uint64_t bytes, std::span<const std::byte> later) {
  uint64_t done = 0;
  for (; done + kLineBytes <= bytes && done < later.size(); done += kLineBytes) {
    __builtin_prefetch(later.data() + done);
    std::memcpy(to + done, from + done, kLineBytes);
  }
  if (done < later.size()) prefetch(later.subspan(done));
  std::memcpy(to + done, from + done, bytes - done);
}

// The same for a conversion. It works on several lines at a time.
void convert_and_prefetch(Conversion conversion, std::byte* to, const std::byte* from, uint64_t bytes,
                          std::span<const std::byte> later) {
  constexpr uint64_t kStepBytes = 2 * kLineBytes;
  uint64_t done = 0;
  for (; done + kStepBytes <= bytes && done < later.size(); done += kStepBytes) {
    prefetch(later.subspan(done, std::min(kStepBytes, later.size() - done)));
    convert(conversion, to + result_bytes(conversion, done), from + done, kStepBytes);
  }
  if (done < later.size()) prefetch(later.subspan(done));
  convert(conversion, to + result_bytes(conversion, done), from + done, bytes - done);
}

bool resident(File& file, Mapping& mapping, const Transfer& transfer) {
  const size_t first = transfer.offset / Mapping::kRegionBytes;
  const size_t last = (transfer.offset + transfer.length - 1) / Mapping::kRegionBytes;
  for (size_t region = first; region <= last; ++region) {
    if (mapping.region_known_resident(region)) continue;
    if (file.hides_pages()) return false;  // see read_hidden
    const uint64_t offset = region * Mapping::kRegionBytes;
    const uint64_t length = std::min(Mapping::kRegionBytes, mapping.size_bytes() - offset);
    if (file.residency(offset, length) != File::Residency::kAll) {
      return file.residency(transfer.offset, transfer.length) == File::Residency::kAll;
    }
    mapping.mark_region_resident(region);
  }
  return true;
}

// For a long transfer, checks one page in each stretch first. That recognizes the two common cases,
// all and nothing, at a fraction of the cost. RWF_NOWAIT does not wait for pages evicted meanwhile.
File::Residency long_residency(File& file, const Transfer& transfer) {
  if (transfer.length < 2 * tuning::kResidencyStretchBytes) return file.residency(transfer.offset, transfer.length);
  File::Residency first = File::Residency::kUnknown;
  for (uint64_t done = 0; done < transfer.length; done += tuning::kResidencyStretchBytes) {
    const File::Residency page = file.residency(transfer.offset + done, 1);
    if (done == 0) first = page;
    if (page == File::Residency::kNone && file.hides_pages()) return page;  // each question reads a page
    if (page != first) return file.residency(transfer.offset, transfer.length);
  }
  return first;
}

// A hole in a file that is otherwise in memory. A read with O_DIRECT would not fill it, and each
// epoch would wait for it again. So a page fault fills it.
bool is_small_hole(File& file, Mapping& mapping, const Transfer& transfer) {
  return mapping.area_mostly_resident(transfer.offset, [&](uint64_t offset) {
    return file.resident_share(offset, std::min(Mapping::kAreaBytes, file.size_bytes() - offset));
  });
}

// Creating a mapping takes as long as copying some MiB.
bool long_mapping_pays(File& file, uint64_t length, PageCache::Into into) {
  return file.size_bytes() >= PageCache::kLongFileBytes ||
         (into == PageCache::Into::kResult && file.size_bytes() >= PageCache::kMapFileBytes &&
          file.was_read_before(length));
}

// Returns true if no byte of a copy was lost because the file was truncated. It is false if that is
// not known: the file's size says it. Only the moment in which the kernel writes zeros remains, and
// read(2) has that too.
bool is_surely_whole(Mapping& mapping, const Transfer& copied) {
  const uint64_t last = copied.offset + copied.length - 1;
  std::atomic_thread_fence(std::memory_order_acquire);  // after the copy
  const bool ends_in_zero = *static_cast<const volatile std::byte*>(mapping.data() + last) == std::byte{0};
  if (ends_in_zero && !mapping.tails().show_whole(last)) return false;
  return mapping.lost_from() == Mapping::kNothingLost;  // last: to look at a lost page loses it
}

// The first and the last byte of pages that the fault of a byte has mapped too: by default, Linux
// maps 64 KiB. Only the byte itself if its neighbors may not be in the page cache.
std::pair<uint64_t, uint64_t> mapped_around(const Mapping& mapping, uint64_t byte) {
  const size_t region = byte / Mapping::kRegionBytes;
  if (!mapping.region_known_resident(region)) return {byte, byte};
  const uint64_t begin = region * Mapping::kRegionBytes;
  return {begin, std::min(begin + Mapping::kRegionBytes, mapping.size_bytes()) - 1};
}

// The page cache has blocks of the local cache too.
Route route_of(const File& file) { return file.remote() == nullptr ? Route::kPageCache : Route::kLocalCache; }

}  // namespace

std::optional<Error> PageCache::serve(std::span<const Transfer> transfers, std::span<File* const> files,
                                      Conversion conversion, bool past_caches, std::vector<Transfer>& left,
                                      RouteBytes& bytes) {
  copies_.clear();
  for (size_t i = 0; i < transfers.size(); ++i) {
    const Transfer& transfer = transfers[i];
    File& file = *files[i];
    if (transfer.length > file.size_bytes() || transfer.offset > file.size_bytes() - transfer.length)
      return truncated_error(file, transfer.offset, transfer.length);
    if (!file.holds(transfer.offset, transfer.length)) {
      left.push_back(transfer);
      continue;
    }
    const bool is_long = transfer.length > kShortBytes;
    const bool pays = is_long ? long_mapping_pays(file, transfer.length, into_)
                              : file.size_bytes() >= kMapFileBytes || file.had_short_read();
    Mapping* mapping = pays ? file.mapping() : nullptr;
    if (mapping == nullptr || is_long) {
      // Checked first, because RWF_NOWAIT on a missing page starts reading it into the page cache.
      const File::Residency residency = long_residency(file, transfer);
      if (mapping != nullptr && residency == File::Residency::kAll &&
          mapping->map_for_copying(transfer.offset, transfer.length)) {
        copies_.push_back({&transfer, &file, mapping, route_of(file)});
      } else {
        read_resident(file, transfer, residency, conversion, left, bytes);
      }
    } else if (resident(file, *mapping, transfer)) {
      copies_.push_back({&transfer, &file, mapping, route_of(file)});
    } else if (file.hides_pages()) {
      read_hidden(file, *mapping, transfer, conversion, left, bytes);
    } else if (is_small_hole(file, *mapping, transfer)) {
      copies_.push_back({&transfer, &file, mapping, Route::kBuffered});  // by a page fault
    } else {
      left.push_back(transfer);
    }
  }
  return copies_.empty() ? std::nullopt : copy_mapped(conversion, past_caches, bytes);
}

std::optional<Error> PageCache::copy_mapped(Conversion conversion, bool past_caches, RouteBytes& bytes) {
  MappingGuard::install_handler();
  unsure_.clear();
  const long major_faults = count_major_faults();
  for (size_t i = 0; i < copies_.size(); ++i) {
    std::span<const std::byte> later;
    if (i + tuning::kPrefetchedRecords < copies_.size()) {
      const Copy& one = copies_[i + tuning::kPrefetchedRecords];
      later = prefetched_part(*one.mapping, *one.transfer);
    }
    const Copy& copy = copies_[i];
    const uint64_t length = copy.transfer->length;
    MappingGuard guard(*copy.mapping);
    const std::byte* bytes_there = copy.mapping->data() + copy.transfer->offset;
    if (conversion != Conversion::kNone) {
      convert_and_prefetch(conversion, copy.transfer->memory, bytes_there, length, later);
    } else if (past_caches && length >= tuning::kStreamedCopyBytes) {
      prefetch(later);
      copy_bytes(copy.transfer->memory, bytes_there, length);
    } else {
      copy_and_prefetch(copy.transfer->memory, bytes_there, length, later);
    }
    bytes[copy.route] += length;
    if (!is_surely_whole(*copy.mapping, *copy.transfer)) unsure_.push_back(copy);
  }
  if (count_major_faults() > major_faults) {  // pages were evicted
    for (const Copy& copy : copies_) copy.mapping->forget_residency();
  }
  return first_truncated();
}

// Checks once for each file that all copied bytes are still part of it.
std::optional<Error> PageCache::first_truncated() {
  const auto other_file = [&](const Copy& copy) { return copy.file != unsure_.front().file; };
  if (std::any_of(unsure_.begin(), unsure_.end(), other_file)) {
    std::sort(unsure_.begin(), unsure_.end(), [](const Copy& a, const Copy& b) { return a.file < b.file; });
  }
  for (auto first = unsure_.begin(); first != unsure_.end();) {
    const auto last = std::find_if(first, unsure_.end(), [&](const Copy& copy) { return copy.file != first->file; });
    if (auto error = check_size({first, last})) return error;
    first = last;
  }
  return std::nullopt;
}

// Learns how the pages end, before it asks for the size: later copies of them then need not ask.
std::optional<Error> PageCache::check_size(std::span<const Copy> of_one_file) {
  Mapping& mapping = *of_one_file.front().mapping;
  const Transfer* farthest = of_one_file.front().transfer;
  seen_.clear();
  {
    const MappingGuard guard(mapping);
    for (const Copy& copy : of_one_file) {
      if (copy.transfer->offset > farthest->offset) farthest = copy.transfer;
      const uint64_t last = copy.transfer->offset + copy.transfer->length - 1;
      const auto [begin, end] = mapped_around(mapping, last);
      mapping.tails().see(begin, end, seen_);
    }
  }
  const uint64_t end = farthest->offset + farthest->length;
  const File& file = *of_one_file.front().file;
  const uint64_t size_bytes = file.current_size_bytes();
  if (mapping.lost_from() < end || size_bytes < end) return truncated_error(file, farthest->offset, farthest->length);
  if (mapping.lost_from() == Mapping::kNothingLost) mapping.tails().learn(seen_, size_bytes);
  return std::nullopt;
}

void PageCache::read_resident(File& file, const Transfer& transfer, File::Residency whole, Conversion conversion,
                              std::vector<Transfer>& left, RouteBytes& bytes) {
  if (whole == File::Residency::kNone) {
    left.push_back(transfer);
    return;
  }
  const uint64_t step_bytes =
      whole == File::Residency::kSome || conversion != Conversion::kNone ? tuning::kScratchBytes : transfer.length;
  for (uint64_t done = 0; done < transfer.length; done += step_bytes) {
    Transfer part{transfer.file, transfer.offset + done, std::min(step_bytes, transfer.length - done),
                  transfer.memory + result_bytes(conversion, done)};
    const File::Residency residency =
        whole == File::Residency::kSome ? file.residency(part.offset, part.length) : whole;
    const bool resident = residency == File::Residency::kAll;
    const bool ask = resident || whole == File::Residency::kUnknown;
    const uint64_t served = ask ? read_now(file, part, conversion, resident) : 0;
    bytes[route_of(file)] += served;
    if (served == part.length) continue;
    // Where nothing is known, each further step that fails would request pages.
    const bool is_last = whole == File::Residency::kUnknown;
    const uint64_t missing = (is_last ? transfer.length - done : part.length) - served;
    left.push_back({part.file, part.offset + served, missing, part.memory + result_bytes(conversion, served)});
    if (is_last) return;
  }
}

// A short transfer, of which Linux does not show what is in memory. If all of it is, the regions of
// the mapping that it touches are taken for resident.
void PageCache::read_hidden(File& file, Mapping& mapping, const Transfer& transfer, Conversion conversion,
                            std::vector<Transfer>& left, RouteBytes& bytes) {
  if (!file.hidden_trial().is_due()) {
    left.push_back(transfer);
    return;
  }
  const size_t left_before = left.size();
  const bool reads = file.pages_seen_by() == PagesSeenBy::kReading;
  if (reads) {
    read_resident(file, transfer, File::Residency::kUnknown, conversion, left, bytes);
  } else if (file.residency(transfer.offset, transfer.length) == File::Residency::kAll) {
    copies_.push_back({&transfer, &file, &mapping, route_of(file)});
  } else {
    left.push_back(transfer);
  }
  const bool all_there = left.size() == left_before;
  file.hidden_trial().ended(all_there);
  if (!all_there) return;
  scratch_.resize(std::max(scratch_.size(), Mapping::kRegionBytes));
  const size_t last = (transfer.offset + transfer.length - 1) / Mapping::kRegionBytes;
  for (size_t region = transfer.offset / Mapping::kRegionBytes; region <= last; ++region) {
    const uint64_t offset = region * Mapping::kRegionBytes;
    const Transfer whole{transfer.file, offset, std::min(Mapping::kRegionBytes, mapping.size_bytes() - offset),
                         scratch_.data()};
    if (mapping.region_known_resident(region)) continue;
    if (reads && read_now(file, whole, Conversion::kNone, false) < whole.length) continue;
    mapping.mark_region_resident(region);
  }
}

uint64_t PageCache::read_now(File& file, const Transfer& part, Conversion conversion, bool known_resident) {
  std::byte* target = part.memory;
  if (conversion != Conversion::kNone) {
    if (scratch_.size() < part.length) scratch_.resize(std::max(tuning::kScratchBytes, part.length));
    target = scratch_.data();
  }
  uint64_t served = 0;
  while (served < part.length) {
    const iovec rest{target + served, part.length - served};
    const auto offset = static_cast<off_t>(part.offset + served);
    ssize_t moved = ::preadv2(file.buffered(), &rest, 1, offset, RWF_NOWAIT);
    // tmpfs does not support it, and a seccomp profile may forbid it. A plain read does not block
    // if all pages are in memory.
    if (moved < 0 && errno != EAGAIN && known_resident) moved = ::preadv(file.buffered(), &rest, 1, offset);
    // Not resident, not supported, interrupted or at the end: the backend finds out which.
    if (moved <= 0) break;
    served += static_cast<uint64_t>(moved);
  }
  served -= served % stored_element_bytes(conversion);
  if (conversion != Conversion::kNone) convert(conversion, part.memory, target, served);
  return served;
}

}  // namespace gdsdata
