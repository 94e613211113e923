// Copies of bytes that the processor will not look at soon, into memory that it has not looked at
// for a while.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gdsdata {

// Long ones go past the caches, which spares reading the target before it is written, and leaves
// the caches to others: half as fast again (docs/design-decisions.md), but slower into memory that
// is in a cache. Visible to whoever synchronises with the caller, as any store.
void copy_bytes(std::byte* to, const std::byte* from, uint64_t bytes);

}  // namespace gdsdata
