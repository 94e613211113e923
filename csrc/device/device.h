// Where batches live, and how bytes get there. The engine knows only this page; a device is added by
// giving it a Device and the three things that it makes.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace gdsdata {

// Memory that batches are handed out in. Page-aligned.
class DeviceBuffer {
 public:
  virtual ~DeviceBuffer() = default;
  virtual std::byte* data() = 0;
  virtual size_t size_bytes() const = 0;
};

// Host memory that disks write into and copies to the device start from. Page-aligned.
class PinnedBuffer {
 public:
  virtual ~PinnedBuffer() = default;
  virtual std::byte* data() = 0;
  virtual size_t size_bytes() const = 0;
};

// A point in a stream: done when all that was put into the stream before it is done.
class Event {
 public:
  virtual ~Event() = default;
  virtual bool done() = 0;
};

// An ordered queue of copies, used by one thread.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual void copy_in(std::byte* device, const std::byte* host, size_t bytes) = 0;
  virtual std::unique_ptr<Event> record() = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;
  // Whether the processor can write DeviceBuffers: then backends deliver there and no stream is involved.
  virtual bool host_addressable() const = 0;
  // Throw Failure where memory is not to be had.
  virtual std::unique_ptr<DeviceBuffer> allocate(size_t bytes) = 0;
  virtual std::unique_ptr<PinnedBuffer> allocate_pinned(size_t bytes) = 0;
  virtual std::unique_ptr<Stream> make_stream() = 0;
};

// The processor's own memory.
std::shared_ptr<Device> host_device();

}  // namespace gdsdata
