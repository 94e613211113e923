// The process's handler of SIGBUS, which other libraries (Python's faulthandler, say) install and
// remove too, at any time and in any order.
#pragma once

#include <signal.h>

namespace gdsdata {

// Called in the signal handler, so async-signal-safe: true if it has removed the cause, so that the
// access is tried again.
using SigbusHandler = bool (*)(const siginfo_t& info);

// `handler`, always the same one, gets each SIGBUS first; others go to the handler that is
// installed now, as if this one were not there. Cheap if nothing has changed since the last call.
// Thread-safe.
void put_sigbus_handler_in_front(SigbusHandler handler);

}  // namespace gdsdata
