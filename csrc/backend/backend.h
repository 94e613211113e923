// The seam between the engine and the ways bytes move. To add a way: implement Backend, name it in
// select.cpp, and run the conformance tests over it.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "base/types.h"
#include "device/device.h"
#include "tuning.h"

namespace gdsdata {

struct Capabilities {
  const char* name = "";
  size_t queue_depth = 1;             // requests it keeps in flight, those that are ready included
  uint64_t max_request_bytes = 0;     // longest request it takes
  // Pieces are device memory, and each request has one; else they are memory that the processor can
  // write.
  bool reaches_device = false;
};

// One thread uses one instance, the thread that made it; but for interrupt.
class Backend {
 public:
  virtual ~Backend() = default;  // nothing is in flight
  virtual Capabilities capabilities() const = 0;
  // Memory that many requests will be read into or written from, if it helps to know. It outlives
  // the backend.
  virtual void expect_memory(std::span<std::byte>) {}
  // Takes a prefix of `requests` and returns its length; fewer than given means busy: reap, then
  // try again. With nothing in flight it takes at least one. Each request taken ends in exactly one
  // completion. If it throws, it has taken none.
  virtual size_t submit(std::span<const Request> requests) = 0;
  // Gives completions, in any order; waits for `min` of them (0: none) at most `timeout`.
  virtual size_t reap(std::span<Completion> completions, size_t min, std::chrono::milliseconds timeout) = 0;
  // From any thread: the reap that waits, or else the next one, comes back with what there is.
  // Nothing where reap never waits, or only for moments.
  virtual void interrupt() {}
};

// Whether a file's bytes are asked of the disk past the page cache.
enum class DirectMode : uint8_t {
  kAuto,    // what is in the page cache from there, the rest with O_DIRECT where the file system allows it
  kAlways,  // O_DIRECT only; a refusal is an error
  kNever,   // through the page cache only
};

struct BackendOptions {
  size_t queue_depth = tuning::kQueueDepth;
  uint64_t bounce_bytes = tuning::kLeastBounceBytes;
  uint64_t request_bytes = 1 << 20;
  DirectMode direct = DirectMode::kAuto;
  bool strict = false;  // a fallback is an error
  bool cufile_batch = false;  // cuFile's batch interface instead of blocking calls
  std::string faults;   // for tests, see faulty.h; empty: none
};

// The implementations. Each throws Failure (kUnavailable, with the reason) where it cannot work.
std::unique_ptr<Backend> make_posix_backend(const BackendOptions& options);
std::unique_ptr<Backend> make_uring_backend(const BackendOptions& options);
std::unique_ptr<Backend> make_cufile_backend(const BackendOptions& options, Device& device);

// Why io_uring cannot be used here, or cuFile with this device, with the remedy; empty where it
// can.
std::string uring_refusal();
std::string cufile_refusal(const Device& device);

}  // namespace gdsdata
