// The interface between the engine and the ways to move bytes. To add one, implement Backend, name
// it in select.cpp, and run the conformance tests on it.
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
  size_t queue_depth = 1;             // requests in flight, including completed ones not yet reaped
  uint64_t max_request_bytes = 0;     // the longest request that it accepts
  // True: a request is one piece in device memory. False: the processor can write the pieces.
  bool reaches_device = false;
};

// Only the thread that created an instance may use it, except for interrupt.
class Backend {
 public:
  virtual ~Backend() = default;  // nothing may be in flight
  virtual Capabilities capabilities() const = 0;
  // Announces memory that many requests will use. It outlives the backend.
  virtual void expect_memory(std::span<std::byte>) {}
  // Takes a prefix of `requests` and returns its length. If it takes fewer, it is busy: reap, then
  // try again. If nothing is in flight, it takes at least one. Each request taken ends in exactly
  // one completion. If it throws, it has taken none.
  virtual size_t submit(std::span<const Request> requests) = 0;
  // Returns completions in any order. Waits for `min` of them (0: none), at most `timeout`.
  virtual size_t reap(std::span<Completion> completions, size_t min, std::chrono::milliseconds timeout) = 0;
  // Makes the waiting reap, or else the next one, return with the completions it has. Call it from
  // any thread. It may do nothing if reap never waits, or only briefly.
  virtual void interrupt() {}
};

// Whether bytes bypass the page cache on their way to or from the disk.
enum class DirectMode : uint8_t {
  // kAuto: resident bytes come from the page cache, the rest by O_DIRECT if possible.
  kAuto,
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

// The implementations. Each throws Failure (kUnavailable, with the reason) if it cannot work.
std::unique_ptr<Backend> make_posix_backend(const BackendOptions& options);
std::unique_ptr<Backend> make_uring_backend(const BackendOptions& options);
std::unique_ptr<Backend> make_cufile_backend(const BackendOptions& options, Device& device);

// Why io_uring cannot be used here, or cuFile with this device, with a remedy. Empty if it can.
std::string uring_refusal();
std::string cufile_refusal(const Device& device);

}  // namespace gdsdata
