// The kernel that gathers records, as PTX. The driver compiles it, so the build needs no toolkit.
#pragma once

#include <cstdint>

namespace gdsdata {

extern const char* const kGatherPtx;  // in gather_kernel.cpp, compiled from gather_kernel.cu
inline constexpr const char* kGatherName = "gdsdata_gather";

// The largest unit, up to 16 bytes, that divides all values that were ORed into `common`.
constexpr unsigned gather_unit_bytes(uint64_t common) {
  unsigned unit = 16;
  while (common % unit != 0) unit /= 2;
  return unit;
}

}  // namespace gdsdata
