// The first bytes of many files, their kinds, sizes and times.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/path_list.h"

namespace gdsdata {

// Where `read_heads` writes, for each file: its first bytes, with zeros behind them if the file is
// shorter; how many of them are the file's; its size; its time of modification.
struct Heads {
  std::byte* bytes;
  int64_t* read_bytes;
  int64_t* size_bytes;
  int64_t* mtime_ns;
};

// Reads the first `length` bytes of each file, or all of a shorter one, on at most so many threads.
// Returns the first file that cannot be opened or read, a pipe or a folder too. Those before it are
// read, those behind it perhaps not.
//
// A thread requests the heads of a few files before it reads the first, so a cold disk serves them
// side by side. Nothing waits for a pipe's writer.
std::optional<size_t> read_heads(const PathList& paths, size_t length, size_t threads, const Heads& heads);

// Where `find_statuses` writes, for each path: st_mode, the size and the time of modification. They
// are 0, -1 and 0 if nothing can be found there.
struct Statuses {
  int64_t* modes;
  int64_t* size_bytes;
  int64_t* mtime_ns;
};

void find_statuses(const PathList& paths, size_t threads, const Statuses& statuses);

}  // namespace gdsdata
