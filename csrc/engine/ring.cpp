#include "engine/ring.h"

#include <stdexcept>

namespace gdsdata {

Ring::Ring(size_t slots) : states_(slots, State::kFree) {
  counts_[static_cast<size_t>(State::kFree)] = slots;
  order_.reserve(slots);
  for (size_t slot = slots; slot-- > 0;) free_.push_back(slot);
}

std::optional<size_t> Ring::acquire() {
  if (free_.empty()) return std::nullopt;
  const size_t slot = free_.back();
  free_.pop_back();
  move(slot, State::kFree, State::kFilling);
  order_.push_back(slot);
  return slot;
}

void Ring::ready(size_t slot) { move(slot, State::kFilling, State::kReady); }

std::optional<size_t> Ring::head() const {
  return order_.empty() ? std::nullopt : std::optional<size_t>(order_.front());
}

size_t Ring::take() {
  const size_t slot = order_.front();
  move(slot, State::kReady, State::kLeased);
  order_.erase(order_.begin());
  return slot;
}

void Ring::release(size_t slot) {
  move(slot, State::kLeased, State::kFree);
  free_.push_back(slot);
}

void Ring::move(size_t slot, State from, State to) {
  if (states_[slot] != from) throw std::logic_error("ring: a slot left a state that it is not in");
  states_[slot] = to;
  --counts_[static_cast<size_t>(from)];
  ++counts_[static_cast<size_t>(to)];
}

}  // namespace gdsdata
