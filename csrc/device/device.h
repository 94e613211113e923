// Where batches live, and how bytes get there. The engine knows only this page; a device is added
// by giving it a Device and the things that it makes. All functions that take or make something
// throw Failure (kDevice, with the driver's own name for what went wrong) and may be called on any
// thread.
#pragma once

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

// A point in a stream: done when all that was put into the stream before it is done. Thread-safe.
class Event {
 public:
  virtual ~Event() = default;
  virtual bool done() = 0;
  virtual void wait() = 0;  // sleeps until it is done
};

// Waits for what takes less than a sleep: polls for a moment before it sleeps.
inline void wait_soon(Event& event) {
  const auto until = std::chrono::steady_clock::now() + tuning::kEventPolls;
  while (!event.done()) {
    if (std::chrono::steady_clock::now() > until) return event.wait();
  }
}

using Events = std::vector<std::shared_ptr<Event>>;

// Memory that batches are handed out in. Page-aligned.
class DeviceBuffer {
 public:
  virtual ~DeviceBuffer() = default;
  virtual std::byte* data() = 0;
  virtual size_t size_bytes() const = 0;
  // What still reads or writes it: whoever writes it next does so behind these.
  Events uses;
};

// Host memory that disks write into and copies to the device start from. Page-aligned.
class PinnedBuffer {
 public:
  virtual ~PinnedBuffer() = default;
  virtual std::byte* data() = 0;
  virtual size_t size_bytes() const = 0;
};

// Host memory of somebody else, a mapped file, that the device can read while this lives.
class Registration {
 public:
  virtual ~Registration() = default;
  virtual const std::byte* on_device() const = 0;  // where the device finds it
};

// Bytes that go to the device.
struct CopyIn {
  std::byte* device = nullptr;
  const std::byte* host = nullptr;
  size_t bytes = 0;
};

// An ordered queue of work for the device. Calls return at once; what they ask for happens in
// order, later.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual void copy_in(std::byte* device, const std::byte* host, size_t bytes) = 0;
  // All of them, in any order among themselves: as one where the driver can, which costs the link
  // less.
  virtual void copy_all_in(std::span<const CopyIn> copies) = 0;
  virtual void copy_out(std::byte* host, const std::byte* device, size_t bytes) = 0;
  // Copies `count` records of `bytes` each, from addresses[i] on (both as the device sees them), to
  // target + i * bytes. `addresses` is pinned, and stays as it is until this is done.
  virtual void gather(std::byte* target, const uint64_t* addresses, size_t count, size_t bytes) = 0;
  // Work that is put in from now on happens behind the event. Throws Failure if the event is of
  // another kind of device.
  virtual void wait(Event& event) = 0;
  virtual std::shared_ptr<Event> record() = 0;
};

// Waits until all that was put into a stream before is done. A lost device does nothing more.
// Without memory for an event it tries again: the stream may still use the caller's memory.
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

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;  // "cpu", "cuda:0"
  virtual int ordinal() const = 0;       // among devices of its kind
  // Whether the processor can write DeviceBuffers: then backends deliver there and no stream is
  // involved.
  virtual bool host_addressable() const = 0;
  virtual std::unique_ptr<DeviceBuffer> allocate(size_t bytes) = 0;
  virtual std::unique_ptr<PinnedBuffer> allocate_pinned(size_t bytes) = 0;
  virtual std::unique_ptr<Registration> register_mapping(const std::byte* memory, size_t bytes) = 0;
  virtual std::unique_ptr<Stream> make_stream() = 0;
  // A stream of somebody else, by the driver's handle for it. It must outlive the object.
  virtual std::unique_ptr<Stream> foreign_stream(uintptr_t handle) = 0;
  // For libraries that look for the device on the thread that calls them.
  virtual void bind_thread() = 0;
};

// The processor's own memory.
std::shared_ptr<Device> host_device();

// A GPU, by its place among those that CUDA_VISIBLE_DEVICES leaves. The same object at every call.
// Throws Failure (kUnavailable) where there is no driver, or no such GPU.
std::shared_ptr<Device> cuda_device(int ordinal);

}  // namespace gdsdata
