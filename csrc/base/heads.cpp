#include "base/heads.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <exception>
#include <limits>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/descriptors.h"
#include "tuning.h"

namespace gdsdata {

namespace {

constexpr size_t kNone = std::numeric_limits<size_t>::max();

int64_t nanoseconds(const timespec& time) { return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec; }

int open_without_waiting(const std::string& path, WhenTaken when_taken) {
  const auto open = [&](int flags) {
    return open_descriptor([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | flags); }, when_taken);
  };
  const int fd = open(O_NONBLOCK);
  // EWOULDBLOCK: another process has a lease on it (fcntl(2)).
  return fd < 0 && errno == EWOULDBLOCK ? open(0) : fd;
}

// Returns how many bytes were read, or -1. Calls the system even if no byte is wanted: it refuses
// pipes and folders.
int64_t read_head(int fd, std::byte* head, size_t length) {
  size_t done = 0;
  while (true) {
    const ssize_t moved = ::pread(fd, head + done, length - done, static_cast<off_t>(done));
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return -1;
    done += static_cast<size_t>(moved);
    if (moved == 0 || done == length) break;
  }
  std::fill(head + done, head + length, std::byte{0});
  return static_cast<int64_t>(done);
}

class HeadReader {
 public:
  HeadReader(const PathList& paths, size_t length, const Heads& heads)
      : paths_(paths), length_(length), heads_(heads) {}

  // Reads files of a part, and returns the first that it cannot read, or `kNone`. Files that were
  // opened are read and closed when no descriptor is left, and only then it waits for one.
  size_t read(size_t begin, size_t end) {
    for (size_t i = begin; i < end;) {
      const size_t first = i;
      bool is_refused = false;
      while (i < end && !is_refused) {
        is_refused = !open(i, opened_.empty() ? WhenTaken::kWait : WhenTaken::kGiveUp);
        if (!is_refused) ++i;
      }
      const bool is_out = is_refused && is_out_of_descriptors(errno) && !opened_.empty();
      const size_t failed = read_opened(first);
      if (failed != kNone) return failed;
      if (is_refused && !is_out) return i;
    }
    return kNone;
  }

 private:
  bool open(size_t file, WhenTaken when_taken) {
    Descriptor opened(open_without_waiting(paths_[file], when_taken));
    const int fd = opened.get();
    if (fd < 0) return false;
    opened_.push_back(std::move(opened));
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);  // the head alone, no read-ahead behind it
    // To the kernel, a length of 0 means the whole file.
    if (length_ > 0) ::posix_fadvise(fd, 0, static_cast<off_t>(length_), POSIX_FADV_WILLNEED);
    return true;
  }

  size_t read_opened(size_t first) {
    const std::vector<Descriptor> opened = std::move(opened_);
    opened_.clear();
    for (size_t file = first; file < first + opened.size(); ++file) {
      const int fd = opened[file - first].get();
      struct stat status;
      heads_.read_bytes[file] = read_head(fd, heads_.bytes + file * length_, length_);
      if (heads_.read_bytes[file] < 0 || ::fstat(fd, &status) != 0) return file;
      heads_.size_bytes[file] = status.st_size;
      heads_.mtime_ns[file] = nanoseconds(status.st_mtim);
    }
    return kNone;
  }

  const PathList& paths_;
  const size_t length_;
  const Heads heads_;
  std::vector<Descriptor> opened_;
};

// Calls `work(begin, end)` for parts of `count` files, in their order, on at most so many threads.
// A call returns the first file that failed, or `kNone`. Then no more parts begin. Returns the
// first file of all that failed. Throws what a call has thrown.
template <typename Work>
size_t in_parts(size_t count, size_t threads, const Work& work) {
  constexpr size_t kFiles = tuning::kHeadsAtOnce;
  std::atomic<size_t> next{0};
  std::mutex mutex;  // guards the next two
  size_t failed = kNone;
  std::exception_ptr thrown;
  const auto run = [&] {
    for (size_t begin; (begin = next.fetch_add(kFiles)) < count;) {
      size_t found = begin;
      std::exception_ptr error;
      try {
        found = work(begin, std::min(begin + kFiles, count));
      } catch (...) {
        error = std::current_exception();
      }
      if (found == kNone) continue;
      next = count;
      const std::lock_guard lock(mutex);
      failed = std::min(failed, found);
      if (error != nullptr) thrown = error;
    }
  };
  std::vector<std::thread> others;
  const size_t useful = std::min(threads, (count + kFiles - 1) / kFiles);
  try {
    others.reserve(useful);
    while (others.size() + 1 < useful) others.emplace_back(run);
  } catch (const std::exception&) {  // no more threads are available
  }
  run();
  for (std::thread& other : others) other.join();
  if (thrown != nullptr) std::rethrow_exception(thrown);
  return failed;
}

}  // namespace

std::optional<size_t> read_heads(const PathList& paths, size_t length, size_t threads, const Heads& heads) {
  const size_t failed = in_parts(paths.size(), threads, [&](size_t begin, size_t end) {
    return HeadReader(paths, length, heads).read(begin, end);
  });
  return failed == kNone ? std::nullopt : std::optional(failed);
}

void find_statuses(const PathList& paths, size_t threads, const Statuses& statuses) {
  in_parts(paths.size(), threads, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      struct stat status;
      const bool is_found = ::stat(paths[i].c_str(), &status) == 0;
      statuses.modes[i] = is_found ? int64_t{status.st_mode} : 0;
      statuses.size_bytes[i] = is_found ? int64_t{status.st_size} : -1;
      statuses.mtime_ns[i] = is_found ? nanoseconds(status.st_mtim) : 0;
    }
    return kNone;
  });
}

}  // namespace gdsdata
