// Installs a handler of SIGBUS. Other libraries (for example Python's faulthandler) also install
// and remove handlers, at any time and in any order.
#pragma once

#include <signal.h>

namespace gdsdata {

// Runs in the signal handler, so it must be async-signal-safe. Returns true if it has removed the
// cause: the access is then repeated.
using SigbusHandler = bool (*)(const siginfo_t& info);

// Makes `handler` the first to get each SIGBUS. If it returns false, the signal goes to the handler
// that was installed before. All calls pass the same `handler`. Cheap if nothing has changed since
// the last call. Thread-safe.
void put_sigbus_handler_in_front(SigbusHandler handler);

}  // namespace gdsdata
