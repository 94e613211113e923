// The memo of a pickler: the objects that a pickle can refer to again, by their numbers.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace gdsdata {

// Numbers by address: a hash table with open addressing. No address may be 0.
class NumberByAddress {
 public:
  std::optional<uint32_t> find(uint64_t address) const {
    const Slot& slot = slots_[place_of(address)];
    return slot.address == 0 ? std::nullopt : std::optional(slot.number);
  }

  // Adds an address that is not there yet.
  void add(uint64_t address, uint32_t number) {
    if (++count_ * 2 > slots_.size()) grow();
    slots_[place_of(address)] = {address, number};
  }

 private:
  struct Slot {
    uint64_t address = 0;
    uint32_t number = 0;
  };

  size_t place_of(uint64_t address) const {
    const size_t last = slots_.size() - 1;
    // Objects lie on multiples of 16 bytes. The multiplication spreads their addresses (Knuth).
    size_t place = ((address >> 4) * 0x9E3779B97F4A7C15U >> 32) & last;
    while (slots_[place].address != 0 && slots_[place].address != address) place = (place + 1) & last;
    return place;
  }

  void grow() {
    std::vector<Slot> before(slots_.size() * 2);
    before.swap(slots_);
    for (const Slot& slot : before) {
      if (slot.address != 0) slots_[place_of(slot.address)] = slot;
    }
  }

  std::vector<Slot> slots_ = std::vector<Slot>(1 << 10);  // their count is a power of two
  size_t count_ = 0;
};

// It owns a reference to each object, so no other object gets the same address. Needs the GIL.
class PickleMemo {
 public:
  PickleMemo() = default;
  ~PickleMemo() {
    for (PyObject* const object : objects_) Py_DECREF(object);
  }
  PickleMemo(const PickleMemo&) = delete;
  PickleMemo& operator=(const PickleMemo&) = delete;

  std::optional<uint32_t> number_of(PyObject* object) const {
    return numbers_.find(reinterpret_cast<uintptr_t>(object));
  }

  // Returns the number of an object that is not in the memo yet.
  uint32_t add(PyObject* object) {
    Py_INCREF(object);
    objects_.push_back(object);
    numbers_.add(reinterpret_cast<uintptr_t>(object), next_);
    return next_++;
  }

  // Returns the number of an object that nothing will refer to again.
  uint32_t skip() { return next_++; }

 private:
  NumberByAddress numbers_;
  std::vector<PyObject*> objects_;
  uint32_t next_ = 0;
};

}  // namespace gdsdata
