// Which of many groups have ended, for one thread that waits for all of them.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/engine.h"

namespace gdsdata {

// Groups of one engine, each by a number of its own. Thread-safe.
class Endings {
 public:
  explicit Endings(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}
  ~Endings();
  Endings(const Endings&) = delete;
  Endings& operator=(const Endings&) = delete;

  // One more is expected: what is to be called at its end (a Pending's `on_end`).
  std::function<void()> expect(int64_t number);
  void not_begun();  // one that was expected and will not come

  // While somebody waits for the end of one himself, its end wakes nobody; if he has seen it,
  // nobody else is told of it.
  void begin_waiting(int64_t number);
  void end_waiting(int64_t number, bool has_seen_it);

  // Sleeps until some have ended, doing the workers' work before, and returns these; none when it
  // was closed and all that were expected have come, or as soon as `gives_up`, asked now and then
  // once it was closed, says so.
  std::vector<int64_t> take(const std::function<bool()>& gives_up);
  void close();

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<int64_t> ended;
    std::vector<int64_t> waited_for;
    size_t expected = 0;  // that have not been taken
    bool closed = false;
  };
  const std::shared_ptr<Engine> engine_;
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace gdsdata
