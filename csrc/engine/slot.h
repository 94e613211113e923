// A slot of a prefetcher's ring: a batch on its way, and the buffer that it is read into.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>

#include "engine/buffer_pool.h"
#include "engine/group.h"

namespace gdsdata {

// Not thread-safe.
struct Slot {
  std::shared_ptr<Group> group;  // reused for every batch
  size_t samples = 0;
  size_t offset = 0;   // of the first sample in the buffer
  GroupResult result;  // valid when the slot is ready
  std::shared_ptr<DeviceBuffer> buffer;  // null until `take_memory`
  std::optional<BufferPool::Reservation> reservation;

  // Throws Failure if there is no memory.
  void reserve(BufferPool& pool);
  // Takes the buffer that was reserved. Returns the place of the first sample.
  std::byte* take_memory() noexcept;
  // The next batch in the buffer must wait for copies of this one that are still in flight.
  // DeviceBuffer::uses must have capacity for them.
  void add_uses();
  // Returns its buffer, if it has one. That returns to the pool when the caller releases it.
  std::shared_ptr<DeviceBuffer> give_up_buffer(BufferPool& pool);
};

}  // namespace gdsdata
