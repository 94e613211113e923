// Memory for batches, kept from epoch to epoch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "device/device.h"

namespace gdsdata {

// Buffers of one size. When the last user of a batch releases it, on any thread, its buffer returns
// to the pool. Its memory is touched, so it is far cheaper than a new one. Its `uses` are the
// device's pending uses. The pool outlives prefetchers: the next epoch finds the buffers.
// Thread-safe.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 private:
  struct Pooled {
    std::unique_ptr<DeviceBuffer> buffer;
    std::shared_ptr<void> announced;
  };
  struct Taken;

 public:
  // The right to a buffer for a ring. Only `take` chooses it: the one that was released last, which
  // is most likely in a cache.
  class Reservation {
   public:
    explicit Reservation(BufferPool& pool);  // allocates what is missing; throws Failure
    ~Reservation();
    Reservation(const Reservation&) = delete;
    Reservation& operator=(const Reservation&) = delete;
    std::shared_ptr<DeviceBuffer> take() noexcept;  // once

   private:
    std::shared_ptr<Taken> taken_;
  };

  // Called with each buffer's memory when it is allocated. The result is released before it.
  using Announce = std::function<std::shared_ptr<void>(std::span<std::byte>)>;
  // Keeps at most `max_kept` buffers: those in a ring and spare ones, but not those of consumers.
  BufferPool(std::shared_ptr<Device> device, size_t buffer_bytes, size_t max_kept, Announce announce = {});
  void handed_over();  // a buffer that was taken belongs to a consumer now
  size_t buffer_bytes() const { return buffer_bytes_; }
  uint64_t max_kept_bytes() const { return max_kept_ * buffer_bytes_; }

 private:
  Pooled allocate();
  void release(Pooled pooled);
  const std::shared_ptr<Device> device_;
  const size_t buffer_bytes_;
  const size_t max_kept_;
  const Announce announce_;
  std::mutex mutex_;  // guards the members that follow; no buffer is allocated under it
  size_t kept_ = 0;
  size_t reserved_ = 0;        // of the spare ones, and of those that are being allocated
  std::vector<Pooled> spare_;  // last released last
};

}  // namespace gdsdata
