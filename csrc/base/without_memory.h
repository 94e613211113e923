// Calls that must succeed even if there is no memory for them now, as in a destructor.
#pragma once

#include <chrono>
#include <new>
#include <thread>

namespace gdsdata {

// Makes a call again until there is memory for it. Ignores its other exceptions.
template <typename Call>
void retry_without_memory(const Call& call) noexcept {
  constexpr std::chrono::milliseconds kPause{1};
  while (true) {
    try {
      return call();
    } catch (const std::bad_alloc&) {
      std::this_thread::sleep_for(kPause);
    } catch (...) {
      return;
    }
  }
}

}  // namespace gdsdata
