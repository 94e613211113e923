// Checks a Python pickle before it is unpickled.
#pragma once

#include <cstdint>
#include <span>

namespace gdsdata {

// Returns true if the pickle refers to a memo index, or announces a number of bytes, that is larger
// than the pickle. No pickler writes such a pickle. C's unpickler would allocate that much before
// it reads the data: gigabytes for ten bytes. Source of the instructions: Python's pickletools.
bool pickle_claims_too_much(std::span<const uint8_t> pickle);

}  // namespace gdsdata
