// Replaces files at commit, and removes temporary files that earlier saves left.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/file.h"

namespace gdsdata {

// A new file under a temporary name. Until `commit`, the final name keeps the old file.
//
// The temporary name is `<name>.<16 random hex digits>-<8 hex digits of the kernel's boot id>.tmp`.
// If that is too long, `<name>` is cut and its CRC-32 added. This object holds a lock on the file,
// so a later save of the same name can distinguish an abandoned file from one that is still
// written. If the file system has no locks, the boot id in the name is 0.
class Replacement {
 public:
  // Follows symbolic links, removes files that dead processes left of earlier saves of `path`, and
  // reserves the space: a full disk is an error before the first byte. The file then has
  // `length_bytes` zeros. Throws Failure; kNotReplaceable if no new file can take `path`'s place.
  Replacement(const std::string& path, uint64_t length_bytes);
  ~Replacement();  // removes the file unless it was committed
  Replacement(const Replacement&) = delete;
  Replacement& operator=(const Replacement&) = delete;

  // Its path() is the final one, for messages.
  const std::shared_ptr<File>& file() const { return file_; }

  // Gives the file the owner and mode of the old one, syncs it, and renames it. Throws Failure.
  void commit();

 private:
  void remove();

  std::string path_, temporary_;
  const uint64_t length_bytes_;
  const int64_t process_ = process_id();
  std::shared_ptr<File> file_;
  bool committed_ = false;
};

}  // namespace gdsdata
