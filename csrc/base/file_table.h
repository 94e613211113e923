// The files that a group's transfers name by index.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/descriptors.h"
#include "base/file.h"

namespace gdsdata {

// The files of one data set, opened when first read. They stay open while they are in use, and as
// long as all files together have no more than most_cached_descriptors(): so a data set may have
// more files than a process may have descriptors. Thread-safe.
class FileTable final : private FileCache {
 public:
  // `opened`: for each path the file that its caller keeps open, or null. Empty: none.
  FileTable(std::vector<std::string> paths, std::vector<FileIdentity> identities,
            std::vector<std::shared_ptr<File>> opened = {});
  explicit FileTable(std::shared_ptr<File> file);  // just this one, at index 0
  ~FileTable();
  FileTable(const FileTable&) = delete;
  FileTable& operator=(const FileTable&) = delete;

  // Throws Failure if the file cannot be opened or is not the one that was indexed. While as many
  // files as may be cached are in use, kGiveUp returns null, and kWait opens one more; if the
  // process has no descriptor for it, kWait waits for others to close one.
  std::shared_ptr<File> get(uint32_t index, WhenTaken when_taken = WhenTaken::kWait);
  const std::string& path(uint32_t index) const { return paths_[index]; }
  size_t size() const { return paths_.size(); }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Opened {
    std::shared_ptr<File> file;  // null: a spare place
    uint32_t index = 0;
    uint32_t newer = kNone, older = kNone;  // places: the next ones by recency
  };
  void take_idle(size_t most, std::vector<std::shared_ptr<void>>& idle) override;
  bool has_used_files() override;
  // With the lock.
  std::shared_ptr<File> find(uint32_t index);
  void add(uint32_t index, std::shared_ptr<File> file);
  std::shared_ptr<File> remove(uint32_t place);
  void link_newest(uint32_t place);
  void unlink(uint32_t place);
  // A file outside of this table is in use: new users get their share of it here, under the lock.
  static bool is_idle(const Opened& opened) { return opened.file.use_count() == 1; }

  std::vector<std::string> paths_;
  std::vector<FileIdentity> identities_;      // empty, or one a path
  std::vector<std::shared_ptr<File>> given_;  // empty, or one a path; null: `opened_` has it, or will
  // Guards what follows; held over no system call. What precedes it is read by all without a lock,
  // so it lies in other cache lines.
  alignas(64) std::mutex mutex_;
  std::vector<uint32_t> places_;  // of each path in `opened_`; kNone: it is not open
  std::vector<Opened> opened_;
  std::vector<uint32_t> spare_;  // places
  uint32_t newest_ = kNone, oldest_ = kNone;
};

}  // namespace gdsdata
