// Ranges of files, there and back, waiting for them: what read_tensor, write_tensor and checkpoints are made of.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace gdsdata {

using Poll = std::function<void()>;  // see Engine::run

// What the caller has: memory of `length` bytes on the engine's device (where it is one range), which is touched behind
// `before`.
struct Caller {
  std::byte* memory = nullptr;
  Events before;
  Priority priority = Priority::kBackground;
  Poll poll;
};

// All throw Failure, and return when every byte is in place.
void read_range(Engine& engine, const std::string& path, uint64_t offset, uint64_t length, const Caller& caller);

// Many at a time: each transfer's length from its file, to its memory on the engine's device. With checksums, returns
// the CRC-32 of each.
std::vector<uint32_t> read_many(Engine& engine, std::shared_ptr<FileTable> files, std::vector<Transfer> transfers,
                                bool with_checksums, const Caller& caller);

// Over what is there, on storage when it returns. Not atomic: a crash meanwhile leaves a mixture.
void write_range(Engine& engine, const std::string& path, uint64_t offset, uint64_t length, const Caller& caller);

// A file of just these bytes under that name, or, after a crash or an error, what was there before.
void write_whole(Engine& engine, const std::string& path, uint64_t length, const Caller& caller);

}  // namespace gdsdata
