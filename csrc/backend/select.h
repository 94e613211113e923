// Which backend serves, and why.
#pragma once

#include <string>

#include "backend/backend.h"

namespace gdsdata {

struct Selection {
  std::string name;    // "uring" or "posix"
  std::string reason;  // why not the better one; empty when the best one or the one asked for was taken
};

// `asked` is "auto", "uring" or "posix". Throws Failure: kInvalidArgument for another name, kUnavailable
// where a backend was asked for by name, or `strict`, and cannot work here.
Selection select_backend(const std::string& asked, bool strict);

// Makes the selected backend, wrapped in the faults that the options ask for.
std::unique_ptr<Backend> make_backend(const std::string& name, const BackendOptions& options, Device& device);

}  // namespace gdsdata
