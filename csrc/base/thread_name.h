// Names of threads, for `top -H`, `perf` and debuggers.
#pragma once

#include <pthread.h>

namespace gdsdata {

// Names the calling thread. Linux refuses names of more than 15 characters.
inline void name_this_thread(const char* name) { ::pthread_setname_np(::pthread_self(), name); }

}  // namespace gdsdata
