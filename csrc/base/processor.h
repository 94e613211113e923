// Which vector instructions this processor has, and the system permits.
#pragma once

#include <string>
#include <vector>

namespace gdsdata {

struct Processor {
  bool avx = false, avx2 = false;
  bool avx512 = false;  // F, BW, DQ and VL
  bool pclmul = false;  // with SSE4.1
  bool crc32c = false;  // SSE4.2, or Arm's CRC32
};

// The first call asks the processor. Functions that depend on it take it as an argument, so that
// tests can leave instructions out.
const Processor& processor();

// The names of what it has.
std::vector<std::string> names_of(const Processor& processor);

}  // namespace gdsdata
