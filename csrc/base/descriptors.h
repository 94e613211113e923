// A process may open RLIMIT_NOFILE descriptors. Caches of open files share a part of them. If this
// library finds none left, the caches close idle files.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <memory>

#include "base/epochs.h"

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

// True for EMFILE and ENFILE: no descriptor is left, which says nothing about the file.
bool is_out_of_descriptors(int system_errno);

// While all descriptors are in use, kWait waits until other threads of this library close some. A
// thread that holds open files or a pin (epochs.h) itself must use kGiveUp, close them and try
// again: two such threads that wait for each other would never end.
enum class WhenTaken { kWait, kGiveUp };

// Makes a call that needs descriptors, and returns -1 and errno if it fails. While no descriptor is
// left, closes idle files of all caches and makes it again, for up to 30 seconds. Returns the last
// result.
int with_descriptors(const std::function<int()>& call, WhenTaken when_taken = WhenTaken::kWait);

// The same for a call that returns a descriptor. The result is never that of a standard stream,
// which a program may have closed: what it prints would go into the file.
int open_descriptor(const std::function<int()>& open, WhenTaken when_taken = WhenTaken::kWait);

// The limit on the descriptors of open files while caches keep idle ones open. It is half of
// RLIMIT_NOFILE, because the program needs descriptors too.
size_t most_cached_descriptors();

// Evicts idle files of all caches until one more descriptor fits, or all are in use.
void make_room_for_descriptor();

// Has the system make place for so many descriptors more, on a thread of its own.
//
// It enlarges a process's table of descriptors when that is full, to twice as many. If threads
// share the table, each time waits for all processors (synchronize_rcu in Linux's expand_fdtable),
// and so do all opens that need the place: 6 to 31 ms at 64, 128, 256 files and so on (two cores).
// One wait beforehand replaces these.
void expect_descriptors(size_t count);

struct Caches;  // all caches of a process

// The descriptors of one open file. They count towards those of all files of the process.
class DescriptorShare {
 public:
  DescriptorShare() = default;
  ~DescriptorShare();
  DescriptorShare(const DescriptorShare&) = delete;
  DescriptorShare& operator=(const DescriptorShare&) = delete;
  void add_one();
  // `other` has none yet.
  void move_to(DescriptorShare& other);

 private:
  Caches* counted_in_ = nullptr;
  ssize_t count_ = 0;
};

// Files that are kept open for later use, and can be opened again. A derived class calls `join` at
// the end of its constructor and `leave` at the start of its destructor. Thread-safe.
class FileCache {
 protected:
  ~FileCache() = default;
  // Takes an idle file out of the cache, one that was not used lately if there is one. Returns null
  // if all files are in use. Threads that pinned `evicted` may still read it.
  virtual Limbo::Object evict() noexcept = 0;
  virtual bool has_used_files() = 0;
  const Limbo& evicted() const { return evicted_; }

  void join();
  void leave();
  // Evicts idle files until one more descriptor fits into the limit `most`, first those of the
  // cache that has not needed room for longest. Returns false if all files of all caches are in
  // use.
  bool make_room(size_t most);
  // Evicts what `take` takes out of the cache, one file a call, until it returns null.
  void evict_each(const std::function<Limbo::Object()>& take);

 private:
  friend struct Caches;
  Caches* caches_ = nullptr;  // the caches of the process in which it joined
  Limbo evicted_;             // files that readers keep open; guarded by the lock of all caches
};

}  // namespace gdsdata
