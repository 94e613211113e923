#include "engine/buffer_pool.h"

#include <utility>

namespace gdsdata {

// Owns a buffer that was taken.
struct BufferPool::Taken {
  explicit Taken(std::shared_ptr<BufferPool> pool) : pool(std::move(pool)) {}
  ~Taken() {
    if (pooled.buffer != nullptr) pool->release(std::move(pooled));
  }
  const std::shared_ptr<BufferPool> pool;
  Pooled pooled;
};

BufferPool::BufferPool(std::shared_ptr<Device> device, size_t buffer_bytes, size_t max_kept, Announce announce)
    : device_(std::move(device)), buffer_bytes_(buffer_bytes), max_kept_(max_kept), announce_(std::move(announce)) {
  spare_.reserve(max_kept);  // returning a buffer then needs no allocation
}

BufferPool::Reservation::Reservation(BufferPool& pool) : taken_(std::make_shared<Taken>(pool.shared_from_this())) {
  {
    std::lock_guard lock(pool.mutex_);
    if (++pool.reserved_ <= pool.spare_.size()) return;
    ++pool.kept_;
  }
  try {
    Pooled pooled = pool.allocate();
    std::lock_guard lock(pool.mutex_);
    pool.spare_.insert(pool.spare_.begin(), std::move(pooled));  // no cache has it
  } catch (...) {
    std::lock_guard lock(pool.mutex_);
    --pool.reserved_;
    --pool.kept_;
    throw;
  }
}

BufferPool::Reservation::~Reservation() {
  if (taken_ == nullptr) return;
  std::lock_guard lock(taken_->pool->mutex_);
  --taken_->pool->reserved_;
}

std::shared_ptr<DeviceBuffer> BufferPool::Reservation::take() noexcept {
  const std::shared_ptr<Taken> taken = std::move(taken_);
  BufferPool& pool = *taken->pool;
  std::lock_guard lock(pool.mutex_);
  taken->pooled = std::move(pool.spare_.back());
  pool.spare_.pop_back();
  --pool.reserved_;
  return {taken, taken->pooled.buffer.get()};
}

BufferPool::Pooled BufferPool::allocate() {
  Pooled pooled{device_->allocate(buffer_bytes_), nullptr};
  if (announce_) pooled.announced = announce_({pooled.buffer->data(), pooled.buffer->size_bytes()});
  return pooled;
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
