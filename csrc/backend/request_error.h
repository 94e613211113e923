// Errors that several backends report.
#pragma once

#include <cstdint>

#include "base/error.h"
#include "base/types.h"

namespace gdsdata {

// The file ends before the requested range does.
Error truncated_error(const File& file, uint64_t offset, uint64_t length);
inline Error truncated_error(const Request& request) {
  return truncated_error(*request.file, request.offset, request.length);
}

// The file rests (File::rest), and cannot be opened again.
Error closed_error(const Request& request);

// O_DIRECT was required, and the file refuses it.
Error direct_refused_error(const Request& request);

}  // namespace gdsdata
