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

// Other libraries keep the handler that they found, and install it again when they leave. So a
// single function in front of all others would not know any more whom to call: the one that it
// found first, or the one that has left since. Each handler that is found in front gets a place
// instead, with a function of its own that calls it: a chain without a cycle, whose right part is
// in force whichever function is installed again. A place never changes once it is used, so signal
// handlers read it without a lock.
constexpr size_t kMostPlaces = 16;

struct Place {
  std::atomic<bool> used{false};
  std::atomic<void (*)(int)> handler{SIG_DFL};
  std::atomic<void (*)(int, siginfo_t*, void*)> action{nullptr};  // if not null, in the place of `handler`

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

// The last SIGBUS of a thread that went to another handler. Libraries that save and restore
// handlers carelessly can still make a cycle of them and us: no place is called twice for the same
// one.
struct Passed {
  const void* address = nullptr;
  int code = 0;
  const siginfo_t* info = nullptr;  // what the other handler was called with
  unsigned called = 0;              // places, a bit each
  unsigned returned = 0;            // those whose handler has come back
  int64_t returned_ns = 0;
};
// Initial-exec, so that the signal handler never allocates when it reads it.
[[gnu::tls_model("initial-exec")]] thread_local Passed passed;

// An access that is tried again faults at once. A later one of the same address is another one.
constexpr int64_t kAtOnceNs = 10'000'000;

int64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

// By the processor: the access is tried again when the handler returns.
bool is_fault(const siginfo_t& info) { return info.si_code > 0 && info.si_code != BUS_MCEERR_AO; }

// The places that have been called for this one already.
unsigned called_before(const siginfo_t* info) {
  if (info == passed.info) return passed.called;  // a handler that we called calls us in turn
  const bool at_once = passed.returned != 0 && now_ns() - passed.returned_ns < kAtOnceNs;
  if (!is_fault(*info)) {  // sent: by a handler that gives up and raises the signal once more?
    const bool by_us = info->si_code <= 0 && info->si_pid == ::getpid();
    return by_us && (at_once || passed.called != passed.returned) ? passed.called : 0;
  }
  const bool same = info->si_addr == passed.address && info->si_code == passed.code;
  return same && at_once ? passed.returned : 0;
}

// What the system does by default: the process dies of the signal.
void die(siginfo_t* info) {
  struct sigaction standard{};
  standard.sa_handler = SIG_DFL;
  ::sigemptyset(&standard.sa_mask);
  ::sigaction(SIGBUS, &standard, nullptr);
  // A fault comes again when this returns. What was sent does not: it is sent once more, and waits
  // until then.
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
  siginfo_t mine = *info;  // so that this call is told from others
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
  static std::mutex mutex;  // of those who install
  std::lock_guard lock(mutex);
  first_handler = handler;
  ::sigaction(SIGBUS, nullptr, &found);
  if (is_ours(found)) return;
  size_t at = 0;
  while (at < kMostPlaces && places[at].used && !places[at].holds(found)) ++at;
  if (at == kMostPlaces) return;  // so many different ones: the last one keeps the signal
  if (!places[at].used) places[at].fill(found);
  struct sigaction action{};
  action.sa_sigaction = kHandlers[at];
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(SIGBUS, &action, nullptr);
}

}  // namespace gdsdata
