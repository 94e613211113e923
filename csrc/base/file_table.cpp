#include "base/file_table.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

namespace gdsdata {

FileTable::FileTable(std::vector<std::string> paths, std::vector<FileIdentity> identities,
                     std::vector<std::shared_ptr<File>> opened)
    : paths_(std::move(paths)), identities_(std::move(identities)), given_(std::move(opened)) {
  const auto fits = [this](size_t count) { return count == 0 || count == paths_.size(); };
  if (!fits(identities_.size()) || !fits(given_.size())) {
    throw Failure({ErrorCode::kInvalidArgument, "a file table needs one identity and one file for each path, or none"});
  }
  join();
}

// Does not join the caches: this file may have lost its name, so it could not be opened again.
FileTable::FileTable(std::shared_ptr<File> file) : paths_{file->path()} {
  recency_.push_front(0);
  opened_[0] = {std::move(file), recency_.begin()};
}

FileTable::~FileTable() {
  leave();
  count(-static_cast<ssize_t>(opened_.size()));
}

std::shared_ptr<File> FileTable::get(uint32_t index, WhenTaken when_taken) {
  if (!given_.empty() && given_[index] != nullptr) return given_[index];
  {
    std::lock_guard lock(mutex_);
    if (auto found = find(index)) return found;
  }
  if (!make_room() && when_taken == WhenTaken::kGiveUp) return nullptr;
  std::optional<FileIdentity> expected;
  if (!identities_.empty()) expected = identities_[index];
  auto file = File::open_for_reading(paths_[index], expected, when_taken);
  if (file == nullptr) return nullptr;
  {
    std::lock_guard lock(mutex_);
    if (auto found = find(index)) return found;  // another thread was faster: ours closes behind the lock
    recency_.push_front(index);
    opened_[index] = {file, recency_.begin()};
  }
  count(1);
  return file;
}

std::shared_ptr<File> FileTable::find(uint32_t index) {
  const auto found = opened_.find(index);
  if (found == opened_.end()) return nullptr;
  recency_.splice(recency_.begin(), recency_, found->second.recency);
  return found->second.file;
}

void FileTable::take_idle(size_t most, std::vector<std::shared_ptr<void>>& idle) {
  const size_t before = idle.size();
  {
    std::lock_guard lock(mutex_);
    for (auto at = recency_.end(); at != recency_.begin() && idle.size() - before < most;) {
      const auto opened = opened_.find(*--at);
      if (!is_idle(opened->second)) continue;
      idle.push_back(std::move(opened->second.file));
      opened_.erase(opened);
      at = recency_.erase(at);
    }
  }
  count(-static_cast<ssize_t>(idle.size() - before));
}

bool FileTable::has_used_files() {
  std::lock_guard lock(mutex_);
  return std::any_of(opened_.begin(), opened_.end(), [](const auto& entry) { return !is_idle(entry.second); });
}

}  // namespace gdsdata
