// The files to which a group's transfers refer by index.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/descriptors.h"
#include "base/file.h"
#include "base/path_list.h"
#include "tuning.h"

namespace gdsdata {

// The files of one data set, opened when they are first read. A file stays open while it is in use.
// An unused one stays open while all files together have at most most_cached_descriptors(). Then it
// rests (File::rest) if its mapping is in the page cache, or closes. So a data set may have more
// files than the process may open. Thread-safe.
//
// Many threads look up many files, nearly one for each record. So `find` takes no lock, and writes
// no memory that other threads read. It needs a pin (epochs.h) for as long as the file is read.
// Files that are held longer come from `get`.
class FileTable final : private FileCache {
 public:
  // `opened`: for each path, the file that the caller keeps open, or null. Empty means none.
  FileTable(PathList paths, std::vector<FileIdentity> identities, std::vector<std::shared_ptr<File>> opened = {});
  FileTable(const std::vector<std::string>& paths, std::vector<FileIdentity> identities,
            std::vector<std::shared_ptr<File>> opened = {})
      : FileTable(PathList(paths), std::move(identities), std::move(opened)) {}
  explicit FileTable(std::shared_ptr<File> file);  // only this file, at index 0
  ~FileTable();
  FileTable(const FileTable&) = delete;
  FileTable& operator=(const FileTable&) = delete;

  // Returns a file that is kept open, or one that closes when the caller drops it. It closes if
  // there are more files than may be open or mapped, and the caller reads most of this one. To keep
  // it, the table would have to close another, which is as likely to be read next.
  // `wanted_bytes`: how much of it the caller reads now; 0 if that is not known.
  //
  // Throws Failure if the file cannot be opened or is not the one that was indexed. If all cached
  // files are in use, kGiveUp returns null and kWait opens one more. If the process has no
  // descriptor for that one, kWait waits until others close one.
  std::shared_ptr<File> get(uint32_t index, WhenTaken when_taken = WhenTaken::kWait, uint64_t wanted_bytes = 0);

  Pin pin(PinSlot& slot) const { return Pin(slot, evicted()); }
  // Returns null if the file is not open. It stays open at least until the pin ends, and can be
  // held longer by its shared_from_this().
  File* find(uint32_t index, const Pin&) const { return files_[index].load(); }
  // Returns true if the file is open. It will then be evicted later than files that nobody touches.
  bool touch(uint32_t index) {
    const File* file = files_[index].load(std::memory_order_relaxed);
    if (file == nullptr) return false;
    __builtin_prefetch(file);  // does not fault if it was closed meanwhile
    mark_used(index);
    return true;
  }

  // Evicts files that were changed in place since they were opened. The next `get` compares them
  // with the index again. A call looks at no more than kCheckedAtOnce open files, and at none after
  // `most` has passed. The next call continues behind them.
  void evict_changed(std::chrono::nanoseconds most = tuning::kCheckedFor);
  // True if it found some.
  bool had_changed_files() const { return had_changed_files_.load(std::memory_order_relaxed); }

  std::string path(uint32_t index) const { return paths_[index]; }
  size_t size() const { return paths_.size(); }
  // True if a path is a URL.
  bool has_remote() const { return has_remote_; }
  // True if some of several files would have to be opened.
  bool has_closed_files() const { return given_.empty() && size() > 1 && open_files_ < size(); }

 private:
  struct Opened {
    std::shared_ptr<File> file;
    uint32_t index = 0;
    // Users of a file hold a reference. New ones come from this table, under the lock or by a
    // pin.
    bool is_idle() const { return file.use_count() == 1; }
  };
  Limbo::Object evict() noexcept override;
  Limbo::Object evict_opened() noexcept;
  std::vector<Opened> files_to_check();
  Limbo::Object take_last(std::vector<Opened>& changed);
  std::shared_ptr<void> rest(const Opened& opened) noexcept;
  bool find_awake() noexcept;
  bool has_used_files() override;
  void mark_used(uint32_t index) {
    // Written only once, so that its line stays in the caches of all processors.
    if (!used_[index].load(std::memory_order_relaxed)) used_[index].store(true, std::memory_order_relaxed);
  }
  // The caller holds the lock.
  bool take_used(uint32_t index);
  std::shared_ptr<File> find_opened(uint32_t index);
  void add(uint32_t index, std::shared_ptr<File> file);
  std::shared_ptr<File> take(Opened& opened) noexcept;

  PathList paths_;
  std::vector<FileIdentity> identities_;      // empty, or one for each path
  std::vector<std::shared_ptr<File>> given_;  // empty, or one for each path; null: opened by `get`
  bool has_remote_ = false;
  // For each path, its file while that is open, and whether it was used since the hand passed.
  std::unique_ptr<std::atomic<File*>[]> files_;
  std::unique_ptr<std::atomic<bool>[]> used_;
  std::atomic<size_t> next_checked_{0};
  std::atomic<bool> had_changed_files_{false};
  // Guards the members that follow. No system call is made under it. Threads read the members above
  // without a lock, so the mutex has a cache line of its own.
  alignas(64) std::mutex mutex_;
  // The ring of the CLOCK algorithm (F. J. Corbato, 1968): the hand evicts the first idle file that
  // was not used again since it was opened, or since the hand passed.
  std::vector<Opened> opened_;
  size_t hand_ = 0;
  // Files that rest, and some that were opened again since. Both vectors have capacity for all
  // files of both.
  std::vector<Opened> resting_;
  std::atomic<size_t> open_files_{0};  // in both; read without the lock
};

}  // namespace gdsdata
