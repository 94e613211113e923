// The files to which a group's transfers refer by index.
#pragma once

#include <atomic>
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

namespace gdsdata {

// The files of one data set, opened when they are first read. A file stays open while it is in use.
// An unused one stays open while all files together have at most most_cached_descriptors(), so a
// data set may have more files than the process may open. Thread-safe.
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

  // Throws Failure if the file cannot be opened or is not the one that was indexed. If all cached
  // files are in use, kGiveUp returns null and kWait opens one more. If the process has no
  // descriptor for that one, kWait waits until others close one.
  std::shared_ptr<File> get(uint32_t index, WhenTaken when_taken = WhenTaken::kWait);
  std::string path(uint32_t index) const { return paths_[index]; }
  size_t size() const { return paths_.size(); }
  // True if some of several files would have to be opened.
  bool has_closed_files() const { return given_.empty() && size() > 1 && open_files_ < size(); }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Opened {
    std::shared_ptr<File> file;  // null: an unused place
    uint32_t index = 0;
    uint32_t newer = kNone, older = kNone;  // the neighboring places by recency
  };
  void take_idle(size_t most, std::vector<std::shared_ptr<void>>& idle) override;
  bool has_used_files() override;
  // The caller holds the lock.
  std::shared_ptr<File> find(uint32_t index);
  void add(uint32_t index, std::shared_ptr<File> file);
  std::shared_ptr<File> remove(uint32_t place);
  void link_newest(uint32_t place);
  void unlink(uint32_t place);
  // If a file is referenced outside of this table, it is in use. New users get their reference from
  // this table, under the lock.
  static bool is_idle(const Opened& opened) { return opened.file.use_count() == 1; }

  PathList paths_;
  std::vector<FileIdentity> identities_;      // empty, or one for each path
  std::vector<std::shared_ptr<File>> given_;  // empty, or one for each path; null: opened by `get`
  // Guards the members that follow. No system call is made under it. Threads read the members above
  // without a lock, so the mutex has a cache line of its own.
  alignas(64) std::mutex mutex_;
  std::vector<uint32_t> places_;  // of each path, its place in `opened_`; kNone if not open
  std::vector<Opened> opened_;
  std::vector<uint32_t> spare_;  // unused places
  uint32_t newest_ = kNone, oldest_ = kNone;
  std::atomic<size_t> open_files_{0};  // in `opened_`; read without the lock
};

}  // namespace gdsdata
