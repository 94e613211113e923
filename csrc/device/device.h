// The memory in which batches live, and how bytes get there. The engine uses only this interface.
// To add a device, implement Device and the classes that it returns. All functions are thread-safe.
// Those that allocate or enqueue throw Failure (kDevice) with the driver's name of the error.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "tuning.h"

namespace gdsdata {

// A point in a stream. It is done when all work that was enqueued before it is done. Thread-safe.
class Event {
 public:
  virtual ~Event() = default;
  virtual bool done() = 0;
  virtual void wait() = 0;  // sleeps until it is done
};

// For waits that are shorter than a sleep takes: polls for a moment before it sleeps.
inline void wait_soon(Event& event) {
  const auto until = std::chrono::steady_clock::now() + tuning::kEventPolls;
  while (!event.done()) {
    if (std::chrono::steady_clock::now() > until) return event.wait();
  }
}

using Events = std::vector<std::shared_ptr<Event>>;

// Returns false if the device is lost: the next wait throws.
inline bool all_done(const Events& events) noexcept {
  try {
    return std::all_of(events.begin(), events.end(), [](const auto& event) { return event->done(); });
  } catch (...) {
    return false;
  }
}

// The memory of a batch. Page-aligned.
class DeviceBuffer {
 public:
  virtual ~DeviceBuffer() = default;
  virtual std::byte* data() = 0;
  virtual size_t size_bytes() const = 0;
  // Events of work that still reads or writes the buffer. The next write must wait for them.
  Events uses;
};

// Host memory that disks write to, and from which copies to the device start. Page-aligned.
class PinnedBuffer {
 public:
  virtual ~PinnedBuffer() = default;
  virtual std::byte* data() = 0;
  virtual size_t size_bytes() const = 0;
};

// Host memory with another owner (a mapped file), which the device can read while this lives.
class Registration {
 public:
  virtual ~Registration() = default;
  virtual const std::byte* on_device() const = 0;  // its address on the device
};

struct CopyIn {
  std::byte* device = nullptr;
  const std::byte* host = nullptr;
  size_t bytes = 0;
};

// An ordered queue of work for the device. Calls return at once; the work happens later, in order.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual void copy_in(std::byte* device, const std::byte* host, size_t bytes) = 0;
  // Copies all, in any order. One operation, which costs the link less, if the driver can.
  virtual void copy_all_in(std::span<const CopyIn> copies) = 0;
  virtual void copy_out(std::byte* host, const std::byte* device, size_t bytes) = 0;
  // Copies `count` records of `bytes` bytes each from addresses[i] to target + i * bytes, both on
  // the device. `addresses` is pinned memory and must stay unchanged until this is done.
  virtual void gather(std::byte* target, const uint64_t* addresses, size_t count, size_t bytes) = 0;
  // Later work in this stream waits for the event. Throws Failure if the kinds of device differ.
  virtual void wait(Event& event) = 0;
  virtual std::shared_ptr<Event> record() = 0;
};

// Waits until all earlier work in the stream is done, or the device is lost. If there is no memory
// for an event, tries again, because the stream may still use the caller's memory.
inline void finish(Stream& stream) noexcept {
  constexpr std::chrono::milliseconds kPause{1};
  while (true) {
    try {
      return stream.record()->wait();
    } catch (const std::bad_alloc&) {
      std::this_thread::sleep_for(kPause);
    } catch (...) {
      return;
    }
  }
}

struct AddressRange {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;  // "cpu", "cuda:0"
  virtual int ordinal() const = 0;       // among devices of its kind
  // True if the processor can write DeviceBuffers: backends deliver there, without a stream.
  virtual bool host_addressable() const = 0;
  virtual std::unique_ptr<DeviceBuffer> allocate(size_t bytes) = 0;
  virtual std::unique_ptr<PinnedBuffer> allocate_pinned(size_t bytes) = 0;
  virtual std::unique_ptr<Registration> register_mapping(const std::byte* memory, size_t bytes) = 0;
  virtual std::unique_ptr<Stream> make_stream() = 0;
  // A stream with another owner, by the driver's handle. It must outlive the returned object.
  virtual std::unique_ptr<Stream> foreign_stream(uintptr_t handle) = 0;
  // The allocation that holds an address of device memory; empty if there is none. One copy may not
  // use two allocations, even if they are adjacent. Memory of the processor is one.
  virtual AddressRange allocation_of(const std::byte* memory) = 0;
  // For a thread of this package that calls libraries: the device is its current one from now on,
  // and its calls end no capture of a CUDA graph by another thread.
  virtual void bind_thread() = 0;
  // See BesideCaptures. Returns whether to step back.
  virtual bool step_beside_captures() noexcept = 0;
  virtual void step_back() noexcept = 0;
};

// While it lives, no call of the driver by this thread ends the capture of a CUDA graph by another
// thread, or fails because of it. Each call cares for that by itself. That takes less than 1 us
// (H200), and nothing within a block of this kind.
class BesideCaptures {
 public:
  explicit BesideCaptures(Device& device) : device_(device), stepped_(device.step_beside_captures()) {}
  ~BesideCaptures() {
    if (stepped_) device_.step_back();
  }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  Device& device_;
  const bool stepped_;
};

// The processor's own memory.
std::shared_ptr<Device> host_device();

// A GPU, by its index among those that CUDA_VISIBLE_DEVICES allows. Each call returns the same
// object. Throws Failure (kUnavailable) if there is no driver or no such GPU.
std::shared_ptr<Device> cuda_device(int ordinal);

// Exchanges the calling thread's mode towards captures of CUDA graphs by other threads (the
// driver's numbers). Returns the mode before. Throws Failure.
int exchange_capture_mode(int mode);

}  // namespace gdsdata
