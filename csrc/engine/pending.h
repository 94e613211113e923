// A group in flight. Waits for its end.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>

#include "base/condition.h"
#include "engine/engine.h"

namespace gdsdata {

// Destroy it before the group's memory, which may be released as soon as `ended` returns true.
class Pending {
 public:
  // Submits the group. The worker that ends the group calls `on_end`, if any, once; it must not
  // block. `waits_now`: the caller calls `wait` at once and works there, so one worker less is
  // woken.
  Pending(Engine& engine, std::shared_ptr<Group> group, std::function<void()> on_end = {}, bool waits_now = false);
  bool ended() const { return state_->ended.load(std::memory_order_acquire); }
  // Waits until the group has ended, at most for `patience`. Returns whether it has. Does the
  // workers' work meanwhile. Calls `poll` regularly and rethrows its exceptions: the group then
  // stays in flight. In a forked child, returns false at once.
  bool wait(std::chrono::nanoseconds patience, const std::function<void()>& poll = {});
  // Whether `finish` would return at once.
  bool complete() const { return ended() && all_done(group_->result().copies); }
  // Call it after the end. Waits for copies to the device, and throws the group's error as Failure.
  void finish();
  void cancel() { group_->cancel(); }
  const Group& group() const { return *group_; }

 private:
  struct State {
    std::mutex mutex;
    Condition changed;
    std::atomic<bool> ended{false};
  };
  Engine& engine_;
  const std::shared_ptr<Group> group_;
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace gdsdata
