// Files: a buffered descriptor and, if the file system allows it, one with O_DIRECT; alignment;
// refused operations; durable changes.
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
#include "base/page_residency.h"
#include "base/remote_object.h"
#include "base/trial.h"

namespace gdsdata {

class CachedObject;

// A file as its index saw it. If it differs when it is opened, it was replaced or changed since.
struct FileIdentity {
  static constexpr int64_t kAnyTime = -1;  // for memory that this process fills itself
  uint64_t size_bytes = 0;
  int64_t mtime_ns = 0;
};

// An open file. Thread-safe: workers share it.
//
// If its path is a URL, its bytes are on a server, and perhaps in the local cache. Without a cache,
// it has no descriptor.
class alignas(64) File : public std::enable_shared_from_this<File> {
 public:
  ~File() { note_woken(); }
  // Each throws Failure. Returns null if it gives up (see WhenTaken).
  static std::shared_ptr<File> open_for_reading(const std::string& path, std::optional<FileIdentity> expected = {},
                                                WhenTaken when_taken = WhenTaken::kWait);
  static std::shared_ptr<File> open_for_writing(const std::string& path, bool create);
  // The file of an open descriptor, which need not have a name; `path` is for messages. The
  // descriptor must stay open meanwhile. Throws Failure.
  static std::shared_ptr<File> open_again_for_writing(int descriptor, const std::string& path);
  // An open, new file that is called `temporary` now and will be called `path`.
  static std::shared_ptr<File> adopt_for_writing(Descriptor file, std::string path, std::string temporary);

  const std::string& path() const { return path_; }
  uint64_t size_bytes() const { return size_bytes_; }  // at the time of opening
  // The object on a server; null if the file is one of this machine.
  const std::shared_ptr<RemoteObject>& remote() const { return remote_; }
  // Its blocks in the local cache, which are in the file of the descriptors. Null if it has none.
  const std::shared_ptr<CachedObject>& cached() const { return cached_; }
  // Whether the bytes of a range are on this machine. Once they are, they stay.
  bool holds(uint64_t offset, uint64_t length) const { return remote_ == nullptr || caches(offset, length); }
  // -1 if the file rests and cannot be opened again.
  int buffered() const {
    const int fd = buffered_fd_.load(std::memory_order_acquire);
    return fd != kResting ? fd : const_cast<File*>(this)->wake();
  }

  // A file rests if it has a mapping but no descriptor. The mapping serves what is in the page
  // cache, and a process may have far more mappings than descriptors. Whatever needs a descriptor
  // opens it again.
  //
  // The descriptors close once the result is destroyed: threads that have a pin may still use them,
  // and those who hold the file since they had one. Returns null, and changes nothing, if the
  // mapping is not known to be in the page cache.
  std::shared_ptr<void> rest() noexcept;
  bool rests() const { return buffered_fd_.load(std::memory_order_acquire) == kResting; }
  // How many files were opened again after they rested, and are not taken note of yet.
  static size_t woken() { return woken_files_.load(std::memory_order_relaxed); }
  // Takes note of this file. Returns true if it is one of them.
  bool note_woken() noexcept;

  // Short reads map it from the first on, so that it can rest soon.
  void map_at_once() { had_short_read_.store(true, std::memory_order_relaxed); }

  // The O_DIRECT descriptor, opened at the first call, or -1 if there is none. It stays open as
  // long as the file, even if a later request is refused.
  int direct();
  // Remembers that a direct request was refused, for all files of this file system.
  void refuse_direct(const std::string& reason);
  // The reason if `direct` returned -1. A later call may succeed if no descriptor was left.
  Error why_not_direct() const;
  bool may_be_direct_later() const { return direct_fd_.load(std::memory_order_acquire) == kNotOpened; }
  // Offsets, lengths and memory of direct requests must be multiples of this.
  uint64_t direct_alignment() const { return direct_alignment_; }

  // The size now. If it is less than `size_bytes`, the file was truncated.
  uint64_t current_size_bytes() const { return current_identity().size_bytes; }
  // Returns true if its size or time of modification is not that at the time of opening.
  bool has_changed() const;

  // Which of a range's pages are in the page cache. If Linux hides them (page_residency.h), the
  // first stands for all others that it says "all" or "none" of.
  enum class Residency { kNone, kSome, kAll, kUnknown };
  Residency residency(uint64_t offset, uint64_t length);
  double resident_share(uint64_t offset, uint64_t length);  // 0 to 1; 0 if unknown
  PagesSeenBy pages_seen_by();
  bool hides_pages() { return pages_seen_by() >= PagesSeenBy::kReading; }
  // Whether to read short ranges of such a file from the page cache.
  Trial& hidden_trial() { return hidden_trial_; }

  // Asks the system to read a range into the page cache, without waiting for it.
  void will_need(uint64_t offset, uint64_t length) const;

  // Counts `length` bytes. Returns true if the bytes counted before were at least the file's size.
  bool was_read_before(uint64_t length) {
    return bytes_counted_.load(std::memory_order_relaxed) >= size_bytes_ ||
           bytes_counted_.fetch_add(length, std::memory_order_relaxed) >= size_bytes_;
  }

  // Notes a short read. Returns true if there was one before.
  bool had_short_read() {
    return had_short_read_.load(std::memory_order_relaxed) || had_short_read_.exchange(true, std::memory_order_relaxed);
  }

  // An object that a library made from `fd`, a descriptor of this file, created by `make` at the
  // first call. It is destroyed before the descriptors close: a file that has one does not rest.
  // Null if the file has begun to rest, and `fd` closes. Then ask with another descriptor.
  std::shared_ptr<void> companion(int fd, const std::function<std::shared_ptr<void>()>& make);

  // The whole file, mapped into memory at the first call. Null if it cannot be mapped.
  Mapping* mapping() {
    Mapping* made = made_mapping_.load(std::memory_order_acquire);
    return made != nullptr ? made : make_mapping();
  }

 private:
  static constexpr int kNotOpened = -2, kResting = -3;
  // They are closed together.
  struct Descriptors {
    Descriptor buffered, direct;
    DescriptorShare share;
  };
  File(std::string path, std::string opened_as, int flags, Descriptor buffered);
  explicit File(std::shared_ptr<RemoteObject> remote);
  static std::shared_ptr<File> open_remote(const std::string& path, const FileIdentity& identity, WhenTaken when_taken);
  bool caches(uint64_t offset, uint64_t length) const;
  FileIdentity current_identity() const;
  int wake() noexcept;
  int open_direct();  // kResting if the file has begun to rest
  Mapping* make_mapping();
  std::optional<uint64_t> count_resident_pages(uint64_t offset, uint64_t length, const Mapping* view);
  std::optional<uint64_t> resident_pages(uint64_t offset, uint64_t length);  // nothing if unknown
  Residency hidden_residency(uint64_t offset, uint64_t pages);

  // A copy from the page cache needs these only: one cache line, which is written once or rarely.
  uint64_t size_bytes_ = 0;
  std::atomic<Mapping*> made_mapping_{nullptr};
  std::atomic<uint64_t> bytes_counted_{0};  // no more once they are the file's size
  std::atomic<bool> had_short_read_{false};
  static constexpr int kNotAsked = -1;
  std::atomic<int> pages_seen_by_{kNotAsked};
  inline static std::atomic<size_t> woken_files_{0};
  std::atomic<bool> woken_{false};
  std::atomic<int> buffered_fd_{-1};
  std::atomic<int> direct_fd_{kNotOpened};  // -1: refused
  std::shared_ptr<RemoteObject> remote_;
  std::shared_ptr<CachedObject> cached_;

  std::string path_, opened_as_;  // the name in messages, and the current one
  int flags_ = 0;
  mutable std::mutex descriptors_mutex_;  // guards the next three
  Error why_not_direct_;
  std::unique_ptr<Descriptors> descriptors_;  // null: the file rests
  std::shared_ptr<void> companion_;           // behind the descriptors, which outlive it
  uint64_t direct_alignment_ = 4096;
  uint64_t file_system_ = 0;  // st_dev
  uint64_t inode_ = 0;
  int64_t mtime_ns_ = 0;  // at the time of opening
  Trial hidden_trial_;
  std::once_flag mapping_once_;
  std::unique_ptr<Mapping> mapping_;
};

// Returns true if this errno of an open or a request means that the file system refuses O_DIRECT.
bool refuses_direct(int system_errno);

// The reasons why direct I/O was refused, one line for each file system.
std::vector<std::string> direct_refusals();

// Reads `length` bytes at each of `offsets` into `out`, one after the other, with zeros beyond the
// end of the file. Throws Failure.
//
// If a range is not in memory, this one and all later ones are requested before the first is waited
// for. Pages that were not in memory are evicted afterwards, because a single page in the page
// cache prevents large folios around it for later readers. For the same reason, `fd` gets no
// read-ahead from then on.
void read_each(int fd, const std::string& path, std::span<const int64_t> offsets, size_t length, std::byte* out);

int64_t process_id();

}  // namespace gdsdata
