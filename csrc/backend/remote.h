// A backend for files whose bytes may be on a server: ranges that are not here come over HTTP, and
// another backend serves the rest.
#pragma once

#include <memory>

#include "backend/backend.h"

namespace gdsdata {

// `local` serves the requests that are not remote (see Request::remote).
std::unique_ptr<Backend> make_remote_backend(std::unique_ptr<Backend> local);

}  // namespace gdsdata
