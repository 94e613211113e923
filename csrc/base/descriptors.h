// A process may open RLIMIT_NOFILE descriptors. Caches of open files share a part of them, and
// close idle files when anybody in this library finds none left.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace gdsdata {

// A descriptor that closes itself.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Descriptor& operator=(Descriptor&& other) noexcept;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { reset(); }
  int get() const { return fd_; }
  void reset();

 private:
  int fd_ = -1;
};

// EMFILE or ENFILE: no descriptor is left. It says nothing about the file.
bool is_out_of_descriptors(int system_errno);

// Whether to wait while all descriptors are taken, for other threads of this library to close
// theirs. A thread that holds open files itself gives up, closes them and tries again: two threads
// that wait for each other would never end.
enum class WhenTaken { kWait, kGiveUp };

// Calls `open`, which returns a descriptor, or -1 and errno. While none is left, closes idle files
// of all caches and calls it again, for up to half a minute. Returns its last answer.
int open_descriptor(const std::function<int()>& open, WhenTaken when_taken = WhenTaken::kWait);

// Descriptors that open files have at most while caches keep idle ones open: half of the limit,
// because the program needs some too.
size_t most_cached_descriptors();

// The descriptors that one open file has, counted among those of all files of the process.
class DescriptorShare {
 public:
  DescriptorShare() = default;
  ~DescriptorShare();
  DescriptorShare(const DescriptorShare&) = delete;
  DescriptorShare& operator=(const DescriptorShare&) = delete;
  void add_one();

 private:
  void* counted_in_ = nullptr;
  ssize_t count_ = 0;
};

// Files that are kept open to be used again, and can be opened again. Derived classes call `join`
// when they are whole and `leave` before they go. Thread-safe.
class FileCache {
 public:
  // Moves up to `most` files that nobody uses to `idle`, least recently used first. They close when
  // the caller releases them, so that it can do that without a lock.
  virtual void take_idle(size_t most, std::vector<std::shared_ptr<void>>& idle) = 0;
  virtual bool has_used_files() = 0;

 protected:
  ~FileCache() = default;
  void join();
  void leave();
  // Makes room for one more descriptor, in this cache first. False if all files of all caches are
  // in use.
  bool make_room();

 private:
  void* caches_ = nullptr;  // those of the process that it joined in
};

}  // namespace gdsdata
