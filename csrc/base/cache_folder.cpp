#include "base/cache_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string_view>
#include <thread>
#include <utility>

#include "base/ascii.h"
#include "base/durable.h"
#include "base/error.h"
#include "base/file_range.h"
#include "tuning.h"

namespace gdsdata {

namespace {

constexpr uint64_t kInUseByte = kFirstLockByte;
constexpr uint64_t kEvictingByte = kFirstLockByte - 1;  // of cache.claims; claims have lower ones
constexpr size_t kNameDigits = 32, kSubfolderDigits = 2;
constexpr std::string_view kData = ".data", kMap = ".map", kAbout = ".json";
constexpr int kSafely = O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
// An object's maker or evictor holds its lock for a few system calls.
constexpr std::chrono::seconds kPatience{2};
constexpr std::chrono::milliseconds kLooksAgain{1};
// A map that takes more of the bound than this part is none of a real object.
constexpr uint64_t kMostOverheadPart = 16;
constexpr size_t kMostAboutBytes = 16 << 10;
constexpr uint64_t kBytesOfBlockCount = 512;  // of st_blocks

std::string file_name(const std::string& name, std::string_view suffix) { return name + std::string(suffix); }

// Returns the object to which a file of a subfolder belongs, or an empty name.
std::string object_of(std::string_view subfolder, std::string_view file) {
  for (const std::string_view suffix : {kData, kMap, kAbout}) {
    if (file.size() == kNameDigits + suffix.size() && file.ends_with(suffix) && file.starts_with(subfolder) &&
        is_hex(file.substr(0, kNameDigits))) {
      return std::string(file.substr(0, kNameDigits));
    }
  }
  return {};
}

int set_file_size(int fd, uint64_t bytes) {
  while (::ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

// Sets the precise time: that of UTIME_NOW advances every few milliseconds.
void note_use(int subfolder, const std::string& name) {
  const std::string file = file_name(name, kMap);
  std::array<timespec, 2> times{};
  ::clock_gettime(CLOCK_REALTIME, &times[1]);
  times[0] = times[1];
  if (::utimensat(subfolder, file.c_str(), times.data(), AT_SYMLINK_NOFOLLOW) != 0) {
    ::utimensat(subfolder, file.c_str(), nullptr, AT_SYMLINK_NOFOLLOW);  // a file of another user
  }
}

int64_t last_use_of(int subfolder, const std::string& name) {
  struct stat status{};
  for (const std::string_view suffix : {kMap, kData}) {
    if (::fstatat(subfolder, file_name(name, suffix).c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) continue;
    return int64_t{status.st_mtim.tv_sec} * 1000000000 + status.st_mtim.tv_nsec;
  }
  return 0;
}

// `.data` is the last: as long as it has its name, nobody creates the object anew.
void remove_files(int subfolder, const std::string& name) {
  for (const std::string_view suffix : {kMap, kAbout, kData}) ::unlinkat(subfolder, file_name(name, suffix).c_str(), 0);
}

int open_now(int folder, const std::string& name, int flags) {
  return open_descriptor([&] { return ::openat(folder, name.c_str(), flags, 0666); }, WhenTaken::kGiveUp);
}

std::string read_about(int subfolder, const std::string& name) {
  const Descriptor file(open_now(subfolder, file_name(name, kAbout), O_RDONLY | kSafely));
  std::string text(kMostAboutBytes, '\0');
  const ssize_t length = ::read(file.get(), text.data(), text.size());
  text.resize(static_cast<size_t>(std::max<ssize_t>(length, 0)));
  return text;
}

void write_about(int subfolder, const std::string& name, const std::string& about) {
  const std::string file = file_name(name, kAbout);
  ::unlinkat(subfolder, file.c_str(), 0);
  const Descriptor made(open_now(subfolder, file, O_WRONLY | O_CREAT | O_EXCL | kSafely));
  (void)!::write(made.get(), about.data(), about.size());  // only people read it
}

// Visits the names in a folder. Returns 0 or errno.
int for_each_name(int folder, const std::function<void(std::string_view)>& visit) {
  const int again = open_now(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> opened(again < 0 ? nullptr : ::fdopendir(again), ::closedir);
  if (!opened) {
    const int error = errno;
    if (again >= 0) ::close(again);
    return error;
  }
  while (const dirent* entry = ::readdir(opened.get())) visit(entry->d_name);
  return 0;
}

// Frees blocks that a killed process allocated and did not mark.
void free_missing(int data, const BlockMap& map, const BlockGeometry& geometry) {
  const size_t count = geometry.count();
  for (size_t block = 0, end = 0; block < count; block = end + 1) {
    for (end = block; end < count && map.entry(end).boot == 0;) ++end;
    if (end > block) free_range(data, geometry.begin(block), std::min(geometry.begin(end), geometry.size_bytes));
  }
}

CacheFolder::Opened failed(int error) {
  CacheFolder::Opened opened;
  opened.error = error;
  return opened;
}

}  // namespace

CacheFolder::CacheFolder(std::string path, Descriptor folder, int claims, unsigned shift, uint32_t boot)
    : path_(std::move(path)),
      folder_(std::move(folder)),
      claims_(claims),
      boot_(boot),
      totals_(folder_.get(), path_, shift) {
  const std::string objects = path_ + "/objects";
  if (::mkdirat(folder_.get(), "objects", 0777) != 0 && errno != EEXIST) {
    throw Failure(system_error("create the folder", objects, errno));
  }
  constexpr int kFlags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
  objects_ = Descriptor(open_descriptor([&] { return ::openat(folder_.get(), "objects", kFlags); }));
  if (objects_.get() < 0) throw Failure(system_error("open the folder", objects, errno));
  if (totals_.is_alone() && totals_.must_recount(boot_)) recount();
  totals_.share();
}

void CacheFolder::set_most_bytes(uint64_t most_bytes) {
  most_bytes_ = most_bytes;
  if (most_bytes == UINT64_MAX) return;
  totals_.note_most_bytes(most_bytes);
  while (totals_.used_bytes() > most_bytes && evict_oldest()) {
  }
}

std::string CacheFolder::data_path(const std::string& name) const {
  return path_ + "/objects/" + name.substr(0, kSubfolderDigits) + "/" + file_name(name, kData);
}

Descriptor CacheFolder::open_subfolder(const std::string& name, bool create) const {
  const std::string subfolder = name.substr(0, kSubfolderDigits);
  constexpr int kFlags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
  const auto open = [&] { return ::openat(objects_.get(), subfolder.c_str(), kFlags); };
  Descriptor found(open_descriptor(open, WhenTaken::kGiveUp));
  if (found.get() >= 0 || errno != ENOENT || !create) return found;
  if (::mkdirat(objects_.get(), subfolder.c_str(), 0777) != 0 && errno != EEXIST) return {};
  return Descriptor(open_descriptor(open, WhenTaken::kGiveUp));
}

CacheFolder::Opened CacheFolder::open_complete(int subfolder, const std::string& name, uint64_t size_bytes) const {
  Opened opened;
  const std::string data = file_name(name, kData);
  opened.data = Descriptor(open_now(subfolder, data, O_RDWR | kSafely));
  struct stat status{};
  if (opened.data.get() < 0 || ::fstat(opened.data.get(), &status) != 0) return failed(errno);
  if (!S_ISREG(status.st_mode)) return failed(EINVAL);
  const Lock lock = lock_description(opened.data.get(), F_RDLCK, kInUseByte);
  if (lock == Lock::kUnsupported) return failed(ENOLCK);
  // Its evictor holds the lock, or had it before and has removed the name.
  if (lock == Lock::kHeld || !is_named(subfolder, data, status)) return failed(EAGAIN);
  if (size_bytes != UINT64_MAX && static_cast<uint64_t>(status.st_size) != size_bytes) return failed(ENOENT);
  opened.geometry = {static_cast<uint64_t>(status.st_size), shift()};
  opened.map = BlockMap::open(subfolder, file_name(name, kMap), opened.geometry.count(), opened.error);
  if (opened.map != nullptr && size_bytes != UINT64_MAX) note_use(subfolder, name);
  return opened;
}

CacheFolder::Opened CacheFolder::create_object(int subfolder, const std::string& name, uint64_t size_bytes,
                                               const std::string& about) {
  Opened opened;
  opened.geometry = {size_bytes, shift()};
  const uint64_t overhead = opened.geometry.overhead_bytes();
  if (overhead > most_bytes_ / kMostOverheadPart) return failed(EFBIG);
  const std::string data = file_name(name, kData);
  opened.data = Descriptor(open_now(subfolder, data, O_RDWR | O_CREAT | kSafely));
  struct stat status{};
  if (opened.data.get() < 0 || ::fstat(opened.data.get(), &status) != 0) return failed(errno);
  if (!S_ISREG(status.st_mode)) return failed(EINVAL);
  const Lock lock = lock_description(opened.data.get(), F_WRLCK, kInUseByte);
  if (lock == Lock::kUnsupported) return failed(ENOLCK);
  if (lock == Lock::kHeld || !is_named(subfolder, data, status)) return failed(EAGAIN);
  HeldBlocks held;
  if (static_cast<uint64_t>(status.st_size) == size_bytes &&
      BlockMap::count_held(subfolder, file_name(name, kMap), opened.geometry.count(), held) == 0) {
    return failed(EAGAIN);  // another process has completed it meanwhile
  }
  if (!reserve(overhead)) {
    remove_files(subfolder, name);
    return failed(kNoRoom);
  }
  opened.error = fill_new(subfolder, name, opened, about);
  if (opened.error == 0) {
    opened.map = BlockMap::open(subfolder, file_name(name, kMap), opened.geometry.count(), opened.error);
  }
  if (opened.map == nullptr) {
    remove_files(subfolder, name);
    totals_.subtract(overhead);
  }
  totals_.settle();
  lock_description(opened.data.get(), F_RDLCK, kInUseByte);
  return opened;
}

int CacheFolder::fill_new(int subfolder, const std::string& name, const Opened& object, const std::string& about) {
  int error = set_file_size(object.data.get(), 0);  // blocks that a killed process left
  if (error == 0) error = set_file_size(object.data.get(), object.geometry.size_bytes);
  if (error != 0) return error;
  write_about(subfolder, name, about);
  return BlockMap::create(subfolder, file_name(name, kMap), object.geometry.count());
}

CacheFolder::Opened CacheFolder::open_object(const std::string& name, uint64_t size_bytes, const std::string& about) {
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (true) {
    const Descriptor subfolder = open_subfolder(name, /*create=*/true);
    if (subfolder.get() < 0) return failed(errno);
    Opened opened = open_complete(subfolder.get(), name, size_bytes);
    if (opened.error == ENOENT) {
      opened.data.reset();  // its own lock would be in the way
      opened = create_object(subfolder.get(), name, size_bytes, about);
    }
    if (opened.error != EAGAIN || std::chrono::steady_clock::now() >= until) return opened;
    std::this_thread::sleep_for(kLooksAgain);
  }
}

CacheFolder::Opened CacheFolder::open_existing(const std::string& name) {
  if (name.size() != kNameDigits || !is_hex(name)) return failed(ENOENT);
  const Descriptor subfolder = open_subfolder(name, /*create=*/false);
  return subfolder.get() < 0 ? failed(errno) : open_complete(subfolder.get(), name, UINT64_MAX);
}

int CacheFolder::for_each_object(const std::function<void(int, const std::string&)>& visit) const {
  std::vector<std::string> subfolders;
  int error = for_each_name(objects_.get(), [&](std::string_view name) {
    if (name.size() == kSubfolderDigits && is_hex(name)) subfolders.emplace_back(name);
  });
  std::vector<std::string> names;
  for (const std::string& subfolder : subfolders) {
    const Descriptor opened = open_subfolder(subfolder, /*create=*/false);
    if (opened.get() < 0) error = errno;
    if (opened.get() < 0) continue;
    names.clear();
    const int of_names = for_each_name(opened.get(), [&](std::string_view file) {
      if (std::string name = object_of(subfolder, file); !name.empty()) names.push_back(std::move(name));
    });
    if (of_names != 0) error = of_names;
    std::sort(names.begin(), names.end());
    names.erase(std::unique(names.begin(), names.end()), names.end());
    for (const std::string& name : names) visit(opened.get(), name);
  }
  return error;
}

std::vector<CachedObjectSummary> CacheFolder::list() const {
  std::vector<CachedObjectSummary> found;
  for_each_object([&](int subfolder, const std::string& name) {
    const Descriptor data(::openat(subfolder, file_name(name, kData).c_str(), O_RDONLY | kSafely));
    struct stat status{};
    if (data.get() < 0 || ::fstat(data.get(), &status) != 0 || !S_ISREG(status.st_mode)) return;
    const BlockGeometry geometry{static_cast<uint64_t>(status.st_size), shift()};
    HeldBlocks held;
    if (BlockMap::count_held(subfolder, file_name(name, kMap), geometry.count(), held) != 0) return;
    found.push_back({name, read_about(subfolder, name), geometry.size_bytes, geometry.bytes_of(held),
                     last_use_of(subfolder, name), is_locked(data.get(), kInUseByte)});
  });
  return found;
}

bool CacheFolder::reserve(uint64_t bytes) {
  while (!totals_.reserve(bytes, most_bytes_)) {
    if (bytes > most_bytes_ || !evict_oldest()) return false;
  }
  return true;
}

bool CacheFolder::find_candidates() {
  candidates_.clear();
  for_each_object(
      [&](int subfolder, const std::string& name) { candidates_.push_back({last_use_of(subfolder, name), name}); });
  std::sort(candidates_.begin(), candidates_.end(),
            [](const Candidate& one, const Candidate& other) { return one.last_use_ns > other.last_use_ns; });
  return !candidates_.empty();
}

namespace {

struct Claimed {
  const CacheFolder& folder;
  ~Claimed() { folder.release_claim(kEvictingByte); }
};

}  // namespace

bool CacheFolder::evict_oldest() {
  std::lock_guard lock(evicting_);
  if (has_unused_.exchange(false)) nothing_before_ = {};
  if (std::chrono::steady_clock::now() < nothing_before_) return false;
  if (claim(kEvictingByte) != Lock::kTaken) return false;
  const Claimed claimed{*this};
  for (bool has_looked = false; true;) {
    if (candidates_.empty()) {
      if (has_looked || !find_candidates()) break;
      has_looked = true;
    }
    const Candidate oldest = std::move(candidates_.back());
    candidates_.pop_back();
    if (evict_if_unused(oldest.name, oldest.last_use_ns)) return true;
  }
  nothing_before_ = std::chrono::steady_clock::now() + tuning::kCacheLooksAgain;
  return false;
}

bool CacheFolder::evict(const std::string& name) {
  return name.size() == kNameDigits && is_hex(name) && evict_if_unused(name, kAnyUse);
}

bool CacheFolder::evict_if_unused(const std::string& name, int64_t last_use_ns) {
  const Descriptor subfolder = open_subfolder(name, /*create=*/false);
  if (subfolder.get() < 0) return false;
  const std::string file = file_name(name, kData);
  Descriptor data(open_now(subfolder.get(), file, O_RDWR | kSafely));
  struct stat status{};
  if (data.get() < 0 || ::fstat(data.get(), &status) != 0 || !S_ISREG(status.st_mode)) return false;
  if (lock_description(data.get(), F_WRLCK, kInUseByte) != Lock::kTaken) return false;
  if (!is_named(subfolder.get(), file, status)) return false;
  if (last_use_ns != kAnyUse && last_use_of(subfolder.get(), name) != last_use_ns) return false;
  const BlockGeometry geometry{static_cast<uint64_t>(status.st_size), shift()};
  HeldBlocks held;
  const int error = BlockMap::count_held(subfolder.get(), file_name(name, kMap), geometry.count(), held);
  if (error != 0 && error != ENOENT) return false;
  const uint64_t bytes = error == ENOENT ? 0 : geometry.disk_bytes_of(held) + geometry.overhead_bytes();
  totals_.unsettle();
  remove_files(subfolder.get(), name);
  totals_.subtract(bytes);
  totals_.settle();
  free_in_background(std::move(data));
  ++evicted_objects;
  evicted_bytes += bytes;
  return true;
}

// Adds what an object takes. Nobody uses it. Returns 0, or errno if that is not known.
int CacheFolder::repair(int subfolder, const std::string& name, uint64_t& used_bytes) const {
  const Descriptor data(open_now(subfolder, file_name(name, kData), O_RDWR | kSafely));
  struct stat status{};
  if (data.get() < 0 || ::fstat(data.get(), &status) != 0) {
    const int error = errno;
    if (error == ENOENT) remove_files(subfolder, name);  // the rest of an object
    return error == ENOENT ? 0 : error;
  }
  if (!S_ISREG(status.st_mode)) return 0;
  const BlockGeometry geometry{static_cast<uint64_t>(status.st_size), shift()};
  HeldBlocks held;
  int error = BlockMap::count_held(subfolder, file_name(name, kMap), geometry.count(), held);
  if (error == ENOENT) remove_files(subfolder, name);
  if (error != 0) return error == ENOENT ? 0 : error;
  if (static_cast<uint64_t>(status.st_blocks) * kBytesOfBlockCount > geometry.disk_bytes_of(held)) {
    const auto map = BlockMap::open(subfolder, file_name(name, kMap), geometry.count(), error);
    if (map == nullptr) return error;
    free_missing(data.get(), *map, geometry);
  }
  used_bytes += geometry.disk_bytes_of(held) + geometry.overhead_bytes();
  return 0;
}

void CacheFolder::recount() {
  uint64_t used_bytes = 0;
  bool has_descriptors = true;
  const int error = for_each_object([&](int subfolder, const std::string& name) {
    has_descriptors = !is_out_of_descriptors(repair(subfolder, name, used_bytes)) && has_descriptors;
  });
  // Else objects are missing in the count: the old one stays, and the next process counts again.
  if (has_descriptors && !is_out_of_descriptors(error)) totals_.recounted(used_bytes, boot_);
}

}  // namespace gdsdata
