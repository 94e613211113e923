// Errors that several backends report.
#pragma once

#include "base/error.h"
#include "base/types.h"

namespace gdsdata {

// The file ends before the requested range does.
Error truncated_error(const Request& request);

// The file rests (File::rest), and cannot be opened again.
Error closed_error(const Request& request);

// O_DIRECT was required, and the file refuses it.
Error direct_refused_error(const Request& request);

}  // namespace gdsdata
