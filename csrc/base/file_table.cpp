#include "base/file_table.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/block_cache.h"
#include "tuning.h"

namespace gdsdata {

FileTable::FileTable(PathList paths, std::vector<FileIdentity> identities, std::vector<std::shared_ptr<File>> opened)
    : paths_(std::move(paths)),
      identities_(std::move(identities)),
      given_(std::move(opened)),
      files_(std::make_unique<std::atomic<File*>[]>(paths_.size())),
      used_(std::make_unique<std::atomic<bool>[]>(paths_.size())) {
  const auto fits = [this](size_t count) { return count == 0 || count == paths_.size(); };
  if (!fits(identities_.size()) || !fits(given_.size())) {
    throw Failure({ErrorCode::kInvalidArgument, "a file table needs one identity and one file for each path, or none"});
  }
  for (size_t i = 0; i < given_.size(); ++i) files_[i] = given_[i].get();
  for (size_t i = 0; i < paths_.size() && !has_remote_; ++i) has_remote_ = is_url(paths_.view(i));
  // A cached object has one, and its file another. An object that is not cached has none.
  const size_t of_each = !has_remote_ ? 1 : active_cache() != nullptr ? 2 : 0;
  expect_descriptors(std::min(of_each * paths_.size(), most_cached_descriptors()));
  join();
}

// Does not join the caches: the file may have lost its name, and then it cannot be opened again.
FileTable::FileTable(std::shared_ptr<File> file)
    : paths_(std::vector{file->path()}),
      files_(std::make_unique<std::atomic<File*>[]>(1)),
      used_(std::make_unique<std::atomic<bool>[]>(1)) {
  add(0, std::move(file));
}

FileTable::~FileTable() { leave(); }

std::shared_ptr<File> FileTable::get(uint32_t index, WhenTaken when_taken, uint64_t wanted_bytes) {
  if (!given_.empty() && given_[index] != nullptr) return given_[index];
  size_t opened = 0;
  {
    std::lock_guard lock(mutex_);
    if (auto found = find_opened(index)) return found;
    opened = opened_.size();
  }
  const size_t most = most_cached_descriptors();
  const bool may_map = Mapping::count() <= Mapping::most();
  const bool has_enough = !may_map && !has_remote_ && paths_.size() > most && opened >= most / tuning::kOpenPart;
  const bool is_kept =
      !has_enough || identities_.empty() || wanted_bytes < identities_[index].size_bytes / tuning::kWholePart;
  if (!make_room(most) && when_taken == WhenTaken::kGiveUp) return nullptr;
  std::optional<FileIdentity> expected;
  if (!identities_.empty()) expected = identities_[index];
  auto file = File::open_for_reading(paths_[index], expected, when_taken);
  if (file == nullptr) return nullptr;
  if (!is_kept) return file;
  // Beyond so many mappings it would not rest, but be unmapped when it is closed.
  if (paths_.size() > most / 2 && may_map) file->map_at_once();
  {
    std::lock_guard lock(mutex_);
    if (auto found = find_opened(index)) return found;  // another thread was faster; `file` closes after the lock
    add(index, file);
  }
  return file;
}

std::shared_ptr<File> FileTable::find_opened(uint32_t index) {
  File* file = files_[index].load(std::memory_order_relaxed);
  if (file == nullptr) return nullptr;
  mark_used(index);
  return file->shared_from_this();
}

void FileTable::add(uint32_t index, std::shared_ptr<File> file) {
  File* found = file.get();
  for (auto* files : {&opened_, &resting_}) {  // `evict` allocates nothing
    const size_t count = opened_.size() + resting_.size() + 1;
    if (files->capacity() < count) files->reserve(2 * count);
  }
  opened_.push_back({std::move(file), index});
  files_[index] = found;
  ++open_files_;
}

Limbo::Object FileTable::evict() noexcept {
  std::lock_guard lock(mutex_);
  Limbo::Object evicted = evict_opened();
  return evicted.object == nullptr && find_awake() ? evict_opened() : evicted;
}

Limbo::Object FileTable::evict_opened() noexcept {
  const size_t count = opened_.size();
  for (size_t step = 0; step < 2 * count; ++step, ++hand_) {
    if (hand_ >= count) hand_ = 0;
    Opened& opened = opened_[hand_];
    if (take_used(opened.index) && step < count) continue;  // in the second round, any idle file will do
    if (!opened.is_idle()) continue;
    Limbo::Object evicted{rest(opened)};
    if (evicted.object != nullptr) {
      evicted.whole = opened.file;
      resting_.push_back(std::move(opened));
    } else {
      evicted.object = take(opened);
    }
    opened = std::move(opened_.back());  // a newer file, which the hand then reaches last
    opened_.pop_back();
    ++hand_;
    return evicted;
  }
  return {};
}

std::shared_ptr<File> FileTable::take(Opened& opened) noexcept {
  files_[opened.index] = nullptr;
  --open_files_;
  return std::move(opened.file);
}

void FileTable::evict_changed(std::chrono::nanoseconds most) {
  const auto until = std::chrono::steady_clock::now() + most;
  std::vector<Opened> changed;
  for (Opened& opened : files_to_check()) {
    next_checked_ = opened.index + size_t{1};
    if (opened.file->has_changed()) changed.push_back(std::move(opened));
    if (std::chrono::steady_clock::now() > until) break;
  }
  if (changed.empty()) return;
  had_changed_files_ = true;
  evict_each([&] { return take_last(changed); });
}

// Neither the lock nor the pin may be held while the system is asked about the files.
std::vector<FileTable::Opened> FileTable::files_to_check() {
  std::vector<Opened> found;
  const size_t most = std::min<size_t>(open_files_, tuning::kCheckedAtOnce);
  found.reserve(most);
  PinSlot slot;
  const Pin pin = this->pin(slot);
  size_t next = next_checked_;
  for (size_t seen = 0; seen < size() && found.size() < most; ++seen, ++next) {
    if (next >= size()) next = 0;
    const auto index = static_cast<uint32_t>(next);
    const bool is_given = !given_.empty() && given_[index] != nullptr;
    if (File* file = find(index, pin); file != nullptr && !is_given) found.push_back({file->shared_from_this(), index});
  }
  return found;
}

// Takes the last of `changed` that is still there out of the table.
Limbo::Object FileTable::take_last(std::vector<Opened>& changed) {
  std::lock_guard lock(mutex_);
  for (; !changed.empty(); changed.pop_back()) {
    for (auto* files : {&opened_, &resting_}) {
      const auto is_it = [&](const Opened& opened) { return opened.file == changed.back().file; };
      const auto found = std::find_if(files->begin(), files->end(), is_it);
      if (found == files->end()) continue;
      Limbo::Object evicted{take(*found)};
      *found = std::move(files->back());
      files->pop_back();
      changed.pop_back();
      return evicted;
    }
  }
  return {};
}

// Only the files of a data set, which were compared with its index.
std::shared_ptr<void> FileTable::rest(const Opened& opened) noexcept {
  const size_t most = Mapping::most() + Mapping::most() / tuning::kMoreMappingsPart;
  return identities_.empty() || Mapping::count() > most ? nullptr : opened.file->rest();
}

bool FileTable::find_awake() noexcept {
  if (File::woken() == 0) return false;  // there are many to look through
  const size_t before = opened_.size();
  std::erase_if(resting_, [this](Opened& resting) {
    if (!resting.file->note_woken()) return false;
    opened_.push_back(std::move(resting));
    return true;
  });
  return opened_.size() > before;
}

bool FileTable::take_used(uint32_t index) {
  const bool used = used_[index].load(std::memory_order_relaxed);
  if (used) used_[index].store(false, std::memory_order_relaxed);
  return used;
}

bool FileTable::has_used_files() {
  std::lock_guard lock(mutex_);
  const auto is_used = [](const Opened& opened) { return !opened.is_idle(); };
  return std::any_of(opened_.begin(), opened_.end(), is_used) || std::any_of(resting_.begin(), resting_.end(), is_used);
}

}  // namespace gdsdata
