// Which backends serve, and why.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "backend/backend.h"

namespace gdsdata {

struct Selection {
  std::string name;            // "uring" or "posix": by way of memory that the processor can write
  std::string reason;          // why not the better one; empty when the best one or the one asked for was taken
  std::string device_backend;  // "cufile", which goes first for what is not in the page cache; empty: none
};

// `asked` is "auto", "uring", "posix" or "cufile". Throws Failure: kInvalidArgument for another
// name, kUnavailable where a backend was asked for by name, or `strict`, and cannot work here.
Selection select_backend(const std::string& asked, const BackendOptions& options, const Device& device);

// Tells a backend that reaches the device of device memory that will be used again and again, and
// returns what to let go of before the memory is freed; null where it does not help.
std::shared_ptr<void> announce_memory(const std::string& backend, const std::shared_ptr<Device>& device,
                                      std::span<std::byte> memory);

// Makes a selected backend, wrapped in the faults that the options ask for.
std::unique_ptr<Backend> make_backend(const std::string& name, const BackendOptions& options, Device& device);

}  // namespace gdsdata
