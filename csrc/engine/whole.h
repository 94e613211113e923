// One range of one file, there and back, waiting for it: what read_tensor and write_tensor are made of.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "engine/engine.h"

namespace gdsdata {

using Poll = std::function<void()>;  // see Engine::run

// All throw Failure. Memory is the caller's, of `length` bytes.
void read_range(Engine& engine, const std::string& path, uint64_t offset, uint64_t length, std::byte* memory,
                const Poll& poll);

// Over what is there, on storage when it returns. Not atomic: a crash meanwhile leaves a mixture.
void write_range(Engine& engine, const std::string& path, uint64_t offset, uint64_t length, std::byte* memory,
                 const Poll& poll);

// A file of just these bytes under that name, or, after a crash or an error, what was there before.
void write_whole(Engine& engine, const std::string& path, uint64_t length, std::byte* memory, const Poll& poll);

}  // namespace gdsdata
