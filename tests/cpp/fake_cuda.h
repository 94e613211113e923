// What libfakecuda.so offers its tests besides the driver's functions. Plain C, for dlsym and for
// Python's ctypes.
#pragma once

#include <cstddef>
#include <cstdint>

struct FakeCudaObjects {
  uint64_t streams, events, allocations, registrations;
};

extern "C" {
// What was made and not let go of. Streams that still drain after their destruction do not count.
FakeCudaObjects fake_cuda_live_objects();
// How often a function was called, by the name it is looked up by without its version:
// "cuMemAlloc".
uint64_t fake_cuda_calls(const char* name);
// The next call of a function does nothing and returns `code`.
void fake_cuda_fail_next(const char* name, int code);
// The same for the call that comes after `calls` others.
void fake_cuda_fail_after(const char* name, uint64_t calls, int code);
// As after a fault on the device, or at the process's exit: every call returns `code`, and what was
// asked for and has not been done never is. 0 heals it.
void fake_cuda_break(int code);
// All as in the beginning, but what was made: no faults, short delays.
void fake_cuda_reset();
// Each copy and each kernel waits up to so long before it begins.
void fake_cuda_set_delay_us(uint64_t most);
// All copies together move so many bytes a second at most, whatever their streams: a link. 0: as
// many as they can.
void fake_cuda_set_link_bytes_per_s(uint64_t most);
// A program's own work, in the stream that a device has from the beginning: so long, behind what is
// there already.
void fake_cuda_keep_busy(int device, uint64_t us);
void fake_cuda_set_seed(uint64_t seed);
// Whether memory that is mapped read-only can be registered, as attribute 113 says.
void fake_cuda_set_read_only_register(int supported);
// Whether copies can be asked for together; a driver of before CUDA 13.0 cannot.
void fake_cuda_set_copy_batches(int supported);
// Whether the device sees memory registered read-only from now on where the processor does, as on
// x86.
void fake_cuda_set_one_address(int one);
// Whether all of it lies in one live allocation.
int fake_cuda_is_device_memory(const void* memory, size_t bytes);
// Whether the calling thread has a device current.
int fake_cuda_has_context();
}
