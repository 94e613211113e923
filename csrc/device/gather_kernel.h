// The kernel that gathers records, as PTX: the driver compiles it for the GPU at hand, so no
// toolkit builds it.
#pragma once

#include <cstdint>

namespace gdsdata {

extern const char* const kGatherPtx;  // gather_kernel.cpp, made of gather_kernel.cu
inline constexpr const char* kGatherName = "gdsdata_gather";

// The largest unit, up to 16 bytes, that divides everything whose bits are in `common`.
constexpr unsigned gather_unit_bytes(uint64_t common) {
  unsigned unit = 16;
  while (common % unit != 0) unit /= 2;
  return unit;
}

}  // namespace gdsdata
