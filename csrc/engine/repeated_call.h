// Calls a function on a thread of its own whenever that is requested.
#pragma once

#include <functional>
#include <mutex>
#include <thread>

#include "base/condition.h"

namespace gdsdata {

class RepeatedCall {
 public:
  // `call` must not throw. Throws std::system_error if no thread is available.
  RepeatedCall(const char* thread_name, std::function<void()> call);
  ~RepeatedCall() { end(); }
  RepeatedCall(const RepeatedCall&) = delete;
  RepeatedCall& operator=(const RepeatedCall&) = delete;

  // Does not wait. All requests during a call become one more call.
  void request();
  // No call begins after this. Waits for one in progress, if no other thread has ended it.
  void end();

 private:
  void run();

  const char* const thread_name_;
  const std::function<void()> call_;
  std::mutex mutex_;  // guards the next two
  bool requested_ = false;
  bool ended_ = false;
  Condition changed_;
  std::thread thread_;
};

}  // namespace gdsdata
