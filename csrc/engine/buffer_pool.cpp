#include "engine/buffer_pool.h"

#include <utility>

namespace gdsdata {

BufferPool::BufferPool(std::shared_ptr<Device> device, size_t buffer_bytes, size_t max_kept, Announce announce)
    : device_(std::move(device)), buffer_bytes_(buffer_bytes), max_kept_(max_kept), announce_(std::move(announce)) {
  spare_.reserve(max_kept);  // returning a buffer then needs no allocation
}

std::shared_ptr<DeviceBuffer> BufferPool::take() {
  Pooled pooled;
  {
    std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      pooled = std::move(spare_.back());  // the last one returned is most likely in a cache
      spare_.pop_back();
    } else {
      ++kept_;
    }
  }
  try {
    if (pooled.buffer == nullptr) {
      pooled.buffer = device_->allocate(buffer_bytes_);
      if (announce_) pooled.announced = announce_({pooled.buffer->data(), pooled.buffer->size_bytes()});
    }
    DeviceBuffer* buffer = pooled.buffer.release();
    return {buffer,
            [pool = shared_from_this(), announced = std::move(pooled.announced)](DeviceBuffer* returned) mutable {
              pool->release({std::unique_ptr<DeviceBuffer>(returned), std::move(announced)});
            }};
  } catch (...) {
    handed_over();
    throw;
  }
}

void BufferPool::handed_over() {
  std::lock_guard lock(mutex_);
  --kept_;
}

void BufferPool::release(Pooled pooled) {
  {
    std::lock_guard lock(mutex_);
    if (kept_ < max_kept_) {
      ++kept_;
      spare_.push_back(std::move(pooled));
      return;
    }
  }
  pooled.announced.reset();
}

}  // namespace gdsdata
