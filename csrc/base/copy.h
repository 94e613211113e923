// Copies bytes that the processor will not read soon, into memory that is not in its caches.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/processor.h"

namespace gdsdata {

// Long copies bypass the caches. That leaves the caches to other data, and the target is not read
// before it is written: 1.5 times as fast (docs/design-decisions.md), but slower if the target is
// in a cache. The bytes become visible to other threads as those of any store do.
void copy_bytes(std::byte* to, const std::byte* from, uint64_t bytes, const Processor& has = processor());

}  // namespace gdsdata
