// A batch that a consumer holds. At its end, the lease records how long the device uses the memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "device/device.h"

namespace gdsdata {

class Lease {
 public:
  // `streams`: the driver's handles of the streams that use it; none if the processor does. `count`
  // is one higher while the lease lives.
  Lease(std::shared_ptr<Device> device, std::shared_ptr<DeviceBuffer> buffer, std::vector<uintptr_t> streams,
        std::shared_ptr<std::atomic<size_t>> count);
  // Returns the buffer with an event of each stream, so that work already in these streams still
  // finds its content.
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  std::byte* data() const { return buffer_->data(); }
  void used_on(uintptr_t stream);

  // Adds a stream to the lease whose memory contains `address`. Returns false if there is none.
  static bool record_stream(const std::byte* address, uintptr_t stream);

 private:
  const std::shared_ptr<Device> device_;
  std::shared_ptr<DeviceBuffer> buffer_;
  std::mutex mutex_;
  std::vector<uintptr_t> streams_;
  const std::shared_ptr<std::atomic<size_t>> count_;
};

}  // namespace gdsdata
