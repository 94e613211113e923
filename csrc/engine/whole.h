// Ranges of files, there and back, waiting for them: what read_tensor, write_tensor and checkpoints
// are made of.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/replacement.h"
#include "engine/engine.h"

namespace gdsdata {

using Poll = std::function<void()>;  // see Engine::run

// What the caller has: memory of `length` bytes on the engine's device (where it is one range),
// which is touched behind `before`.
struct Caller {
  std::byte* memory = nullptr;
  Events before;
  Priority priority = Priority::kBackground;
  Poll poll;
  std::chrono::nanoseconds stall_timeout{0};  // as of Engine::run
};

// All throw Failure, and, unless that is kStalled, return when every byte is in place.
void read_range(Engine& engine, const std::string& path, uint64_t offset, uint64_t length, const Caller& caller);

struct Moved {
  std::vector<uint32_t> checksums;  // where they were asked for: the CRC-32 of each transfer
  RouteBytes bytes;  // by the route that served them
};

// Many at a time: each transfer's length from its file, to its memory on the engine's device.
Moved read_many(Engine& engine, std::shared_ptr<FileTable> files, std::vector<Transfer> transfers, bool with_checksums,
                const Caller& caller);
// The same, not begun: for Pending.
std::shared_ptr<Group> group_of_reads(std::shared_ptr<FileTable> files, std::vector<Transfer> transfers,
                                      const Caller& caller);

// Over what is there, on storage when it returns. Not atomic: a crash meanwhile leaves a mixture.
void write_range(Engine& engine, const std::string& path, uint64_t offset, uint64_t length, const Caller& caller);

// A file in the making, written by the engine; see Replacement. Thread-safe but for commit.
class Output {
 public:
  // Throws Failure, as all of it does.
  Output(const std::string& path, uint64_t length) : replacement_(path, length) {}

  // Each transfer's bytes from its memory, on the engine's device, to its place in the file; with
  // checksums, returns the CRC-32 of each. Where nothing is written, the file has zeros.
  std::vector<uint32_t> write(Engine& engine, std::vector<Transfer> transfers, bool with_checksums,
                              const Caller& caller);
  void commit() { replacement_.commit(); }

 private:
  Replacement replacement_;
};

// A file of just these bytes.
void write_whole(Engine& engine, const std::string& path, uint64_t length, const Caller& caller);

}  // namespace gdsdata
