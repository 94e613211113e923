#include "base/file.h"

#include <fcntl.h>
#include <linux/stat.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>

#include "base/block_cache.h"
#include "base/fallbacks.h"
#include "tuning.h"

namespace gdsdata {

namespace {

// The reason of each file system that refused O_DIRECT. There are few of them, and a refusal does
// not change while one stays mounted.
class DirectRefusals {
 public:
  void add(uint64_t file_system, const std::string& reason) {
    std::lock_guard lock(mutex_);
    reasons_.emplace(file_system, reason);
  }
  bool contains(uint64_t file_system) {
    std::lock_guard lock(mutex_);
    return reasons_.count(file_system) != 0;
  }
  std::vector<std::string> reasons() {
    std::lock_guard lock(mutex_);
    std::vector<std::string> lines;
    for (const auto& [file_system, reason] : reasons_) lines.push_back(reason);
    return lines;
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, std::string> reasons_;
};

DirectRefusals& refusals() {
  static auto* instance = new DirectRefusals;  // never destroyed: workers may outlive static destructors
  return *instance;
}

// The larger one of the memory and the offset alignment that the file requires. A page if the
// kernel cannot say.
uint64_t ask_direct_alignment(int fd) {
#ifdef STATX_DIOALIGN
  struct statx status{};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 && (status.stx_mask & STATX_DIOALIGN) != 0 &&
      status.stx_dio_offset_align != 0) {
    const uint64_t asked = std::max(status.stx_dio_offset_align, status.stx_dio_mem_align);
    return std::max<uint64_t>(asked, 512);
  }
#else
  (void)fd;
#endif
  return page_bytes();
}

// A pipe in the place of a file is opened at once, and refused later. Without O_NONBLOCK the call
// would wait for somebody who writes into it. Reads must not have the flag: io_uring would answer
// them with EAGAIN where a file system knows no IOCB_NOWAIT.
int open_without_waiting(const char* path, int flags) {
  const int fd = ::open(path, flags | O_NONBLOCK);
  if (fd < 0) return errno == EWOULDBLOCK ? ::open(path, flags) : fd;  // another process has a lease (fcntl(2))
  ::fcntl(fd, F_SETFL, flags & ~O_ACCMODE);
  return fd;
}

bool is_same(int fd, uint64_t inode, uint64_t file_system) {
  struct stat status{};
  return ::fstat(fd, &status) == 0 && status.st_ino == inode && status.st_dev == file_system;
}

// Where there is no /proc. ESTALE: the path names another file now.
int open_if_same(const std::string& path, int flags, uint64_t inode, uint64_t file_system) {
  const int fd = ::open(path.c_str(), flags);
  if (fd < 0 || is_same(fd, inode, file_system)) return fd;
  ::close(fd);
  errno = ESTALE;
  return -1;
}

// Returns an empty descriptor if it gives up. Every other error is a Failure.
Descriptor open_buffered(const std::string& path, int flags, WhenTaken when_taken) {
  const bool writing = (flags & O_ACCMODE) != O_RDONLY;
  const auto open = [&] {
    return writing ? ::open(path.c_str(), flags | O_CLOEXEC, 0666)
                   : open_without_waiting(path.c_str(), flags | O_CLOEXEC);
  };
  Descriptor opened(open_descriptor(open, when_taken));
  const bool gives_up = when_taken == WhenTaken::kGiveUp && is_out_of_descriptors(errno);
  if (opened.get() < 0 && !gives_up) {
    throw Failure(system_error(writing ? "open for writing" : "open", path, errno));
  }
  return opened;
}

int64_t mtime_ns_of(const struct stat& status) {
  return status.st_mtim.tv_sec * 1'000'000'000LL + status.st_mtim.tv_nsec;
}

}  // namespace

bool refuses_direct(int system_errno) { return system_errno == EINVAL || system_errno == EOPNOTSUPP; }

File::File(std::string path, std::string opened_as, int flags, Descriptor buffered)
    : buffered_fd_(buffered.get()),
      path_(std::move(path)),
      opened_as_(std::move(opened_as)),
      flags_(flags),
      descriptors_(std::make_unique<Descriptors>()) {
  descriptors_->buffered = std::move(buffered);
  descriptors_->share.add_one();
  struct stat status{};
  if (::fstat(buffered_fd_, &status) != 0) throw Failure(system_error("stat", path_, errno));
  if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode)) {
    throw Failure({ErrorCode::kInvalidArgument, "'" + path_ + "' is not a regular file", path_});
  }
  // The engine reads ahead itself, and knows what will be needed. Read-ahead by the kernel would
  // fill the page cache with bytes that are then read with O_DIRECT.
  ::posix_fadvise(buffered_fd_, 0, 0, POSIX_FADV_RANDOM);
  size_bytes_ = static_cast<uint64_t>(status.st_size);
  file_system_ = status.st_dev;
  inode_ = status.st_ino;
  mtime_ns_ = mtime_ns_of(status);
}

File::File(std::shared_ptr<RemoteObject> remote)
    : size_bytes_(remote->size_bytes()), direct_fd_(-1), remote_(std::move(remote)), path_(remote_->location()) {}

std::shared_ptr<File> File::open_for_reading(const std::string& path, std::optional<FileIdentity> expected,
                                             WhenTaken when_taken) {
  if (is_url(path)) {
    if (!expected) {
      throw Failure(
          {ErrorCode::kInvalidArgument, "'" + path + "' is read only with the size that a listing gave", path});
    }
    return open_remote(path, *expected, when_taken);
  }
  Descriptor buffered = open_buffered(path, O_RDONLY, when_taken);
  if (buffered.get() < 0) return nullptr;
  std::shared_ptr<File> file(new File(path, path, O_RDONLY, std::move(buffered)));
  if (expected) {
    const bool modified = expected->mtime_ns != FileIdentity::kAnyTime && file->mtime_ns_ != expected->mtime_ns;
    if (file->size_bytes_ != expected->size_bytes || modified) {
      Error error{ErrorCode::kCorrupt, "", path, 0, file->size_bytes_};
      error.message = "'" + path +
                      "' was replaced or changed since it was indexed: " + std::to_string(expected->size_bytes) +
                      " bytes then, " + std::to_string(file->size_bytes_) + " bytes now" +
                      (modified ? ", modified later" : "") + "; iterate again to index it anew";
      throw Failure(std::move(error));
    }
  }
  return file;
}

std::shared_ptr<File> File::open_remote(const std::string& path, const FileIdentity& identity, WhenTaken when_taken) {
  auto remote = std::make_shared<RemoteObject>(path, identity.size_bytes, identity.mtime_ns);
  const auto cache = active_cache();
  std::shared_ptr<CachedObject> cached;
  if (cache != nullptr && remote->has_tag()) {
    const auto tag = std::to_string(identity.mtime_ns);
    int error = 0;
    const auto open = [&] {  // several descriptors, which belong to `cached`
      cached = cache->try_object(path, identity.mtime_ns, identity.size_bytes, tag, error);
      errno = error;
      return cached != nullptr ? 0 : -1;
    };
    with_descriptors(open, when_taken);
    if (cached == nullptr && is_out_of_descriptors(error) && when_taken == WhenTaken::kGiveUp) return nullptr;
    if (cached == nullptr) cache->note_refusal(error);
  }
  if (cached == nullptr) return std::shared_ptr<File>(new File(std::move(remote)));
  Descriptor data = open_buffered(cached->data_path(), O_RDONLY, when_taken);
  if (data.get() < 0) return nullptr;
  std::shared_ptr<File> file(new File(path, cached->data_path(), O_RDONLY, std::move(data)));
  file->descriptors_->share.add_one();  // that of `cached`
  file->remote_ = std::move(remote);
  file->cached_ = std::move(cached);
  return file;
}

bool File::caches(uint64_t offset, uint64_t length) const {
  return cached_ != nullptr && cached_->holds(offset, length);
}

std::shared_ptr<File> File::open_for_writing(const std::string& path, bool create) {
  const int flags = O_RDWR | (create ? O_CREAT : 0);
  return std::shared_ptr<File>(new File(path, path, flags, open_buffered(path, flags, WhenTaken::kWait)));
}

std::shared_ptr<File> File::open_again_for_writing(int descriptor, const std::string& path) {
  const std::string same = "/proc/self/fd/" + std::to_string(descriptor);
  return std::shared_ptr<File>(new File(path, same, O_RDWR, open_buffered(same, O_RDWR, WhenTaken::kWait)));
}

std::shared_ptr<File> File::adopt_for_writing(Descriptor file, std::string path, std::string temporary) {
  return std::shared_ptr<File>(new File(std::move(path), std::move(temporary), O_RDWR, std::move(file)));
}

std::shared_ptr<void> File::rest() noexcept {
  try {
    std::shared_ptr<Descriptors> closing = std::make_shared<Descriptors>();
    // Others lock this first, and then the caches, whose lock the caller has.
    const std::unique_lock lock(descriptors_mutex_, std::try_to_lock);
    const Mapping* mapping = made_mapping_.load(std::memory_order_acquire);
    if (!lock || descriptors_ == nullptr || remote_ != nullptr || companion_ != nullptr || mapping == nullptr ||
        !mapping->known_resident()) {
      return nullptr;
    }
    descriptors_->share.move_to(closing->share);
    closing->buffered = std::move(descriptors_->buffered);
    closing->direct = std::move(descriptors_->direct);
    descriptors_.reset();
    if (direct_fd_ >= 0) direct_fd_ = kNotOpened;
    buffered_fd_ = kResting;
    return closing;
  } catch (...) {  // no memory
    return nullptr;
  }
}

bool File::note_woken() noexcept {
  const bool was_woken = woken_.exchange(false);
  if (was_woken) --woken_files_;
  return was_woken;
}

// The caller may have a pin or hold other files, so it does not wait for a descriptor.
int File::wake() noexcept {
  try {
    make_room_for_descriptor();
    auto descriptors = std::make_unique<Descriptors>();
    descriptors->buffered = open_buffered(opened_as_, flags_, WhenTaken::kGiveUp);
    const int fd = descriptors->buffered.get();
    const bool is_it = is_same(fd, inode_, file_system_);
    std::lock_guard lock(descriptors_mutex_);
    if (const int awake_fd = buffered_fd_; awake_fd != kResting) return awake_fd;  // another thread was faster
    if (!is_it) return -1;
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
    descriptors->share.add_one();
    descriptors_ = std::move(descriptors);
    if (!woken_.exchange(true)) ++woken_files_;
    return buffered_fd_ = fd;
  } catch (...) {  // it has no name any more, or there is no memory
    return -1;
  }
}

int File::direct() {
  if (const int fd = direct_fd_.load(std::memory_order_acquire); fd != kNotOpened) return fd;
  while (buffered() >= 0) {
    if (const int fd = open_direct(); fd != kResting) return fd;
  }
  return -1;
}

int File::open_direct() {
  std::lock_guard lock(descriptors_mutex_);
  if (const int fd = direct_fd_; fd != kNotOpened) return fd;
  if (descriptors_ == nullptr) return kResting;  // it has begun to rest again
  if (refusals().contains(file_system_)) return direct_fd_ = -1;
  direct_alignment_ = ask_direct_alignment(buffered_fd_);
  // Opened through /proc, so that this is the file that is open, whatever the path names now.
  const std::string self = "/proc/self/fd/" + std::to_string(buffered_fd_);
  const auto open = [this, &self] {
    const int flags = (flags_ & O_ACCMODE) | O_DIRECT | O_CLOEXEC;
    const int fd = ::open(self.c_str(), flags);
    return fd < 0 && errno == ENOENT ? open_if_same(opened_as_, flags, inode_, file_system_) : fd;
  };
  // The caller holds this file open, and perhaps others, so it must not wait.
  Descriptor direct(open_descriptor(open, WhenTaken::kGiveUp));
  if (direct.get() >= 0) {
    descriptors_->direct = std::move(direct);
    descriptors_->share.add_one();
    return direct_fd_ = descriptors_->direct.get();
  }
  why_not_direct_ = system_error("open with O_DIRECT", path_, errno);
  if (is_out_of_descriptors(why_not_direct_.system_errno)) return -1;
  if (refuses_direct(why_not_direct_.system_errno)) {
    refusals().add(file_system_, why_not_direct_.message);
  } else {
    note_fallback("bytes of a file go through the page cache: " + why_not_direct_.message);
  }
  return direct_fd_ = -1;
}

void File::refuse_direct(const std::string& reason) {
  direct_fd_ = -1;
  refusals().add(file_system_, reason);
}

Error File::why_not_direct() const {
  std::lock_guard lock(descriptors_mutex_);
  if (why_not_direct_.system_errno != 0 && !refuses_direct(why_not_direct_.system_errno)) return why_not_direct_;
  return {ErrorCode::kUnavailable,
          "O_DIRECT was asked for, but the file system of '" + path_ +
              "' refuses it; use direct=\"auto\" without strict, or a file system that allows it (ext4, xfs)",
          path_};
}

FileIdentity File::current_identity() const {
  const FileIdentity opened{size_bytes_, mtime_ns_};
  if (remote_ != nullptr) return opened;
  struct stat status{};
  const int fd = buffered_fd_.load(std::memory_order_acquire);
  if (fd != kResting) {
    if (::fstat(fd, &status) != 0) return {};
  } else if (::stat(opened_as_.c_str(), &status) != 0 || status.st_ino != inode_ || status.st_dev != file_system_) {
    return opened;  // without its name, nobody can open the mapped file to change it
  }
  return {static_cast<uint64_t>(status.st_size), mtime_ns_of(status)};
}

bool File::has_changed() const {
  const FileIdentity now = current_identity();
  return now.size_bytes != size_bytes_ || now.mtime_ns != mtime_ns_;
}

PagesSeenBy File::pages_seen_by() {
  int by = pages_seen_by_.load(std::memory_order_relaxed);
  if (by == kNotAsked) pages_seen_by_ = by = static_cast<int>(gdsdata::pages_seen_by(buffered()));
  return static_cast<PagesSeenBy>(by);
}

std::optional<uint64_t> File::count_resident_pages(uint64_t offset, uint64_t length, const Mapping* view) {
  switch (pages_seen_by()) {
    case PagesSeenBy::kCachestat:
      return cached_pages(buffered(), PageRange(offset, length));
    case PagesSeenBy::kMincore:
      return view == nullptr ? std::nullopt : std::optional(view->resident_pages(offset, length));
    case PagesSeenBy::kReading:
    case PagesSeenBy::kPageFaults:
      break;
  }
  return std::nullopt;
}

std::optional<uint64_t> File::resident_pages(uint64_t offset, uint64_t length) {
  return count_resident_pages(offset, length, pages_seen_by() == PagesSeenBy::kMincore ? mapping() : nullptr);
}

File::Residency File::residency(uint64_t offset, uint64_t length) {
  if (length == 0) return Residency::kAll;
  if (!holds(offset, length)) return Residency::kNone;
  const uint64_t pages = PageRange(offset, length).count;
  if (hides_pages()) return hidden_residency(offset, pages);
  const auto resident = resident_pages(offset, length);
  if (!resident) return Residency::kUnknown;
  if (*resident == 0) return Residency::kNone;
  return *resident >= pages ? Residency::kAll : Residency::kSome;
}

// Asks for the first page alone, because to ask for one that is not in memory reads it.
File::Residency File::hidden_residency(uint64_t offset, uint64_t pages) {
  if (pages_seen_by() == PagesSeenBy::kReading) {
    const bool first = is_cached(buffered(), offset).value_or(false);
    return !first ? Residency::kNone : pages == 1 ? Residency::kAll : Residency::kUnknown;
  }
  Mapping* view = mapping();
  if (view == nullptr) return Residency::kUnknown;
  return view->is_in_memory(offset) ? Residency::kAll : Residency::kNone;
}

double File::resident_share(uint64_t offset, uint64_t length) {
  const uint64_t pages = PageRange(offset, length).count;
  return pages == 0 ? 0 : static_cast<double>(resident_pages(offset, length).value_or(0)) / static_cast<double>(pages);
}

Mapping* File::make_mapping() {
  std::call_once(mapping_once_, [this] {
    if (Mapping::leaves_enough(size_bytes_)) mapping_ = Mapping::make(buffered(), size_bytes_);
    // A short file is asked for as a whole, because then it may rest.
    if (mapping_ != nullptr && size_bytes_ <= tuning::kLongFileBytes &&
        count_resident_pages(0, size_bytes_, mapping_.get()) == PageRange(0, size_bytes_).count) {
      mapping_->mark_resident();
    }
    made_mapping_.store(mapping_.get(), std::memory_order_release);
  });
  return mapping_.get();
}

void File::will_need(uint64_t offset, uint64_t length) const {
  ::posix_fadvise(buffered(), static_cast<off_t>(offset), static_cast<off_t>(length), POSIX_FADV_WILLNEED);
}

std::shared_ptr<void> File::companion(int fd, const std::function<std::shared_ptr<void>()>& make) {
  std::lock_guard lock(descriptors_mutex_);
  if (companion_ != nullptr) return companion_;
  if (fd < 0 || descriptors_ == nullptr) return nullptr;
  if (fd == descriptors_->buffered.get() || fd == descriptors_->direct.get()) companion_ = make();
  return companion_;
}

std::vector<std::string> direct_refusals() { return refusals().reasons(); }

void read_each(int fd, const std::string& path, std::span<const int64_t> offsets, size_t length, std::byte* out) {
  std::fill_n(out, offsets.size() * length, std::byte{0});
  ::posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
  bool asked = false;
  std::vector<PageRange> missing;
  for (size_t i = 0; i < offsets.size(); ++i, out += length) {
    for (size_t done = 0; done < length;) {
      const iovec rest{out + done, length - done};
      const int64_t offset = offsets[i] + static_cast<int64_t>(done);
      const ssize_t moved = asked ? ::preadv(fd, &rest, 1, offset) : ::preadv2(fd, &rest, 1, offset, RWF_NOWAIT);
      if (moved > 0) {
        done += static_cast<size_t>(moved);
      } else if (moved == 0) {
        break;
      } else if (errno != EINTR && asked) {
        throw Failure(system_error("read", path, errno, offsets[i], length));
      } else if (errno != EINTR) {  // the file system may not know RWF_NOWAIT
        const bool is_on_its_way = errno == EAGAIN;
        const bool sees = pages_seen_by(fd) == PagesSeenBy::kCachestat;
        asked = true;
        for (size_t later = i; later < offsets.size(); ++later) {
          const PageRange pages(static_cast<uint64_t>(offsets[later]), length);
          if ((later == i && is_on_its_way) || (sees && cached_pages(fd, pages) == 0)) missing.push_back(pages);
        }
        for (const int64_t later : offsets.subspan(i)) {
          advise(fd, PageRange(static_cast<uint64_t>(later), length), POSIX_FADV_WILLNEED);
        }
      }
    }
  }
  for (const PageRange pages : missing) advise(fd, pages, POSIX_FADV_DONTNEED);
}

int64_t process_id() { return ::getpid(); }

}  // namespace gdsdata
