// Files as the engine needs them: one buffered and, where the file system allows it, one O_DIRECT
// descriptor; alignment; what was refused; making changes durable.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/descriptors.h"
#include "base/error.h"
#include "base/mapping.h"

namespace gdsdata {

// What an index saw of a file; a file that differs when it is opened was replaced or changed since.
struct FileIdentity {
  static constexpr int64_t kAnyTime = -1;  // of memory that this process itself fills
  uint64_t size_bytes = 0;
  int64_t mtime_ns = 0;
};

// An open file. Thread-safe: workers share it.
class File {
 public:
  // Throw Failure. `expected` is checked when given. Null if it gives up (see WhenTaken).
  static std::shared_ptr<File> open_for_reading(const std::string& path, std::optional<FileIdentity> expected = {},
                                                WhenTaken when_taken = WhenTaken::kWait);
  static std::shared_ptr<File> open_for_writing(const std::string& path, bool create);
  // An open, new file that will be called `path`, and is called `temporary` now.
  static std::shared_ptr<File> adopt_for_writing(Descriptor file, std::string path, std::string temporary);

  const std::string& path() const { return path_; }
  uint64_t size_bytes() const { return size_bytes_; }  // when it was opened
  int buffered() const { return buffered_.get(); }

  // The O_DIRECT descriptor, opened at the first call, or -1 if there is none. It stays open as
  // long as the file does, even if a request is refused later.
  int direct();
  // Remembers, for this file and for others on its file system, that direct I/O was refused at a
  // request.
  void refuse_direct(const std::string& reason);
  // If `direct` returned -1: why; and whether a later call may return a descriptor, because the
  // process had none left.
  Error why_not_direct() const;
  bool may_be_direct_later() const { return direct_fd_.load(std::memory_order_acquire) == kNotOpened; }
  // Multiple of which offsets and lengths of direct requests must be; memory too.
  uint64_t direct_alignment() const { return direct_alignment_; }

  // Whole size now: shorter than at the opening means somebody truncated it.
  uint64_t current_size_bytes() const;

  // All, some or none of the pages of a range in the page cache?
  enum class Residency { kNone, kSome, kAll, kUnknown };
  Residency residency(uint64_t offset, uint64_t length);
  double resident_share(uint64_t offset, uint64_t length);  // 0 to 1; unknown counts as 0

  // Asks the system to bring a range into the page cache, and does not wait for it.
  void will_need(uint64_t offset, uint64_t length) const;

  // Whether as many bytes as the file has, or more, were counted before these.
  bool was_read_before(uint64_t length) {
    return bytes_counted_.fetch_add(length, std::memory_order_relaxed) >= size_bytes_;
  }

  // How many short reads were counted before this one.
  uint32_t count_short_read() { return short_reads_.fetch_add(1, std::memory_order_relaxed); }

  // What a library made of this file's descriptors, by `make` at the first call. It ends before
  // they close, when nobody uses the file any more.
  std::shared_ptr<void> companion(const std::function<std::shared_ptr<void>()>& make);

  // A view of the whole file in memory, made at the first call; null where it cannot be mapped.
  Mapping* mapping();

 private:
  static constexpr int kNotOpened = -2;
  File(std::string path, std::string opened_as, int flags, Descriptor buffered);
  int open_direct();
  struct Pages {
    uint64_t resident = 0;
    uint64_t all = 0;
    bool known = false;
  };
  Pages resident_pages(uint64_t offset, uint64_t length);
  std::string path_, opened_as_;  // the name in messages, and the one that it has
  int flags_ = 0;
  Descriptor buffered_;
  DescriptorShare share_;  // guarded by direct_mutex_
  std::atomic<int> direct_fd_{kNotOpened};  // -1: refused
  mutable std::mutex direct_mutex_;  // guards these two
  Descriptor direct_;
  Error why_not_direct_;
  uint64_t direct_alignment_ = 4096;
  uint64_t size_bytes_ = 0;
  uint64_t file_system_ = 0;  // st_dev
  std::atomic<uint64_t> bytes_counted_{0};
  std::atomic<uint32_t> short_reads_{0};
  std::once_flag mapping_once_;
  std::unique_ptr<Mapping> mapping_;
  std::once_flag companion_once_;
  std::shared_ptr<void> companion_;
};

// Whether the file system refuses O_DIRECT by this answer to an open or a request. No other error
// says that.
bool refuses_direct(int system_errno);

// Why direct I/O was refused, a line a file system; empty where it never was.
std::vector<std::string> direct_refusals();

// `length` bytes from each of `offsets` on into `out`, one behind the other: zeros where the file
// has ended. Where one of them is not in memory, it and all that follow are asked for before it is
// waited for, and leave the page cache again: a page by itself there keeps whoever reads the file
// later from large folios around it. For the same reason nothing is read ahead by `fd` from then
// on. Throws Failure.
void read_each(int fd, const std::string& path, std::span<const int64_t> offsets, size_t length, std::byte* out);

int64_t process_id();

// Durability: each throws Failure. A new name lives in its folder, which needs a sync of its own:
// without it a crash may bring the old file back. `replace` renames and does that, so that after a
// crash the path names the old file or the new one, whole.
void set_size(const File& file, uint64_t length_bytes);
void preallocate(const File& file, uint64_t length_bytes);
void sync_file(const File& file);
void sync_folder_of(const std::string& path);
void replace(const std::string& temporary, const std::string& path);
// Closes a file whose last name is gone, on a thread of its own if it is large: freeing its blocks
// takes long.
void free_in_background(Descriptor last);

}  // namespace gdsdata
