// The space that a cache folder takes, counted by all processes that use it.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "base/descriptors.h"

namespace gdsdata {

// The file `cache.state` of a folder, mapped by all of them. Thread-safe once `share` was called.
//
// A process that is killed may leave the count wrong, but never unnoticed: while bytes are reserved
// and not on the disk yet, or the other way round, `unsettled` is not 0. The next process that is
// alone with the folder counts again. After a crash of the machine it does so too.
class CacheTotals {
 public:
  // `shift`: of the block size of a new folder. Throws Failure.
  CacheTotals(int folder, const std::string& folder_path, unsigned shift);
  ~CacheTotals();
  CacheTotals(const CacheTotals&) = delete;
  CacheTotals& operator=(const CacheTotals&) = delete;

  unsigned shift() const;

  // True if no other process uses the folder, and none can begin to before `share`.
  bool is_alone() const { return is_alone_; }
  void share();
  bool must_recount(uint32_t boot) const;
  void recounted(uint64_t used_bytes, uint32_t boot);

  // Reserves bytes if no more than `most_bytes` are in use then. They are unsettled.
  bool reserve(uint64_t bytes, uint64_t most_bytes);
  // Reserved bytes are on the disk and marked, or a change of another kind is complete.
  void settle();
  // Something on the disk is about to change.
  void unsettle();
  // Reserved or used bytes are free again. They stay unsettled, if they were.
  void subtract(uint64_t bytes);
  uint64_t used_bytes() const;

  // The last bound that a process was given, for reports.
  void note_most_bytes(uint64_t most_bytes);
  uint64_t most_bytes() const;

 private:
  struct Shared;
  void begin(const std::string& path, unsigned shift);

  Descriptor file_;  // holds a lock of each process that uses the folder
  bool is_alone_ = false;
  Shared* shared_ = nullptr;
};

}  // namespace gdsdata
