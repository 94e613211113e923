#include "base/sigbus.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>

namespace gdsdata {

namespace {

// Other libraries keep the handler that they found, and install it again when they leave. A single
// function in front of all others would therefore not know which one to call: the one it found
// first, or a later one that may have left. So each handler that is found in front gets a place,
// with a function of its own that calls it. Whichever of these functions is installed again, its
// part of the chain is the right one, and the chain has no cycle. A place never changes after its
// first use, so signal handlers read it without a lock.
constexpr size_t kMostPlaces = 16;

struct Place {
  std::atomic<bool> used{false};
  std::atomic<void (*)(int)> handler{SIG_DFL};
  std::atomic<void (*)(int, siginfo_t*, void*)> action{nullptr};  // if not null, used instead of `handler`

  bool holds(const struct sigaction& found) const {
    if (!used.load(std::memory_order_acquire)) return false;
    const bool is_action = (found.sa_flags & SA_SIGINFO) != 0;
    return is_action ? action.load() == found.sa_sigaction
                     : action.load() == nullptr && handler.load() == found.sa_handler;
  }
  void fill(const struct sigaction& found) {
    if ((found.sa_flags & SA_SIGINFO) != 0) {
      action = found.sa_sigaction;
    } else {
      handler = found.sa_handler;
    }
    used.store(true, std::memory_order_release);
  }
};

Place places[kMostPlaces];
std::atomic<SigbusHandler> first_handler{nullptr};

// The last SIGBUS that this thread passed to another handler. Libraries that save and restore
// handlers carelessly can still create a cycle with ours. So no place is called twice for a signal.
struct Passed {
  const void* address = nullptr;
  int code = 0;
  const siginfo_t* info = nullptr;  // the argument of the other handler
  unsigned called = 0;              // one bit for each place
  unsigned returned = 0;            // places whose handler returned
  int64_t returned_ns = 0;
};
// Initial-exec, so that the signal handler never allocates when it reads this.
[[gnu::tls_model("initial-exec")]] thread_local Passed passed;

// A repeated access faults within this time. A later fault at the same address is a new one.
constexpr int64_t kAtOnceNs = 10'000'000;

int64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

// True if the processor raised it: the access is repeated when the handler returns.
bool is_fault(const siginfo_t& info) { return info.si_code > 0 && info.si_code != BUS_MCEERR_AO; }

// Returns the places that were already called for this signal.
unsigned called_before(const siginfo_t* info) {
  if (info == passed.info) return passed.called;  // a handler that we called has called us
  const bool at_once = passed.returned != 0 && now_ns() - passed.returned_ns < kAtOnceNs;
  if (!is_fault(*info)) {  // sent, perhaps by a handler that gives up and raises it again
    const bool by_us = info->si_code <= 0 && info->si_pid == ::getpid();
    return by_us && (at_once || passed.called != passed.returned) ? passed.called : 0;
  }
  const bool same = info->si_addr == passed.address && info->si_code == passed.code;
  return same && at_once ? passed.returned : 0;
}

// The default action: the signal ends the process.
void die(siginfo_t* info) {
  struct sigaction standard{};
  standard.sa_handler = SIG_DFL;
  ::sigemptyset(&standard.sa_mask);
  ::sigaction(SIGBUS, &standard, nullptr);
  // A fault occurs again when this returns. A signal that was sent does not, so it is sent once
  // more. It stays blocked until this returns.
  if (!is_fault(*info)) ::syscall(SYS_rt_tgsigqueueinfo, ::getpid(), ::syscall(SYS_gettid), SIGBUS, info);
}

void pass_on(size_t place_index, int signal_number, siginfo_t* info, void* context) {
  const Place& place = places[place_index];
  const auto action = place.action.load();
  const auto handler = place.handler.load();
  const unsigned bit = 1U << place_index;
  const unsigned called = called_before(info);
  const bool ignored = action == nullptr && handler == SIG_IGN;
  if (ignored && !is_fault(*info)) return;
  if (ignored || (action == nullptr && handler == SIG_DFL) || (called & bit) != 0) return die(info);
  siginfo_t mine = *info;  // identifies this call
  passed = {info->si_addr, info->si_code, &mine, called | bit, called & passed.returned, 0};
  if (action != nullptr) {
    action(signal_number, &mine, context);
  } else {
    handler(signal_number);
  }
  passed.info = nullptr;
  passed.returned |= bit;
  passed.returned_ns = now_ns();
}

template <size_t kPlace>
void handle_sigbus(int signal_number, siginfo_t* info, void* context) {
  if (!first_handler.load()(*info)) pass_on(kPlace, signal_number, info, context);
}

constexpr auto kHandlers = []<size_t... kPlaces>(std::index_sequence<kPlaces...>) {
  return std::array{&handle_sigbus<kPlaces>...};
}(std::make_index_sequence<kMostPlaces>());

bool is_ours(const struct sigaction& found) {
  if ((found.sa_flags & SA_SIGINFO) == 0) return false;
  for (const auto handler : kHandlers) {
    if (found.sa_sigaction == handler) return true;
  }
  return false;
}

}  // namespace

void put_sigbus_handler_in_front(SigbusHandler handler) {
  struct sigaction found{};
  ::sigaction(SIGBUS, nullptr, &found);
  if (is_ours(found)) return;
  static std::mutex mutex;  // serializes installations
  std::lock_guard lock(mutex);
  first_handler = handler;
  ::sigaction(SIGBUS, nullptr, &found);
  if (is_ours(found)) return;
  size_t at = 0;
  while (at < kMostPlaces && places[at].used && !places[at].holds(found)) ++at;
  if (at == kMostPlaces) return;  // no place is left, so the found handler keeps the signal
  if (!places[at].used) places[at].fill(found);
  struct sigaction action{};
  action.sa_sigaction = kHandlers[at];
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(SIGBUS, &action, nullptr);
}

}  // namespace gdsdata
