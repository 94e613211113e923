#include "base/replacement.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/stat.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "base/ascii.h"
#include "base/crc32.h"
#include "base/durable.h"
#include "base/file_lock.h"
#include "tuning.h"

namespace gdsdata {

namespace {

constexpr std::string_view kSuffix = ".tmp";
constexpr size_t kRandomDigits = 16, kKernelDigits = 8;
constexpr size_t kAddedBytes = 1 + kRandomDigits + 1 + kKernelDigits + kSuffix.size();
constexpr std::string_view kNoKernel = "00000000";

// If a lock does not decide, a temporary file is abandoned when it was unchanged for so long. The
// first limit is for a file that another kernel made: its lock was free here, but the file system
// may not share locks between hosts.
constexpr int64_t kUnchangedOfOtherKernelS = 3600;
constexpr int64_t kUnchangedWithoutLockS = 24 * 3600;

std::string hex(uint64_t value, size_t digits) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%0*llx", static_cast<int>(digits), static_cast<unsigned long long>(value));
  return {text.data(), digits};
}

bool is_decimal(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

// The boot id: containers of one host share it, whatever their process ids and host names are.
const std::string& kernel() {
  static const std::string* const id = [] {
    std::string text;
    std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), text);
    text.resize(std::min(text.size(), kKernelDigits));
    return new std::string(text.size() == kKernelDigits && is_hex(text) ? text : kNoKernel);
  }();
  return *id;
}

struct Place {
  explicit Place(const std::string& path) {
    const size_t slash = path.rfind('/');
    folder = slash == std::string::npos ? "" : path.substr(0, slash + 1);
    name = path.substr(folder.size());
  }
  std::string folder;  // empty, or ends in a slash
  std::string name;
};

// The temporary names of one file.
class TemporaryNames {
 public:
  explicit TemporaryNames(const Place& place) : name_(place.name) {
    const long limit = ::pathconf(place.folder.empty() ? "." : place.folder.c_str(), _PC_NAME_MAX);
    const size_t longest = std::max<size_t>(limit > 0 ? static_cast<size_t>(limit) : 255, 64) - kAddedBytes;
    if (name_.size() <= longest) {
      begin_ = name_ + ".";
      return;
    }
    size_t kept = longest - 1 - 8;
    while (kept > 0 && (static_cast<unsigned char>(name_[kept]) & 0xC0) == 0x80) --kept;  // cut no UTF-8 character
    const uint32_t checksum = crc32(reinterpret_cast<const std::byte*>(name_.data()), name_.size());
    begin_ = name_.substr(0, kept) + "~" + hex(checksum, 8) + ".";
  }

  std::string make(std::string_view of_kernel) const {
    uint64_t random = 0;
    if (::getrandom(&random, sizeof random, 0) != sizeof random) {
      throw Failure(system_error("get random bytes for a file beside", name_, errno));
    }
    return begin_ + hex(random, kRandomDigits) + "-" + std::string(of_kernel) + std::string(kSuffix);
  }

  enum class Kind { kOther, kOfThisKernel, kOfOtherKernel, kWithoutLock };
  Kind kind_of(std::string_view name) const {
    if (!name.ends_with(kSuffix)) return Kind::kOther;
    name.remove_suffix(kSuffix.size());
    if (name.starts_with(begin_) && name.size() == begin_.size() + kRandomDigits + 1 + kKernelDigits) {
      const std::string_view random = name.substr(begin_.size(), kRandomDigits);
      const std::string_view of_kernel = name.substr(begin_.size() + kRandomDigits + 1);
      if (is_hex(random) && name[begin_.size() + kRandomDigits] == '-' && is_hex(of_kernel)) {
        if (of_kernel == kNoKernel) return Kind::kWithoutLock;
        return of_kernel == kernel() ? Kind::kOfThisKernel : Kind::kOfOtherKernel;
      }
    }
    // `<name>.<process id>-<number>.tmp`: versions up to 0.1 made these, without a lock.
    if (!name.starts_with(name_ + ".")) return Kind::kOther;
    name.remove_prefix(name_.size() + 1);
    const size_t dash = name.find('-');
    const bool is_old =
        dash != std::string_view::npos && is_decimal(name.substr(0, dash)) && is_decimal(name.substr(dash + 1));
    return is_old ? Kind::kWithoutLock : Kind::kOther;
  }

 private:
  const std::string name_;
  std::string begin_;
};

// The lock of a temporary file's maker.
Lock lock_made(int fd) { return lock_description(fd, F_WRLCK, kFirstLockByte); }

// Returns the names in a folder that end as temporary names do.
std::vector<std::string> temporaries_in(const std::string& folder) {
  struct Listing {
    size_t entries = 0, uses = 0;
    std::vector<std::string> temporaries;
  };
  // Listings of large folders. Thread-local: in a forked child, a lock could be held forever.
  thread_local std::map<std::pair<dev_t, ino_t>, Listing> large;
  const std::unique_ptr<DIR, int (*)(DIR*)> opened(::opendir(folder.empty() ? "." : folder.c_str()), ::closedir);
  struct stat status{};
  if (!opened || ::fstat(::dirfd(opened.get()), &status) != 0) return {};
  const std::pair key(status.st_dev, status.st_ino);
  if (const auto found = large.find(key); found != large.end()) {
    Listing& known = found->second;
    if (++known.uses * tuning::kEntriesPerSave < known.entries) return known.temporaries;
    large.erase(found);
  }
  Listing listing;
  while (const dirent* entry = ::readdir(opened.get())) {
    ++listing.entries;
    if (const std::string_view name = entry->d_name; name.ends_with(kSuffix)) listing.temporaries.emplace_back(name);
  }
  if (listing.entries <= tuning::kEntriesPerSave) return std::move(listing.temporaries);
  return (large[key] = std::move(listing)).temporaries;
}

void remove_if_abandoned(const std::string& path, TemporaryNames::Kind kind, int64_t now_s) {
  Descriptor file(::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat status{};
  if (file.get() < 0 || ::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) return;
  const Lock lock = kind == TemporaryNames::Kind::kWithoutLock ? Lock::kUnsupported : lock_made(file.get());
  if (lock == Lock::kHeld) return;  // its maker is alive
  int64_t limit_s = kUnchangedWithoutLockS;
  if (lock == Lock::kTaken) limit_s = kind == TemporaryNames::Kind::kOfThisKernel ? 0 : kUnchangedOfOtherKernelS;
  if (now_s - status.st_mtim.tv_sec < limit_s) return;
  // Its maker may have committed it before the lock was taken; then the name is gone.
  if (is_named(AT_FDCWD, path, status) && ::unlink(path.c_str()) == 0) free_in_background(std::move(file));
}

// `own` is the file just created, at `now_s` of the file system's clock: hosts' clocks differ.
void remove_leftovers(const Place& place, const TemporaryNames& names, const std::string& own, int64_t now_s) {
  for (const std::string& name : temporaries_in(place.folder)) {
    const auto kind = names.kind_of(name);
    const std::string path = place.folder + name;
    if (kind != TemporaryNames::Kind::kOther && path != own) remove_if_abandoned(path, kind, now_s);
  }
}

Failure not_replaceable(Error error) {
  error.code = ErrorCode::kNotReplaceable;
  return Failure(std::move(error));
}

Failure mount_point(const std::string& path) {
  Error error{ErrorCode::kNotReplaceable, "", path};
  error.message =
      "could not replace '" + path +
      "': it is a mount point, such as a single file that is bind-mounted into a container, and no new file "
      "can take its name; mount its folder instead, or save under another name";
  error.system_errno = EBUSY;
  return Failure(std::move(error));
}

bool is_mount_point(const std::string& path) {
#ifdef STATX_ATTR_MOUNT_ROOT
  struct statx status{};
  return ::statx(AT_FDCWD, path.c_str(), AT_SYMLINK_NOFOLLOW, 0, &status) == 0 &&
         (status.stx_attributes & status.stx_attributes_mask & STATX_ATTR_MOUNT_ROOT) != 0;
#else
  (void)path;
  return false;  // the rename will fail instead
#endif
}

// Returns the file at the end of a chain of links. It need not exist.
std::string resolve_links(const std::string& path) {
  std::filesystem::path file = path;
  std::error_code error;
  for (int links = 0; links < 40; ++links) {
    std::filesystem::path target = std::filesystem::read_symlink(file, error);
    if (error) return file.string();
    file = file.parent_path() / target;
  }
  throw Failure(system_error("follow the links of", path, ELOOP));
}

Failure creation_failed(const std::string& path, const Place& place, bool exists, int system_errno) {
  const std::string folder = std::filesystem::path(place.folder.empty() ? "./" : place.folder).parent_path().string();
  struct stat status{};
  if (system_errno == ENOENT && ::stat(folder.c_str(), &status) != 0) {
    Error error{ErrorCode::kNotFound, "", path};
    error.message = "could not save '" + path + "': Parent directory " + folder + " does not exist; create it first";
    error.system_errno = ENOENT;
    return Failure(std::move(error));
  }
  const bool is_refused = system_errno == EACCES || system_errno == EPERM || system_errno == EROFS;
  Error error = system_error("create a file beside", path, system_errno);
  if ((is_refused && exists) || system_errno == ENAMETOOLONG) {
    error.message += "; it cannot be replaced while its folder takes no new file: save to another folder";
    return not_replaceable(std::move(error));
  }
  return Failure(std::move(error));
}

// The file is new, so no permission is lacking.
bool refuses_sizes(int system_errno) {
  return system_errno == EPERM || system_errno == EOPNOTSUPP || system_errno == ENOSYS;
}

Failure only_streams(const std::string& path, int system_errno) {
  Error error{ErrorCode::kNotReplaceable, "", path};
  error.message = "could not save '" + path + "': its file system sets no sizes (" + std::strerror(system_errno) +
                  "), and takes files only from their beginning to their end, as rclone mount without "
                  "--vfs-cache-mode writes does; save to another folder";
  error.system_errno = system_errno;
  return Failure(std::move(error));
}

void check_replaceable(const std::string& path, const struct stat& target) {
  if (S_ISDIR(target.st_mode)) throw Failure(system_error("replace", path, EISDIR));
  if (!S_ISREG(target.st_mode)) {
    throw Failure({ErrorCode::kInvalidArgument, "'" + path + "' is not a regular file", path});
  }
  if (is_mount_point(path)) throw mount_point(path);
}

struct NewFile {
  std::string path;
  Descriptor descriptor;
  struct stat status{};
};

// Returns a locked file if the file system has locks. If the descriptor is empty, errno says why.
NewFile create_temporary(const Place& place, const TemporaryNames& names, mode_t mode) {
  std::string_view of_kernel = kernel();
  // Other saves may remove a file as abandoned before it is locked.
  constexpr int kAttempts = 100;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    NewFile file{place.folder + names.make(of_kernel), {}, {}};
    const int flags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC;
    file.descriptor = Descriptor(open_descriptor([&] { return ::open(file.path.c_str(), flags, mode); }));
    if (file.descriptor.get() < 0 && errno != EEXIST) return file;
    if (file.descriptor.get() < 0) continue;
    const Lock lock = of_kernel == kNoKernel ? Lock::kTaken : lock_made(file.descriptor.get());
    if (lock == Lock::kTaken && ::lstat(file.path.c_str(), &file.status) == 0) return file;
    ::unlink(file.path.c_str());
    if (lock == Lock::kUnsupported) of_kernel = kNoKernel;
  }
  errno = EAGAIN;
  return {};
}

}  // namespace

Replacement::Replacement(const std::string& path, uint64_t length_bytes)
    : path_(resolve_links(path)), length_bytes_(length_bytes) {
  const Place place(path_);
  struct stat target{};
  const bool exists = ::stat(path_.c_str(), &target) == 0;
  if (exists) check_replaceable(path_, target);
  // A temporary file could be created all the same: its name is another one.
  if (!exists && (path_.empty() || errno == ENAMETOOLONG)) throw Failure(system_error("create", path_, errno));
  const TemporaryNames names(place);
  // If the old file is private, the new one must be too, even before it gets the old mode.
  NewFile made = create_temporary(place, names, exists ? 0600 : 0666);
  if (made.descriptor.get() < 0) throw creation_failed(path_, place, exists, errno);
  temporary_ = std::move(made.path);
  try {
    remove_leftovers(place, names, temporary_, made.status.st_mtim.tv_sec);
    file_ = File::adopt_for_writing(std::move(made.descriptor), path_, temporary_);
    set_size(*file_, length_bytes_);
    preallocate(*file_, length_bytes_);
  } catch (const Failure& failure) {
    remove();
    const int system_errno = failure.error().system_errno;
    if (refuses_sizes(system_errno)) throw only_streams(path_, system_errno);
    throw;
  } catch (...) {
    remove();
    throw;
  }
}

Replacement::~Replacement() {
  if (!committed_ && process_ == process_id()) remove();
}

// Closes the file first: some FUSE file systems make it at its close.
void Replacement::remove() {
  file_.reset();
  ::unlink(temporary_.c_str());
}

void Replacement::commit() {
  struct stat target{};
  if (::stat(path_.c_str(), &target) == 0) {
    struct stat own{};
    ::fstat(file_->buffered(), &own);
    // Keeps the owner as far as this user may. The mode comes last, because a change of owner
    // clears some of its bits.
    if ((own.st_uid != target.st_uid || own.st_gid != target.st_gid) &&
        ::fchown(file_->buffered(), target.st_uid, target.st_gid) != 0) {
      (void)!::fchown(file_->buffered(), static_cast<uid_t>(-1), target.st_gid);
    }
    ::fchmod(file_->buffered(), target.st_mode & 07777);
  }
  if (file_->current_size_bytes() != length_bytes_) set_size(*file_, length_bytes_);
  sync_file(*file_);
  try {
    replace(temporary_, path_);
  } catch (const Failure& failure) {
    if (failure.error().system_errno == EBUSY) throw mount_point(path_);
    if (failure.error().system_errno != ENOENT) throw;
    Error error = failure.error();
    error.code = ErrorCode::kIo;
    error.message = "could not save '" + path_ + "': its temporary file '" + temporary_ +
                    "' was removed or its folder moved meanwhile; save again";
    throw Failure(std::move(error));
  }
  committed_ = true;
  lock_description(file_->buffered(), F_UNLCK, kFirstLockByte);  // a forked child may keep the descriptor open
}

}  // namespace gdsdata
