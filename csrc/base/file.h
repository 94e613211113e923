// Files as the engine needs them: one buffered and, where the file system allows it, one O_DIRECT
// descriptor; alignment; what was refused; making changes durable.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "base/mapping.h"

namespace gdsdata {

// A descriptor that closes itself.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Descriptor& operator=(Descriptor&& other) noexcept;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { reset(); }
  int get() const { return fd_; }
  void reset();

 private:
  int fd_ = -1;
};

// What an index saw of a file; a file that differs when it is opened was replaced or changed since.
struct FileIdentity {
  static constexpr int64_t kAnyTime = -1;  // of memory that this process itself fills
  uint64_t size_bytes = 0;
  int64_t mtime_ns = 0;
};

// An open file. Thread-safe: workers share it.
class File {
 public:
  // Throw Failure. `expected` is checked when given.
  static std::shared_ptr<File> open_for_reading(const std::string& path, std::optional<FileIdentity> expected = {});
  static std::shared_ptr<File> open_for_writing(const std::string& path, bool create);
  // An open, new file that will be called `path`, and is called `temporary` now.
  static std::shared_ptr<File> adopt_for_writing(Descriptor file, std::string path, std::string temporary);

  const std::string& path() const { return path_; }
  uint64_t size_bytes() const { return size_bytes_; }  // when it was opened
  int buffered() const { return buffered_.get(); }

  // The O_DIRECT descriptor, opened at the first call, or -1 where direct I/O is refused.
  int direct();
  // Remembers, for this file and for others on its file system, that direct I/O was refused at a request.
  void refuse_direct(const std::string& reason);
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

  // What a library made of this file's descriptors, by `make` at the first call. It ends before they close, when nobody
  // uses the file any more.
  std::shared_ptr<void> companion(const std::function<std::shared_ptr<void>()>& make);

  // A view of the whole file in memory, made at the first call; null where it cannot be mapped.
  Mapping* mapping();

 private:
  File(std::string path, std::string opened_as, int flags, Descriptor descriptor);
  struct Pages {
    uint64_t resident = 0;
    uint64_t all = 0;
    bool known = false;
  };
  Pages resident_pages(uint64_t offset, uint64_t length);
  std::string path_, opened_as_;  // the name in messages, and the one that it has
  int flags_ = 0;
  Descriptor buffered_;
  Descriptor direct_;
  std::once_flag direct_once_;
  std::atomic<bool> direct_refused_{false};
  uint64_t direct_alignment_ = 4096;
  uint64_t size_bytes_ = 0;
  uint64_t file_system_ = 0;  // st_dev
  std::atomic<uint64_t> bytes_counted_{0};
  std::once_flag mapping_once_;
  std::unique_ptr<Mapping> mapping_;
  std::once_flag companion_once_;
  std::shared_ptr<void> companion_;
};

// Why direct I/O was refused, a line a file system; empty where it never was.
std::vector<std::string> direct_refusals();

// `length` bytes from each of `offsets` on into `out`, one behind the other: zeros where the file has ended. Where one
// of them is not in memory, it and all that follow are asked for before it is waited for, and leave the page cache
// again: a page by itself there keeps whoever reads the file later from large folios around it. For the same reason
// nothing is read ahead by `fd` from then on. Throws Failure.
void read_each(int fd, const std::string& path, std::span<const int64_t> offsets, size_t length, std::byte* out);

int64_t process_id();

// The files of one data set, opened when first read and closed least recently used first, so that a data
// set may have more files than a process may have descriptors. Thread-safe.
class FileTable {
 public:
  // `opened`: for each path the file that its caller keeps open, or null. Empty: none.
  FileTable(std::vector<std::string> paths, std::vector<FileIdentity> identities,
            std::vector<std::shared_ptr<File>> opened = {});
  explicit FileTable(std::shared_ptr<File> file);  // just this one, at index 0

  // Throws Failure where the file cannot be opened or is not the one that was indexed.
  std::shared_ptr<File> get(uint32_t index);
  const std::string& path(uint32_t index) const { return paths_[index]; }
  size_t size() const { return paths_.size(); }

 private:
  struct Opened {
    std::shared_ptr<File> file;
    std::list<uint32_t>::iterator recency;
  };
  std::vector<std::string> paths_;
  std::vector<FileIdentity> identities_;      // empty, or one a path
  std::vector<std::shared_ptr<File>> given_;  // empty, or one a path; null: `opened_` has it, or will
  size_t capacity_;
  std::mutex mutex_;
  std::list<uint32_t> recency_;  // most recent first
  std::unordered_map<uint32_t, Opened> opened_;
};

// Durability: each throws Failure. A new name lives in its folder, which needs a sync of its own: without it
// a crash may bring the old file back. `replace` renames and does that, so that after a crash the path names
// the old file or the new one, whole.
void set_size(const File& file, uint64_t length_bytes);
void preallocate(const File& file, uint64_t length_bytes);
void sync_file(const File& file);
void sync_folder_of(const std::string& path);
void replace(const std::string& temporary, const std::string& path);
// Closes a file whose last name is gone, on a thread of its own if it is large: freeing its blocks takes long.
void free_in_background(Descriptor last);

}  // namespace gdsdata
