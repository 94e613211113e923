#include "engine/endings.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace gdsdata {

Endings::~Endings() {
  // In a forked child, the sleeping thread is gone: destroying `changed` would wait forever.
  if (engine_->forked()) new std::shared_ptr<State>(state_);
}

std::function<void()> Endings::expect(int64_t number) {
  const std::lock_guard lock(state_->mutex);
  state_->ended.reserve(state_->expected + 1);  // the end itself then needs no allocation
  ++state_->expected;
  return [state = state_, number] {
    const std::lock_guard lock(state->mutex);
    state->ended.push_back(number);
    const auto& waited_for = state->waited_for;
    if (std::find(waited_for.begin(), waited_for.end(), number) == waited_for.end()) state->changed.notify_one();
  };
}

void Endings::not_begun() {
  const std::lock_guard lock(state_->mutex);
  --state_->expected;
  state_->changed.notify_one();
}

void Endings::begin_waiting(int64_t number) {
  if (engine_->forked()) return;
  const std::lock_guard lock(state_->mutex);
  state_->waited_for.push_back(number);
}

void Endings::end_waiting(int64_t number, bool has_seen_it) {
  if (engine_->forked()) return;
  const std::lock_guard lock(state_->mutex);
  auto& waited_for = state_->waited_for;
  waited_for.erase(std::find(waited_for.begin(), waited_for.end(), number));
  if (has_seen_it) state_->expected -= std::erase(state_->ended, number);
  if (!state_->ended.empty() || state_->closed) state_->changed.notify_one();
}

std::vector<int64_t> Endings::take(const std::function<bool()>& gives_up) {
  constexpr std::chrono::milliseconds kPollInterval{50};
  std::vector<int64_t> ended;
  std::unique_lock lock(state_->mutex);
  while (true) {
    ended = state_->ended;
    state_->ended.clear();  // keeps its capacity
    state_->expected -= ended.size();
    if (!ended.empty() || (state_->closed && (state_->expected == 0 || gives_up()))) return ended;
    lock.unlock();
    const bool helped = engine_->help(Priority::kBackground);  // rather than sleep
    lock.lock();
    if (helped || !state_->ended.empty()) continue;
    if (state_->closed) {
      state_->changed.wait_for(lock, kPollInterval);
    } else {
      state_->changed.wait(lock);
    }
  }
}

void Endings::close() {
  if (engine_->forked()) return;
  const std::lock_guard lock(state_->mutex);
  state_->closed = true;
  state_->changed.notify_one();
}

}  // namespace gdsdata
