// What several backends say of a request, in one wording.
#pragma once

#include "base/error.h"
#include "base/types.h"

namespace gdsdata {

// A read reached the end of its file too early.
Error truncated_error(const Request& request);

// O_DIRECT was asked for by name, and the file has none.
Error direct_refused_error(const Request& request);

}  // namespace gdsdata
