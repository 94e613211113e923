// A new file that takes a name when it is committed, and what earlier ones left behind.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/file.h"

namespace gdsdata {

// A file in the making, under a temporary name beside its final one. The final name keeps what it
// has until `commit`.
//
// The temporary name is `<name>.<16 random hex digits>-<8 hex digits of the kernel's boot id>.tmp`;
// a name too long for that is cut, and gets its CRC-32. The maker holds a lock on the file for as
// long as it lives, so a later save of the same name can tell an abandoned file from one that is
// still written. The boot id is 0 if the file system has no locks.
class Replacement {
 public:
  // Follows symbolic links, removes what dead processes left of earlier saves of `path`, and
  // reserves the space: a full disk is an error before the first byte. The file then has
  // `length_bytes` of zeros. Throws Failure; kNotReplaceable if `path` is there but no new file can
  // take its place.
  Replacement(const std::string& path, uint64_t length_bytes);
  ~Replacement();  // removes the file unless it was committed
  Replacement(const Replacement&) = delete;
  Replacement& operator=(const Replacement&) = delete;

  // Its path() is the final one, for messages.
  const std::shared_ptr<File>& file() const { return file_; }

  // Puts it on storage, and then under its name, with the owner and mode of the file that it
  // replaces. Throws Failure.
  void commit();

 private:
  std::string path_, temporary_;
  const uint64_t length_bytes_;
  const int64_t process_ = process_id();
  std::shared_ptr<File> file_;
  bool committed_ = false;
};

}  // namespace gdsdata
