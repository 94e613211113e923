#include "base/file_table.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace gdsdata {

FileTable::FileTable(PathList paths, std::vector<FileIdentity> identities, std::vector<std::shared_ptr<File>> opened)
    : paths_(std::move(paths)), identities_(std::move(identities)), given_(std::move(opened)) {
  const auto fits = [this](size_t count) { return count == 0 || count == paths_.size(); };
  if (!fits(identities_.size()) || !fits(given_.size())) {
    throw Failure({ErrorCode::kInvalidArgument, "a file table needs one identity and one file for each path, or none"});
  }
  places_.resize(paths_.size(), kNone);
  join();
}

// Does not join the caches: the file may have lost its name, and then it cannot be opened again.
FileTable::FileTable(std::shared_ptr<File> file) : paths_(std::vector{file->path()}), places_{kNone} {
  add(0, std::move(file));
}

FileTable::~FileTable() { leave(); }

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
    if (auto found = find(index)) return found;  // another thread was faster; `file` closes after the lock is released
    add(index, file);
  }
  return file;
}

std::shared_ptr<File> FileTable::find(uint32_t index) {
  const uint32_t place = places_[index];
  if (place == kNone) return nullptr;
  if (place != newest_) {
    unlink(place);
    link_newest(place);
  }
  return opened_[place].file;
}

void FileTable::add(uint32_t index, std::shared_ptr<File> file) {
  if (spare_.empty()) {
    spare_.reserve(opened_.size() + 1);  // `remove` then allocates nothing
    opened_.emplace_back();
    spare_.push_back(static_cast<uint32_t>(opened_.size() - 1));
  }
  const uint32_t place = spare_.back();
  spare_.pop_back();
  opened_[place].file = std::move(file);
  opened_[place].index = index;
  places_[index] = place;
  link_newest(place);
  ++open_files_;
}

std::shared_ptr<File> FileTable::remove(uint32_t place) {
  unlink(place);
  spare_.push_back(place);
  places_[opened_[place].index] = kNone;
  --open_files_;
  return std::move(opened_[place].file);
}

void FileTable::link_newest(uint32_t place) {
  opened_[place].newer = kNone;
  opened_[place].older = newest_;
  (newest_ == kNone ? oldest_ : opened_[newest_].newer) = place;
  newest_ = place;
}

void FileTable::unlink(uint32_t place) {
  const auto [newer, older] = std::pair(opened_[place].newer, opened_[place].older);
  (newer == kNone ? newest_ : opened_[newer].older) = older;
  (older == kNone ? oldest_ : opened_[older].newer) = newer;
}

void FileTable::take_idle(size_t most, std::vector<std::shared_ptr<void>>& idle) {
  std::lock_guard lock(mutex_);
  size_t taken = 0;
  for (uint32_t place = oldest_; place != kNone && taken < most;) {
    const uint32_t newer = opened_[place].newer;
    if (is_idle(opened_[place])) {
      idle.push_back(remove(place));
      ++taken;
    }
    place = newer;
  }
}

bool FileTable::has_used_files() {
  std::lock_guard lock(mutex_);
  return std::any_of(opened_.begin(), opened_.end(),
                     [](const Opened& opened) { return opened.file != nullptr && !is_idle(opened); });
}

}  // namespace gdsdata
