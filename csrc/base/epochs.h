// Epoch-based reclamation: threads read objects of a shared structure without a lock and without
// counting references. An object that was removed is destroyed when no thread can be reading it.
//
//   a reader    Pin: slot = epoch ----> looks up and reads ----> end of the pin: slot = 0
//   a remover   removes the object ---> Limbo: ++epoch --------> is every slot 0, or at least the
//                                                                new epoch? then destroys it
//
// Why that is safe. These are sequentially consistent operations, so they have a single order. The
// remover clears the structure's pointer, then steps the epoch, and then looks at each slot:
//   - If it finds 0 and a pin is stored later, that reader looks up later still. It finds the
//     pointer cleared.
//   - If it finds the new epoch or a later one, that reader saw the step. It finds the pointer
//     cleared.
//   - In both cases, earlier pins of the slot have ended. Their ends released what the readers did,
//     and the remover acquires it.
//   - If it finds an earlier epoch, the object waits. So a pin delays only the destruction of
//     objects that are removed while it lives.
//
// Sources: K. Fraser, "Practical lock-freedom", 2004, section 5.2.3 (epochs and limbo lists);
// M. Desnoyers et al., "User-level implementations of read-copy update", 2012 (a reader's slot
// holds the counter).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace gdsdata {

class Limbo;

// Says which structure a thread reads, and since when. One thread at a time may use it. It has a
// cache line of its own.
class alignas(64) PinSlot {
 public:
  PinSlot();
  ~PinSlot();
  PinSlot(const PinSlot&) = delete;
  PinSlot& operator=(const PinSlot&) = delete;

 private:
  friend class Pin;
  friend class Limbo;
  std::atomic<uint64_t> since_{0};  // an epoch; 0: reads nothing
  std::atomic<const Limbo*> structure_{nullptr};
  void* registered_in_ = nullptr;  // the slots of the process that made it
};

// While a pin lives, its thread may read the objects that it finds in the structure. Keep it short:
// the memory and descriptors of removed objects wait for it. A slot has at most one pin.
class Pin {
 public:
  Pin(PinSlot& slot, const Limbo& structure);
  ~Pin() { slot_.since_.store(0, std::memory_order_release); }
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;

 private:
  PinSlot& slot_;
};

// Objects that were removed from one structure and may still be read. Not thread-safe: its owner
// has a lock. Only pins of this structure count, so a reader that hangs on the storage of one
// structure does not hold up others. When a limbo is destroyed, no thread may have a pin of it.
class Limbo {
 public:
  struct Object {
    std::shared_ptr<void> object;
    // If it is a part of another object, that one. A reader may hold that one beyond its pin, and
    // use the part.
    std::weak_ptr<void> whole = {};
  };

  Limbo() = default;
  Limbo(const Limbo&) = delete;
  Limbo& operator=(const Limbo&) = delete;

  // `remove` takes an object out of the structure, with sequentially consistent stores, and returns
  // it as an Object, or one of null. Returns false if it is null.
  template <typename Remove>
  bool add(Remove remove) {
    removed_.emplace_back();  // nothing may fail between the removal and its entry
    removed_.back().removed = remove();
    if (removed_.back().removed.object == nullptr) {
      removed_.pop_back();
      return false;
    }
    removed_.back().epoch = next_epoch();
    return true;
  }
  // Moves the objects that no thread reads or holds to `unused`.
  void take_unused(std::vector<std::shared_ptr<void>>& unused);
  size_t size() const { return removed_.size(); }

 private:
  struct Removed {
    Object removed;
    uint64_t epoch = 0;  // pins of this epoch or a later one do not find it
  };
  static uint64_t next_epoch();
  uint64_t oldest_pin() const;

  std::vector<Removed> removed_;  // oldest first
};

}  // namespace gdsdata
