// The first bytes of many files, their kinds, sizes and times.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/path_list.h"

namespace gdsdata {

// Where `read_heads` writes: for each file its head, with zeros behind the end of a shorter file,
// the bytes that it has of it, the file's size, and its time of modification.
struct Heads {
  std::byte* bytes;
  int64_t* read_bytes;
  int64_t* size_bytes;
  int64_t* mtime_ns;
};

// Reads the first `length` bytes of each file, or all of a shorter one, on `threads` threads and at
// most so many as can be had. Returns false if a file cannot be opened or read.
//
// A thread asks for the heads of a few files before it reads the first. A cold disk then serves
// them side by side. A pipe is no file, and nothing waits for its writer.
bool read_heads(const PathList& paths, size_t length, size_t threads, const Heads& heads);

// Where `find_statuses` writes, for each path: st_mode, the size and the time of modification. They
// are 0, -1 and 0 if nothing can be found there.
struct Statuses {
  int64_t* modes;
  int64_t* size_bytes;
  int64_t* mtime_ns;
};

void find_statuses(const PathList& paths, size_t threads, const Statuses& statuses);

}  // namespace gdsdata
