// Collects the ends of many groups for one thread that waits for all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/condition.h"
#include "engine/engine.h"

namespace gdsdata {

// Groups of one engine, each with its own number. Thread-safe.
class Endings {
 public:
  explicit Endings(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}
  ~Endings();
  Endings(const Endings&) = delete;
  Endings& operator=(const Endings&) = delete;

  // Expects one more group. Returns the function to call at its end (a Pending's `on_end`).
  std::function<void()> expect(int64_t number);
  void not_begun();  // an expected group was not submitted

  // While a caller waits for this group itself, its end does not wake `take`. If that caller has
  // seen the end, `take` does not return it.
  void begin_waiting(int64_t number);
  void end_waiting(int64_t number, bool has_seen_it);

  // Waits until some groups have ended, and returns those. Does the workers' work before it sleeps.
  // Returns none if it was closed and all expected groups were returned. After close it also calls
  // `gives_up` regularly, and returns none if that returns true.
  std::vector<int64_t> take(const std::function<bool()>& gives_up);
  void close();

 private:
  struct State {
    std::mutex mutex;
    Condition changed;
    std::vector<int64_t> ended;
    std::vector<int64_t> waited_for;
    size_t expected = 0;  // not returned by `take` yet
    bool closed = false;
  };
  const std::shared_ptr<Engine> engine_;
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace gdsdata
