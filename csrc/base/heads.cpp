#include "base/heads.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "base/descriptors.h"

namespace gdsdata {

namespace {

constexpr size_t kFilesAtOnce = 16;  // few, because each is an open descriptor

int64_t nanoseconds(const timespec& time) { return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec; }

Descriptor open_without_waiting(const char* path) {
  const auto open = [path](int flags) {
    return open_descriptor([=] { return ::open(path, O_RDONLY | O_CLOEXEC | flags); }, WhenTaken::kGiveUp);
  };
  const int fd = open(O_NONBLOCK);
  // EWOULDBLOCK: another process has a lease on it (fcntl(2)).
  return Descriptor(fd < 0 && errno == EWOULDBLOCK ? open(0) : fd);
}

// Returns how many bytes were read, or -1.
int64_t read_head(int fd, std::byte* head, size_t length) {
  size_t done = 0;
  while (done < length) {
    const ssize_t moved = ::pread(fd, head + done, length - done, static_cast<off_t>(done));
    if (moved == 0) break;
    if (moved > 0) {
      done += static_cast<size_t>(moved);
    } else if (errno != EINTR) {
      return -1;
    }
  }
  std::fill(head + done, head + length, std::byte{0});
  return static_cast<int64_t>(done);
}

bool read_some(const PathList& paths, size_t begin, size_t end, size_t length, const Heads& heads) {
  std::array<Descriptor, kFilesAtOnce> opened;
  for (size_t i = begin; i < end; ++i) {
    Descriptor& file = opened[i - begin];
    file = open_without_waiting(paths[i].c_str());
    if (file.get() < 0) return false;
    ::posix_fadvise(file.get(), 0, 0, POSIX_FADV_RANDOM);  // the head alone, no read-ahead behind it
    // To the kernel, a length of 0 means the whole file.
    if (length > 0) ::posix_fadvise(file.get(), 0, static_cast<off_t>(length), POSIX_FADV_WILLNEED);
  }
  for (size_t i = begin; i < end; ++i) {
    const int fd = opened[i - begin].get();
    struct stat status;
    heads.read_bytes[i] = read_head(fd, heads.bytes + i * length, length);
    if (heads.read_bytes[i] < 0 || ::fstat(fd, &status) != 0) return false;
    heads.size_bytes[i] = status.st_size;
    heads.mtime_ns[i] = nanoseconds(status.st_mtim);
  }
  return true;
}

// Calls `work(begin, end)` for parts of `count` files, on several threads. Returns false once a
// call has returned false; then some parts are left out.
template <typename Work>
bool in_parts(size_t count, size_t threads, const Work& work) {
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  const auto run = [&] {
    for (size_t begin; !failed && (begin = next.fetch_add(kFilesAtOnce)) < count;) {
      if (!work(begin, std::min(begin + kFilesAtOnce, count))) failed = true;
    }
  };
  std::vector<std::thread> others;
  const size_t useful = std::min(threads, count / kFilesAtOnce + 1);
  others.reserve(useful);
  try {
    while (others.size() + 1 < useful) others.emplace_back(run);
  } catch (const std::system_error&) {  // no more threads are available
  }
  run();
  for (std::thread& other : others) other.join();
  return !failed;
}

}  // namespace

bool read_heads(const PathList& paths, size_t length, size_t threads, const Heads& heads) {
  return in_parts(paths.size(), threads,
                  [&](size_t begin, size_t end) { return read_some(paths, begin, end, length, heads); });
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
    return true;
  });
}

}  // namespace gdsdata
