// State that belongs to one process and that a forked child does not inherit.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>

namespace gdsdata {

// The `State` of this process. A forked child gets a new one, because a lock in the parent's may be
// held by a thread that the child does not have. Never destroyed, because workers may outlive
// static destructors.
template <typename State>
State& of_this_process() {
  struct Made {
    const pid_t process = ::getpid();
    State state;
  };
  static std::atomic<Made*> current{new Made};
  Made* found = current.load(std::memory_order_acquire);
  while (found->process != ::getpid()) {
    auto* made = new Made;
    if (current.compare_exchange_strong(found, made)) return made->state;
    delete made;
  }
  return found->state;
}

}  // namespace gdsdata
