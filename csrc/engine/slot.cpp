#include "engine/slot.h"

#include <utility>

namespace gdsdata {

void Slot::reserve(BufferPool& pool) {
  if (buffer == nullptr && !reservation) reservation.emplace(pool);
}

std::byte* Slot::take_memory() noexcept {
  if (buffer == nullptr) {
    buffer = reservation->take();
    reservation.reset();
  }
  return buffer->data() + offset;
}

void Slot::add_uses() {
  auto& uses = buffer->uses;
  uses.insert(uses.end(), result.copies.begin(), result.copies.end());
  result.copies.clear();
}

std::shared_ptr<DeviceBuffer> Slot::give_up_buffer(BufferPool& pool) {
  reservation.reset();
  if (buffer == nullptr) return nullptr;
  add_uses();
  pool.handed_over();
  return std::exchange(buffer, nullptr);
}

}  // namespace gdsdata
