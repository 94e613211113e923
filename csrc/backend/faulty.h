// Trouble by design, for tests: a backend around another one that delays, reorders and fails
// completions, and a plan, by a seed, that also makes single transfers short or interrupted.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "backend/backend.h"

namespace gdsdata {

// Written as "key=value,key=value". Probabilities are per call or completion, 0 to 1.
struct FaultPlan {
  uint64_t seed = 0;
  double shorten = 0;      // a transfer asks for a part of what it wants
  double interrupt = 0;    // a transfer ends in EINTR or EAGAIN before anything moved
  double late = 0;         // a completion is held back ...
  int64_t late_ms = 5;     // ... for so long
  double reorder = 0;      // a completion is held back behind the next one
  double fail = 0;         // a completion becomes an error
  int64_t fail_at = -1;    // the completion of this number (from 0, over this backend) becomes an error
  int64_t error = 5;       // its errno (5: EIO)
  double submit_throws = 0;  // a call throws what is no exception, before it does anything
  double reap_throws = 0;
  std::mt19937_64 random;

  // Throws Failure for a key it does not know.
  static FaultPlan parse(const std::string& text);
  bool happens(double probability);
  // How much of a transfer of `length` bytes to ask for: at least 1.
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
  std::unordered_map<uint64_t, Extent> extents_;  // of the requests in flight, by tag
  std::deque<Held> held_;
  std::vector<Completion> scratch_;
  int64_t completed_ = 0;
  std::mutex mutex_;
  std::condition_variable wakes_;
  bool interrupted_ = false;
};

}  // namespace gdsdata
