// What a pickle of Python's asks its unpickler for before it is unpickled.
#pragma once

#include <cstdint>
#include <span>

namespace gdsdata {

// Whether it speaks of more places in the memo, or of more bytes, than it has bytes itself. No
// pickler's does, and C's unpickler makes room for such a place or such bytes before it has what
// goes there: gigabytes, for a pickle of ten bytes. Source of the instructions: Python's
// pickletools.
bool pickle_claims_too_much(std::span<const uint8_t> pickle);

}  // namespace gdsdata
