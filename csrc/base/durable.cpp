#include "base/durable.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "base/condition.h"
#include "base/descriptors.h"
#include "base/error.h"
#include "base/file_range.h"
#include "tuning.h"

namespace gdsdata {

namespace {

// Closes files without a name, each on its own thread: freeing takes a second for every few GiB.
class Freeing {
 public:
  void free(Descriptor last) {
    if (process_ != process_id()) return;  // a forked child: the lock may be held forever
    {
      std::lock_guard lock(mutex_);
      ++count_;
    }
    try {
      std::thread([this, last = std::move(last)]() mutable {
        last.reset();
        std::lock_guard lock(mutex_);
        --count_;
        ended_.notify_all();
      }).detach();
    } catch (const std::exception&) {  // no thread is available; the lambda's destructor freed the file
      std::lock_guard lock(mutex_);
      --count_;
      ended_.notify_all();
    }
  }
  void wait() {
    if (process_ != process_id()) return;
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [this] { return count_ == 0; });
  }

 private:
  std::mutex mutex_;
  Condition ended_;
  int count_ = 0;
  const int64_t process_ = process_id();
};

Freeing& freeing() {
  static auto* instance = new Freeing;  // never destroyed: its threads may outlive static destructors
  return *instance;
}

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// Returns 0 or errno. Signals interrupt it on some file systems (NFS and FUSE).
int sync(int fd) {
  while (::fsync(fd) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

}  // namespace

void sync_file(const File& file) {
  if (const int error = sync(file.buffered()); error != 0) {
    throw Failure(system_error("sync to storage", file.path(), error));
  }
}

void set_size(const File& file, uint64_t length_bytes) {
  while (::ftruncate(file.buffered(), static_cast<off_t>(length_bytes)) != 0) {
    if (errno != EINTR) throw Failure(system_error("set the size of", file.path(), errno, 0, length_bytes));
  }
}

void preallocate(const File& file, uint64_t length_bytes) {
  if (length_bytes == 0) return;
  const auto allocate = [&] { return ::fallocate(file.buffered(), 0, 0, static_cast<off_t>(length_bytes)); };
  int result = allocate();
  if (result != 0 && (errno == ENOSPC || errno == EDQUOT)) {
    freeing().wait();
    result = allocate();
  }
  // A lack of space is reported now, and not in the middle of the data. At any other error, writes
  // allocate: some file systems have no fallocate, seccomp profiles forbid it, and tmpfs before
  // Linux 6.10 gives up all that it has allocated at each signal.
  if (result != 0 && is_lack_of_space(errno)) {
    throw Failure(system_error("reserve space for", file.path(), errno, 0, length_bytes));
  }
}

void sync_folder_of(const std::string& path) {
  const std::string folder = folder_of(path);
  const Descriptor descriptor(
      open_descriptor([&] { return ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
  const int error = descriptor.get() < 0 ? errno : sync(descriptor.get());
  if (error != 0) throw Failure(system_error("sync the folder", folder, error));
}

void replace(const std::string& temporary, const std::string& path) {
  // The sync of the folder would wait until the old file is freed, so it is kept open until then.
  Descriptor before(
      open_descriptor([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK); }));
  if (::rename(temporary.c_str(), path.c_str()) != 0) {
    throw Failure(system_error("rename '" + temporary + "' to", path, errno));
  }
  sync_folder_of(path);
  free_in_background(std::move(before));
}

void free_in_background(Descriptor last) {
  struct stat status{};
  if (last.get() >= 0 && ::fstat(last.get(), &status) == 0 && status.st_size >= tuning::kLongToFreeBytes) {
    freeing().free(std::move(last));
  }
}

}  // namespace gdsdata
