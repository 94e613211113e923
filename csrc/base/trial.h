#pragma once

#include <atomic>
#include <cstdint>

#include "tuning.h"

namespace gdsdata {

// Decides whether to try what pays in some places of a file and is dear in others: yes if it paid
// the last time, or was left out for a while. Thread-safe.
class Trial {
 public:
  bool is_due() {
    return last_paid_.load(std::memory_order_relaxed) ||
           left_out_.fetch_add(1, std::memory_order_relaxed) % tuning::kTriedEvery == tuning::kTriedEvery - 1;
  }
  void ended(bool paid) { last_paid_.store(paid, std::memory_order_relaxed); }

 private:
  std::atomic<bool> last_paid_{true};
  std::atomic<uint32_t> left_out_{0};
};

}  // namespace gdsdata
