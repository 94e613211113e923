// Chooses backends.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "backend/backend.h"

namespace gdsdata {

struct Selection {
  std::string name;            // "uring" or "posix": uses memory that the processor can write
  std::string reason;          // why not the better one; empty if this is the best or the requested one
  // "cufile", which is tried first for bytes that are not in the page cache. Empty: none.
  std::string device_backend;
};

// `asked` is "auto", "uring", "posix" or "cufile". Throws Failure: kInvalidArgument for another
// name, kUnavailable if the requested backend, or with `strict` the best one, cannot work here.
Selection select_backend(const std::string& asked, const BackendOptions& options, const Device& device);

// Announces device memory that will be used many times to a backend that reaches the device.
// Release the result before the memory is freed. Null if registration does not help.
std::shared_ptr<void> announce_memory(const std::string& backend, const std::shared_ptr<Device>& device,
                                      std::span<std::byte> memory);

// Creates a selected backend, with the faults that the options name.
std::unique_ptr<Backend> make_backend(const std::string& name, const BackendOptions& options, Device& device);

}  // namespace gdsdata
