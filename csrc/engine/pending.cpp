#include "engine/pending.h"

#include <algorithm>
#include <utility>

namespace gdsdata {

Pending::Pending(Engine& engine, std::shared_ptr<Group> group, std::function<void()> on_end, bool waits_now)
    : engine_(engine), group_(std::move(group)) {
  group_->edit().on_done = [state = state_, on_end = std::move(on_end)] {
    {
      const std::lock_guard lock(state->mutex);
      state->ended.store(true, std::memory_order_release);
      state->changed.notify_all();
    }
    if (on_end) on_end();
  };
  engine_.submit(group_, waits_now);
}

bool Pending::wait(std::chrono::nanoseconds patience, const std::function<void()>& poll) {
  constexpr std::chrono::milliseconds kPollInterval{50};
  if (engine_.forked()) return false;  // the child has no workers, and locks may be held forever
  const auto begun = std::chrono::steady_clock::now();
  auto polled = begun;
  const auto left = [&](auto now) { return patience - (now - begun); };
  const auto poll_once = [&](auto now) {
    if (poll && now - polled >= kPollInterval) {
      polled = now;
      poll();
    }
  };
  while (!ended() && engine_.help_with(*group_)) {  // rather than sleep
    const auto now = std::chrono::steady_clock::now();
    poll_once(now);
    if (left(now).count() <= 0) return ended();
  }
  if (!ended()) engine_.hurry();  // help_with serves no writes, and serves one caller at a time
  std::unique_lock lock(state_->mutex);
  while (!ended()) {
    const auto now = std::chrono::steady_clock::now();
    if (left(now).count() <= 0) return false;
    state_->changed.wait_for(lock, std::min<std::chrono::nanoseconds>(left(now), kPollInterval));
    lock.unlock();
    poll_once(std::chrono::steady_clock::now());
    lock.lock();
  }
  return true;
}

void Pending::finish() {
  const GroupResult& result = group_->result();
  for (const auto& copy : result.copies) group_->is_short() ? wait_soon(*copy) : copy->wait();
  if (result.error) throw Failure(*result.error);
}

}  // namespace gdsdata
