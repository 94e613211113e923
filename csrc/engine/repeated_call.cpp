#include "engine/repeated_call.h"

#include <utility>

#include "base/thread_name.h"

namespace gdsdata {

RepeatedCall::RepeatedCall(const char* thread_name, std::function<void()> call)
    : thread_name_(thread_name), call_(std::move(call)), thread_([this] { run(); }) {}

void RepeatedCall::end() {
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(ended_, true)) return;
  }
  changed_.notify_one();
  thread_.join();
}

void RepeatedCall::request() {
  {
    std::lock_guard lock(mutex_);
    requested_ = true;
  }
  changed_.notify_one();
}

void RepeatedCall::run() {
  name_this_thread(thread_name_);
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return requested_ || ended_; });
    if (ended_) return;
    requested_ = false;
    lock.unlock();
    call_();
    lock.lock();
  }
}

}  // namespace gdsdata
