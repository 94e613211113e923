// Blocking reads and writes of ranges of files, for read_tensor, write_tensor and checkpoints.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/replacement.h"
#include "engine/engine.h"

namespace gdsdata {

using Poll = std::function<void()>;  // see Engine::run

// The caller's memory: `length` bytes on the engine's device, for calls that move one range. It is
// accessed only after `before`.
struct Caller {
  std::byte* memory = nullptr;
  Events before;
  Priority priority = Priority::kBackground;
  Poll poll;
  std::chrono::nanoseconds stall_timeout{0};  // see Engine::run
};

// All throw Failure. Unless that is kStalled, they return when every byte is in place.
void read_range(Engine& engine, const std::string& path, uint64_t offset, uint64_t length, const Caller& caller);

struct Moved {
  std::vector<uint32_t> checksums;  // the CRC-32 of each transfer, if requested
  RouteBytes bytes;  // by route
};

// Reads many transfers, each from its file to its memory on the engine's device. A conversion is
// for memory of the processor, and without checksums.
Moved read_many(Engine& engine, std::shared_ptr<FileTable> files, std::vector<Transfer> transfers,
                Conversion conversion, bool with_checksums, const Caller& caller);
// The same as a group that is not submitted, for Pending.
std::shared_ptr<Group> group_of_reads(std::shared_ptr<FileTable> files, std::vector<Transfer> transfers,
                                      const Caller& caller);

// Overwrites a range, and syncs it before it returns. Not atomic: after a crash, the range may be a
// mixture of old and new.
void write_range(Engine& engine, const std::string& path, uint64_t offset, uint64_t length, const Caller& caller);

// A file that the engine writes. Thread-safe except for commit.
class Output {
 public:
  // All members throw Failure.
  //
  // A new file; see Replacement.
  Output(const std::string& path, uint64_t length)
      : replacement_(std::in_place, path, length), file_(replacement_->file()) {}
  // An open file, written in place from its beginning on; `path` is for messages. The descriptor
  // must stay open meanwhile.
  Output(int descriptor, const std::string& path, uint64_t length);

  // Writes each transfer from its memory on the engine's device to its place in the file. Returns
  // the CRC-32 of each if `with_checksums`. The rest of the file is zeros.
  std::vector<uint32_t> write(Engine& engine, std::vector<Transfer> transfers, bool with_checksums,
                              const Caller& caller);
  // Syncs and renames a new file. Does nothing for a file that is written in place.
  void commit() {
    if (replacement_) replacement_->commit();
  }

 private:
  std::optional<Replacement> replacement_;
  std::shared_ptr<File> file_;
};

// Writes a file that consists of these bytes.
void write_whole(Engine& engine, const std::string& path, uint64_t length, const Caller& caller);

}  // namespace gdsdata
