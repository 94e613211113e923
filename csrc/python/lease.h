// A batch in somebody's hands: who lets go of it says until when the device uses its memory.
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
  // `streams`: those on which it is used, by the driver's handles; none where the processor uses
  // it. `count` is one higher while this lives.
  Lease(std::shared_ptr<Device> device, std::shared_ptr<DeviceBuffer> buffer, std::vector<uintptr_t> streams,
        std::shared_ptr<std::atomic<size_t>> count);
  // The buffer goes back with an event of each stream: what was put into them until now still finds
  // its content.
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  std::byte* data() const { return buffer_->data(); }
  void used_on(uintptr_t stream);

  // Adds a stream to the lease whose memory holds `address`; false where there is none.
  static bool record_stream(const std::byte* address, uintptr_t stream);

 private:
  const std::shared_ptr<Device> device_;
  std::shared_ptr<DeviceBuffer> buffer_;
  std::mutex mutex_;
  std::vector<uintptr_t> streams_;
  const std::shared_ptr<std::atomic<size_t>> count_;
};

}  // namespace gdsdata
