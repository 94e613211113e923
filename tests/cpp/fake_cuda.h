// Functions of libfakecuda.so for tests, besides the driver's. Plain C, for dlsym and ctypes.
#pragma once

#include <cstddef>
#include <cstdint>

struct FakeCudaObjects {
  uint64_t streams, events, allocations, registrations;
  uint64_t registered_bytes;
};

extern "C" {
// The objects that exist. Streams that still drain after their destruction do not count.
FakeCudaObjects fake_cuda_live_objects();
// How often a function was called. `name` is the driver's name without its version: "cuMemAlloc".
uint64_t fake_cuda_calls(const char* name);
// The next call of a function does nothing and returns `code`.
void fake_cuda_fail_next(const char* name, int code);
// The same for the call after the next `calls` ones.
void fake_cuda_fail_after(const char* name, uint64_t calls, int code);
// Simulates a fault on the device, or the process's exit: every call returns `code`, and pending
// work is never done. 0 repairs the device.
void fake_cuda_break(int code);
// Resets everything except existing objects: no faults, short delays.
void fake_cuda_reset();
// Each copy and each kernel waits up to so long before it begins.
void fake_cuda_set_delay_us(uint64_t most);
// Limits the rate of all copies together, of all streams, as a link does. 0: no limit.
void fake_cuda_set_link_bytes_per_s(uint64_t most);
// Adds a program's own work of this duration to the device's default stream.
void fake_cuda_keep_busy(int device, uint64_t us);
void fake_cuda_set_seed(uint64_t seed);
// Whether read-only mappings can be registered, as attribute 113 says.
void fake_cuda_set_read_only_register(int supported);
// Whether copies can be submitted as a batch. A driver before CUDA 13.0 cannot.
void fake_cuda_set_copy_batches(int supported);
// Whether memory that is registered read-only from now on has the same address on the device as on
// the processor, as on x86.
void fake_cuda_set_one_address(int one);
// Makes an allocation two adjacent ones that meet at this address. They are freed together.
void fake_cuda_split(const void* memory);
void fake_cuda_join();  // undoes it
// Whether all of it lies in one live allocation.
int fake_cuda_is_device_memory(const void* memory, size_t bytes);
// Another thread captures a graph from now on, in the strictest mode.
void fake_cuda_begin_capture();
// Ends that. Returns whether no call has ended it before.
int fake_cuda_end_capture();
// Whether the calling thread has a current device.
int fake_cuda_has_context();
}
