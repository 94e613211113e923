// Injects faults, for tests. A FaultyBackend delays, reorders and fails completions of another
// backend. A FaultPlan decides by a seed, and also makes single transfers short or interrupted.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "backend/backend.h"
#include "base/condition.h"

namespace gdsdata {

// Parsed from "key=value,key=value". Probabilities are per call or completion, from 0 to 1.
struct FaultPlan {
  uint64_t seed = 0;
  double shorten = 0;      // a transfer requests only a part of its bytes
  double interrupt = 0;    // a transfer ends in EINTR or EAGAIN before anything moved
  double late = 0;         // a completion is delayed ...
  int64_t late_ms = 5;     // ... by so much
  double reorder = 0;      // a completion is delivered after the next one
  double fail = 0;         // a completion becomes an error
  int64_t fail_at = -1;    // the completion with this number (from 0, in this backend) becomes an error
  int64_t error = 5;       // its errno (5: EIO)
  double submit_throws = 0;  // a call throws something that is no std::exception, before it does anything
  double reap_throws = 0;
  std::mt19937_64 random;

  // Throws Failure if a key is unknown.
  static FaultPlan parse(const std::string& text);
  bool happens(double probability);
  // Returns how much of a transfer of `length` bytes to request: at least 1.
  uint64_t shortened(uint64_t length);
};

class FaultyBackend final : public Backend {
 public:
  FaultyBackend(std::unique_ptr<Backend> inner, FaultPlan plan);
  Capabilities capabilities() const override { return inner_->capabilities(); }
  void expect_memory(std::span<std::byte> memory) override { inner_->expect_memory(memory); }
  size_t submit(std::span<const Request> requests) override;
  size_t reap(std::span<Completion> completions, size_t min, std::chrono::milliseconds timeout) override;
  void interrupt() override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Held {
    Completion completion;
    Clock::time_point until;
  };
  struct Extent {
    const File* file;
    uint64_t offset;
    uint64_t length;
  };
  std::unique_ptr<Backend> inner_;
  FaultPlan plan_;
  std::unordered_map<uint64_t, Extent> extents_;  // of requests in flight, by tag
  std::deque<Held> held_;
  std::vector<Completion> scratch_;
  int64_t completed_ = 0;
  std::mutex mutex_;
  Condition wakes_;
  bool interrupted_ = false;
};

}  // namespace gdsdata
