// Which pages of a file are in the page cache.
//
// Linux shows them to the file's owner and to those who may write it. Others find out by reading.
#pragma once

#include <cstdint>
#include <optional>

namespace gdsdata {

// The pages that contain a range of bytes.
struct PageRange {
  PageRange(uint64_t offset, uint64_t length);
  uint64_t first, count;
};

// posix_fadvise for these pages.
void advise(int fd, PageRange pages, int advice);

// How this process learns which pages of a file are in the page cache.
enum class PagesSeenBy {
  kCachestat,
  kMincore,     // without cachestat, and in an overlay, whose pages are those of a layer's file
  kReading,     // Linux hides them: mincore says that all are in memory. RWF_NOWAIT does not wait.
  kPageFaults,  // hidden too, and the file system has no RWF_NOWAIT
};
PagesSeenBy pages_seen_by(int fd);

// How many of the pages are in the page cache, by cachestat. 0 if it fails.
uint64_t cached_pages(int fd, PageRange pages);

// Whether this byte is in the page cache, by RWF_NOWAIT. If it is not, its page is requested.
// Nothing if the file system has no such flag.
std::optional<bool> is_cached(int fd, uint64_t offset);

// Page faults of this thread that read from storage.
long count_major_faults();

}  // namespace gdsdata
