// One range of one file, there and back, waiting for it: what read_tensor and write_tensor are made of.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "engine/engine.h"

namespace gdsdata {

using Poll = std::function<void()>;  // see Engine::run

// What the caller has: memory of `length` bytes on the engine's device, which is touched behind `before`.
struct Caller {
  std::byte* memory = nullptr;
  Events before;
  Priority priority = Priority::kBackground;
  Poll poll;
};

// All throw Failure, and return when every byte is in place.
void read_range(Engine& engine, const std::string& path, uint64_t offset, uint64_t length, const Caller& caller);

// Over what is there, on storage when it returns. Not atomic: a crash meanwhile leaves a mixture.
void write_range(Engine& engine, const std::string& path, uint64_t offset, uint64_t length, const Caller& caller);

// A file of just these bytes under that name, or, after a crash or an error, what was there before.
void write_whole(Engine& engine, const std::string& path, uint64_t length, const Caller& caller);

}  // namespace gdsdata
