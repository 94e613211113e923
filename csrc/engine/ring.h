// The slots of a prefetcher and their states. Batches leave in the order of `acquire`.
//
//  Free --acquire--> Filling --ready--> Ready --take--> Leased --release--> Free
//
// Not thread-safe: the prefetcher's lock protects it.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace gdsdata {

class Ring {
 public:
  enum class State { kFree, kFilling, kReady, kLeased };

  explicit Ring(size_t slots);

  size_t slots() const { return states_.size(); }
  State state(size_t slot) const { return states_[slot]; }
  size_t count(State state) const { return counts_[static_cast<size_t>(state)]; }

  std::optional<size_t> acquire();         // a free slot, if there is one
  void ready(size_t slot);                 // its bytes have arrived, or it failed
  std::optional<size_t> head() const;      // the slot that leaves next: Filling or Ready
  bool head_ready() const { return head() && state(*head()) == State::kReady; }
  size_t take();                           // the head, which must be Ready
  void release(size_t slot);

 private:
  void move(size_t slot, State from, State to);
  std::vector<State> states_;
  size_t counts_[4] = {};
  std::vector<size_t> free_;   // last released first, because its memory is likely in a cache
  std::vector<size_t> order_;  // Filling and Ready slots, oldest first
};

}  // namespace gdsdata
