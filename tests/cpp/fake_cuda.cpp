// A driver for machines without a GPU: the functions that device/cuda_api.cpp looks up, with host
// memory in place of a device's.
//
// A thread does the work of all streams later, in an order chosen by a seed as far as streams and
// events allow. So a caller that forgets to wait finds old bytes. Misuse that a driver answers with
// an error is an error here. Misuse that breaks it silently, such as freeing memory under a copy,
// ends the process with a message.
//
// Source: the CUDA Driver API reference. All streams behave as CU_STREAM_NON_BLOCKING.
#include "fake_cuda.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

using Address = uint64_t;
using Clock = std::chrono::steady_clock;

enum Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kDeinitialized = 4,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kAlreadyRegistered = 712,
  kNotRegistered = 713,
  kLaunchFailed = 719,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
};

constexpr int kDevices = 2;
constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kAllocationAlignment = 512;
constexpr uint64_t kLargeBytes = 1 << 20;
constexpr uint64_t kDelayUs = 200;
constexpr unsigned kReadOnly = 8;
// On the device, memory that was registered read-only has another address than on the processor, so
// that tests notice if the two are confused. (On x86 they are the same.)
constexpr uint64_t kDeviceOffset = uint64_t{1} << 50;

[[noreturn]] void end(const std::string& message) {
  std::fprintf(stderr, "fake CUDA driver: %s\n", message.c_str());
  std::abort();
}

struct Range {
  Address begin = 0;
  uint64_t bytes = 0;
  bool overlaps(const Range& other) const { return begin < other.begin + other.bytes && other.begin < begin + bytes; }
  bool contains(const Range& other) const { return begin <= other.begin && other.begin + other.bytes <= begin + bytes; }
};

// One recording of an event. A waiter waits for the recording that was the latest at its call.
struct Recording {
  bool done = false;
};

struct Context {
  int device;
};

struct Work {
  enum Kind { kCopy, kGather, kRecord, kWait, kBusy } kind;
  std::byte* target = nullptr;
  const std::byte* source = nullptr;
  uint64_t bytes = 0;
  std::vector<Address> sources = {};        // of a gather, copied at the launch
  const Address* sources_memory = nullptr;  // the caller's, which must not change
  std::shared_ptr<Recording> recording = nullptr;
  std::vector<Range> host = {}, device = {};  // memory that it uses
  Clock::time_point due = {};
  bool lost = false;  // the device was lost, so it never happens
};

struct Stream {
  Context* context;
  std::deque<Work> works = {};  // the first one may be running
  bool destroyed = false;
  Clock::time_point busy_until = {};
};

struct Event {
  Context* context;
  std::shared_ptr<Recording> latest = nullptr;
};

struct Module {
  std::string image;
};

struct Function {
  std::string name;
};

// CUmemcpyAttributes.
struct CopyAttributes {
  int source_order;
  int locations[4];
  unsigned flags;
};

struct Registered {
  uint64_t bytes;
  bool read_only;
  Address offset;  // the address on the device minus that on the processor
};

struct Fault {
  uint64_t calls;  // calls before the one that fails
  int code;
};

thread_local std::vector<Context*> current_contexts;

enum CaptureMode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };
thread_local int capture_mode = kGlobal;
// Calls that end a capture of another thread, unless the calling thread's mode says otherwise.
const std::set<std::string> kUnsafeInCaptures{"cuEventQuery",      "cuMemAlloc",          "cuMemFree",
                                              "cuMemHostRegister", "cuMemHostUnregister", "cuModuleLoadData"};

class Driver {
 public:
  std::mutex mutex;
  std::condition_variable changed;
  pid_t process = 0;  // the one that initialized it
  Context contexts[kDevices] = {{0}, {1}};
  std::set<Stream*> streams;
  Stream defaults[kDevices] = {{&contexts[0]}, {&contexts[1]}};
  std::set<Event*> events;
  std::map<Address, uint64_t> allocations;
  std::set<Address> splits;  // addresses where two adjacent allocations meet
  std::map<Address, Registered> registrations;
  std::vector<std::unique_ptr<Module>> modules;
  std::vector<std::unique_ptr<Function>> functions;
  std::map<std::string, uint64_t> calls;
  std::map<std::string, Fault> faults;
  int broken = kSuccess;
  bool executing = false;
  bool breaking = false;  // no work begins, because `broken` is about to be set
  uint64_t delay_us = kDelayUs;
  uint64_t link_bytes_per_s = 0;     // 0: no limit
  Clock::time_point link_free = {};  // when the link is free again
  bool read_only_register = true;
  bool copy_batches = true;
  bool one_address = false;
  bool capturing = false;  // another thread captures a graph, in the mode kGlobal
  bool capture_is_whole = false;
  std::mt19937_64 random{1};

  // Begins every call. Returns kSuccess, or the error with which the call ends. `context`: whether
  // the call needs a current one.
  int enter(const char* name, bool context = true) {
    ++calls[name];
    if (process != ::getpid()) return kNotInitialized;
    if (const auto fault = faults.find(name); fault != faults.end() && fault->second.calls-- == 0) {
      const int code = fault->second.code;
      faults.erase(fault);
      return code;
    }
    if (broken != kSuccess) return broken;
    if (capturing && capture_mode == kGlobal && kUnsafeInCaptures.contains(name)) {
      capture_is_whole = false;
      return kCaptureUnsupported;
    }
    return context && current() == nullptr ? kInvalidContext : kSuccess;
  }

  static Context* current() { return current_contexts.empty() ? nullptr : current_contexts.back(); }

  // Null if there is no such stream. 0 and CU_STREAM_LEGACY (1) are the context's own stream.
  Stream* find_stream(Stream* handle) {
    if (reinterpret_cast<uintptr_t>(handle) <= 1) return &defaults[current()->device];
    const auto found = streams.find(handle);
    return found == streams.end() || (*found)->destroyed ? nullptr : *found;
  }

  // The allocation that holds an address; empty if there is none.
  Range allocation_of(Address at) const {
    auto next = allocations.upper_bound(at);
    if (next == allocations.begin()) return {};
    --next;
    Address begin = next->first, end = next->first + next->second;
    if (at >= end) return {};
    const auto split = splits.upper_bound(at);
    if (split != splits.end()) end = std::min(end, *split);
    if (split != splits.begin()) begin = std::max(begin, *std::prev(split));
    return {begin, end - begin};
  }

  bool on_device(const Range& range) const { return allocation_of(range.begin).contains(range); }

  // The registration that contains a range, or null. Whole pages are registered.
  const Registered* registered(const Range& range) const {
    auto next = registrations.upper_bound(range.begin);
    if (next == registrations.begin()) return nullptr;
    --next;
    return pages_of(next->first, next->second.bytes).contains(range) ? &next->second : nullptr;
  }

  // Whether a kernel can access all of a range. A kernel may use several adjacent registrations,
  // but a copy may not.
  bool kernel_reaches(const Range& range, Address offset) const {
    for (Address at = range.begin; at < range.begin + range.bytes;) {
      const auto next = registrations.upper_bound(at);
      if (next == registrations.begin()) return false;
      const auto& [begin, registered] = *std::prev(next);
      const Range pages = pages_of(begin, registered.bytes);
      if (!pages.contains({at, 1}) || registered.offset != offset) return false;
      at = pages.begin + pages.bytes;
    }
    return true;
  }

  static Range pages_of(Address begin, uint64_t bytes) {
    const Address first = begin / kPageBytes * kPageBytes;
    return {first, (begin + bytes + kPageBytes - 1) / kPageBytes * kPageBytes - first};
  }

  template <typename Visit>
  void each_stream(Visit visit) {
    for (Stream& stream : defaults) visit(stream);
    for (Stream* stream : streams) visit(*stream);
  }

  bool in_use(std::vector<Range> Work::* kind, const Range& range) {
    bool found = false;
    each_stream([&](Stream& stream) {
      for (const Work& work : stream.works) {
        for (const Range& used : work.*kind) found = found || used.overlaps(range);
      }
    });
    return found;
  }

  void put(Stream& stream, Work work) {
    if (work.kind == Work::kCopy || work.kind == Work::kGather) {
      work.due = Clock::now() + std::chrono::microseconds(random() % (delay_us + 1));
    }
    if (work.kind == Work::kCopy && link_bytes_per_s > 0) {
      const std::chrono::duration<double> takes(static_cast<double>(work.bytes) /
                                                static_cast<double>(link_bytes_per_s));
      link_free = std::max(link_free, Clock::now()) + std::chrono::duration_cast<Clock::duration>(takes);
      work.due = std::max(work.due, link_free);
    }
    stream.works.push_back(std::move(work));
    changed.notify_all();
  }

  std::shared_ptr<Recording> record(Stream& stream) {
    Work work{Work::kRecord};
    work.recording = std::make_shared<Recording>();
    auto recording = work.recording;
    put(stream, std::move(work));
    return recording;
  }

  // Queued work never happens, not even if the device works again.
  void lose_all() {
    each_stream([](Stream& stream) {
      for (Work& work : stream.works) {
        work.lost = true;
        work.due = {};
      }
    });
  }

  void run() {
    std::unique_lock lock(mutex);
    while (true) {
      std::vector<Stream*> ready;
      auto next_due = Clock::time_point::max();
      each_stream([&](Stream& stream) {
        if (stream.works.empty()) return;
        const Work& work = stream.works.front();
        if (work.kind == Work::kWait && !work.recording->done) return;
        if (work.due <= Clock::now()) {
          ready.push_back(&stream);
        } else {
          next_due = std::min(next_due, work.due);
        }
      });
      if (ready.empty() || breaking) {
        if (breaking || next_due == Clock::time_point::max()) {
          changed.wait(lock);
        } else {
          changed.wait_until(lock, next_due);
        }
        continue;
      }
      Stream* stream = ready[random() % ready.size()];
      Work& work = stream->works.front();  // the reference stays valid while others are appended
      if (broken == kSuccess && !work.lost) {  // a lost device does nothing
        executing = true;
        lock.unlock();
        execute(work);
        lock.lock();
        executing = false;
      }
      if (work.kind == Work::kRecord) work.recording->done = true;
      stream->works.pop_front();
      if (stream->works.empty() && stream->destroyed) {
        streams.erase(stream);
        delete stream;
      }
      changed.notify_all();
    }
  }

 private:
  static void execute(const Work& work) {
    if (work.kind == Work::kCopy) std::memcpy(work.target, work.source, work.bytes);
    if (work.kind != Work::kGather) return;
    if (!std::equal(work.sources.begin(), work.sources.end(), work.sources_memory)) {
      end("the addresses of a gather changed before it was done");
    }
    std::byte* row = work.target;
    for (const Address source : work.sources) {
      std::memcpy(row, reinterpret_cast<const std::byte*>(source & ~kDeviceOffset), work.bytes);
      row += work.bytes;
    }
  }
};

Driver& driver() {
  static Driver* instance = new Driver;  // never destroyed: the thread uses it to the end
  return *instance;
}

// Pages that are not mapped cannot be registered.
bool mapped(const Range& range) {
  const Range pages = Driver::pages_of(range.begin, range.bytes);
  std::vector<unsigned char> resident(pages.bytes / kPageBytes);
  return ::mincore(reinterpret_cast<void*>(pages.begin), pages.bytes, resident.data()) == 0;
}

Address address(const void* memory) { return reinterpret_cast<Address>(memory); }

// The parameters are those of device/gather_kernel.cu.
int launch_gather(Driver& driver, Stream& stream, void** parameters) {
  const auto target = *static_cast<const Address*>(parameters[0]);
  const auto* sources = *static_cast<const Address* const*>(parameters[1]);
  const auto count = *static_cast<const uint64_t*>(parameters[2]);
  const auto bytes = *static_cast<const uint64_t*>(parameters[3]);
  const auto unit_bytes = *static_cast<const unsigned*>(parameters[4]);
  if (unit_bytes == 0 || unit_bytes > 16 || (unit_bytes & (unit_bytes - 1)) != 0) end("a gather by a wrong unit");
  // A GPU detects the following only when the kernel runs, and is lost from then on.
  const Range written{target, count * bytes}, addresses{address(sources), count * sizeof(Address)};
  if (!driver.on_device(written)) end("a gather writes beyond the memory of the device");
  if (driver.registered(addresses) == nullptr) end("a gather finds its addresses in memory that is not pinned");
  Work work{Work::kGather};
  work.target = reinterpret_cast<std::byte*>(target);
  work.bytes = bytes;
  work.sources.assign(sources, sources + count);
  work.sources_memory = sources;
  work.host.push_back(addresses);
  work.device.push_back(written);
  for (const Address source : work.sources) {
    const Range read{source & ~kDeviceOffset, bytes};
    const bool seen_there = driver.kernel_reaches(read, source & kDeviceOffset);
    if (!seen_there && !driver.on_device({source, bytes})) {
      end("a gather reads memory that is not registered, or by an address that is not the device's");
    }
    if (((source | target | bytes) & (unit_bytes - 1)) != 0) end("a gather by a unit that does not divide everything");
    (seen_there ? work.host : work.device).push_back(read);
  }
  driver.put(stream, std::move(work));
  return kSuccess;
}

// The caller holds the lock.
int put_copy(Driver& driver, std::byte* target, const std::byte* source, size_t bytes, bool in, Stream& stream) {
  const Range device{address(in ? target : source), bytes}, host{address(in ? source : target), bytes};
  if (!driver.on_device(device)) return kInvalidValue;
  // A driver would accept any memory, and copy before it returns: too slow, so an error here.
  const Registered* registered = driver.registered(host);
  if (registered == nullptr || (!in && registered->read_only)) return kInvalidValue;
  Work work{Work::kCopy};
  work.target = target;
  work.source = source;
  work.bytes = bytes;
  work.host = {host};
  work.device = {device};
  driver.put(stream, std::move(work));
  return kSuccess;
}

int copy(const char* name, std::byte* target, const std::byte* source, size_t bytes, bool in, Stream* handle) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  if (const int result = driver.enter(name); result != kSuccess) return result;
  Stream* stream = driver.find_stream(handle);
  if (stream == nullptr || stream->context != Driver::current()) return kInvalidHandle;
  return bytes == 0 ? kSuccess : put_copy(driver, target, source, bytes, in, *stream);
}

}  // namespace

extern "C" {

int cuInit(unsigned) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  if (driver.process == 0) {
    driver.process = ::getpid();
    // A forked child calls the driver too, and gets an error. The lock must not be held there by a
    // thread that the child does not have.
    ::pthread_atfork([] { ::driver().mutex.lock(); }, [] { ::driver().mutex.unlock(); },
                     [] { ::driver().mutex.unlock(); });
    std::thread([&driver] { driver.run(); }).detach();
  }
  return driver.enter("cuInit", false);
}

int cuGetErrorName(int code, const char** name) {
  static const std::map<int, const char*> kNames = {
      {kSuccess, "CUDA_SUCCESS"},
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
      {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
      {kDeinitialized, "CUDA_ERROR_DEINITIALIZED"},
      {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
      {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE"},
      {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
      {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
      {kNotFound, "CUDA_ERROR_NOT_FOUND"},
      {kNotReady, "CUDA_ERROR_NOT_READY"},
      {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {kAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
      {kNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
      {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED"},
      {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED"},
      {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
  };
  const auto found = kNames.find(code);
  *name = found == kNames.end() ? nullptr : found->second;
  return found == kNames.end() ? kInvalidValue : kSuccess;
}

int cuGetErrorString(int code, const char** text) {
  const int result = cuGetErrorName(code, text);
  if (result == kSuccess) *text = code == kOutOfMemory ? "out of memory" : "as the fake driver says";
  return result;
}

int cuDeviceGetCount(int* count) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  *count = kDevices;
  return driver.enter("cuDeviceGetCount", false);
}

int cuDeviceGet(int* device, int ordinal) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  *device = ordinal;
  const int result = driver.enter("cuDeviceGet", false);
  return result == kSuccess && (ordinal < 0 || ordinal >= kDevices) ? kInvalidDevice : result;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  constexpr int kReadOnlyRegister = 113, kHostNumaId = 134;
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  if (const int result = driver.enter("cuDeviceGetAttribute", false); result != kSuccess) return result;
  if (device < 0 || device >= kDevices) return kInvalidDevice;
  if (attribute == kReadOnlyRegister) {
    *value = driver.read_only_register ? 1 : 0;
  } else if (attribute == kHostNumaId) {
    *value = 0;
  } else {
    return kInvalidValue;
  }
  return kSuccess;
}

int cuDevicePrimaryCtxRetain(Context** context, int device) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  if (const int result = driver.enter("cuDevicePrimaryCtxRetain", false); result != kSuccess) return result;
  if (device < 0 || device >= kDevices) return kInvalidDevice;
  *context = &driver.contexts[device];
  return kSuccess;
}

int cuCtxPushCurrent_v2(Context* context) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  if (const int result = driver.enter("cuCtxPushCurrent", false); result != kSuccess) return result;
  if (context != &driver.contexts[0] && context != &driver.contexts[1]) return kInvalidContext;
  current_contexts.push_back(context);
  return kSuccess;
}

int cuCtxPopCurrent_v2(Context** context) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  ++driver.calls["cuCtxPopCurrent"];
  if (current_contexts.empty()) return kInvalidContext;
  *context = current_contexts.back();
  current_contexts.pop_back();
  return kSuccess;
}

int cuCtxSetCurrent(Context* context) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  if (const int result = driver.enter("cuCtxSetCurrent", false); result != kSuccess) return result;
  if (!current_contexts.empty()) current_contexts.pop_back();
  if (context != nullptr) current_contexts.push_back(context);
  return kSuccess;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  if (*mode < kGlobal || *mode > kRelaxed) return kInvalidValue;
  std::swap(*mode, capture_mode);
  return kSuccess;
}

int cuMemAlloc_v2(Address* result_address, size_t bytes) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  if (const int result = driver.enter("cuMemAlloc"); result != kSuccess) return result;
  if (bytes == 0) return kInvalidValue;
  // Like a driver, cuts small memory from larger pieces, so that it does not start on a page.
  const bool large = bytes >= kLargeBytes;
  void* memory = std::aligned_alloc(kPageBytes, (kPageBytes + bytes + kPageBytes - 1) / kPageBytes * kPageBytes);
  if (memory == nullptr) return kOutOfMemory;
  const Address begin = address(memory) + (large ? 0 : kAllocationAlignment);
  std::memset(reinterpret_cast<void*>(begin), 0xCB, bytes);
  driver.allocations[begin] = bytes;
  *result_address = begin;
  return kSuccess;
}

int cuMemGetAddressRange_v2(Address* begin, size_t* bytes, Address at) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  if (const int result = driver.enter("cuMemGetAddressRange"); result != kSuccess) return result;
  const Range found = driver.allocation_of(at);
  if (found.bytes == 0) return kNotFound;
  *begin = found.begin;
  *bytes = found.bytes;
  return kSuccess;
}

int cuMemFree_v2(Address begin) {
  Driver& driver = ::driver();
  std::unique_lock lock(driver.mutex);
  if (const int result = driver.enter("cuMemFree"); result != kSuccess) return result;
  const auto found = driver.allocations.find(begin);
  if (found == driver.allocations.end()) return kInvalidValue;  // unknown, or freed before
  const uint64_t bytes = found->second;
  // Waits for all pending work, whatever it uses.
  std::vector<std::shared_ptr<Recording>> pending;
  driver.each_stream([&](Stream& stream) {
    if (!stream.works.empty()) pending.push_back(driver.record(stream));
  });
  for (const auto& recording : pending) driver.changed.wait(lock, [&] { return recording->done; });
  if (driver.in_use(&Work::device, {begin, bytes})) end("memory is freed while another thread puts it into a stream");
  if (driver.allocations.erase(begin) == 0) end("two threads free the same memory");
  driver.splits.erase(driver.splits.lower_bound(begin), driver.splits.lower_bound(begin + bytes));
  std::free(reinterpret_cast<void*>(begin - (bytes >= kLargeBytes ? 0 : kAllocationAlignment)));
  return kSuccess;
}

int cuMemHostRegister_v2(void* memory, size_t bytes, unsigned flags) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  if (const int result = driver.enter("cuMemHostRegister"); result != kSuccess) return result;
  const bool read_only = (flags & kReadOnly) != 0;
  if (bytes == 0 || !mapped({address(memory), bytes})) return kInvalidValue;
  if (read_only && !driver.read_only_register) return kNotSupported;
  const Range pages = Driver::pages_of(address(memory), bytes);
  for (const auto& [begin, registered] : driver.registrations) {
    if (Driver::pages_of(begin, registered.bytes).overlaps(pages)) return kAlreadyRegistered;
  }
  driver.registrations[address(memory)] = {bytes, read_only, read_only && !driver.one_address ? kDeviceOffset : 0};
  return kSuccess;
}

int cuMemHostUnregister(void* memory) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  if (const int result = driver.enter("cuMemHostUnregister"); result != kSuccess) return result;
  const auto found = driver.registrations.find(address(memory));
  if (found == driver.registrations.end()) return kNotRegistered;
  const Range range{found->first, found->second.bytes};
  if (driver.in_use(&Work::host, range)) end("registered memory is released while work in flight uses it");
  if (!mapped(range)) end("registered memory was unmapped before it was released");
  driver.registrations.erase(found);
  return kSuccess;
}

int cuMemHostGetDevicePointer_v2(Address* result_address, void* memory, unsigned) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  if (const int result = driver.enter("cuMemHostGetDevicePointer"); result != kSuccess) return result;
  const Registered* registered = driver.registered({address(memory), 1});
  if (registered == nullptr) return kInvalidValue;
  *result_address = address(memory) | registered->offset;
  return kSuccess;
}

int cuStreamCreate(Stream** stream, unsigned) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  if (const int result = driver.enter("cuStreamCreate"); result != kSuccess) return result;
  *stream = new Stream{Driver::current()};
  driver.streams.insert(*stream);
  return kSuccess;
}

// Returns at once. Work in the stream is still done.
int cuStreamDestroy_v2(Stream* handle) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  if (const int result = driver.enter("cuStreamDestroy"); result != kSuccess) return result;
  Stream* stream = driver.find_stream(handle);
  if (stream == nullptr || stream == &driver.defaults[Driver::current()->device]) return kInvalidHandle;
  stream->destroyed = true;
  if (stream->works.empty()) {
    driver.streams.erase(stream);
    delete stream;
  }
  return kSuccess;
}

int cuStreamWaitEvent(Stream* handle, Event* event, unsigned) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  if (const int result = driver.enter("cuStreamWaitEvent"); result != kSuccess) return result;
  Stream* stream = driver.find_stream(handle);
  if (stream == nullptr || driver.events.count(event) == 0) return kInvalidHandle;
  if (event->latest == nullptr) return kSuccess;  // never recorded
  Work work{Work::kWait};
  work.recording = event->latest;
  driver.put(*stream, std::move(work));
  return kSuccess;
}

int cuEventCreate(Event** event, unsigned) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  if (const int result = driver.enter("cuEventCreate"); result != kSuccess) return result;
  *event = new Event{Driver::current()};
  driver.events.insert(*event);
  return kSuccess;
}

int cuEventDestroy_v2(Event* event) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  if (const int result = driver.enter("cuEventDestroy"); result != kSuccess) return result;
  if (driver.events.erase(event) == 0) return kInvalidHandle;
  delete event;
  return kSuccess;
}

int cuEventRecord(Event* event, Stream* handle) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  if (const int result = driver.enter("cuEventRecord"); result != kSuccess) return result;
  Stream* stream = driver.find_stream(handle);
  if (stream == nullptr || driver.events.count(event) == 0) return kInvalidHandle;
  if (stream->context != event->context) return kInvalidHandle;
  event->latest = driver.record(*stream);
  return kSuccess;
}

int cuEventQuery(Event* event) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  if (const int result = driver.enter("cuEventQuery"); result != kSuccess) return result;
  if (driver.events.count(event) == 0) return kInvalidHandle;
  return event->latest == nullptr || event->latest->done ? kSuccess : kNotReady;
}

int cuMemcpyHtoDAsync_v2(Address target, const void* source, size_t bytes, Stream* stream) {
  return copy("cuMemcpyHtoDAsync", reinterpret_cast<std::byte*>(target), static_cast<const std::byte*>(source), bytes,
              true, stream);
}

int cuMemcpyDtoHAsync_v2(void* target, Address source, size_t bytes, Stream* stream) {
  return copy("cuMemcpyDtoHAsync", static_cast<std::byte*>(target), reinterpret_cast<const std::byte*>(source), bytes,
              false, stream);
}

// Copies to the device, in any order.
int cuMemcpyBatchAsync_v2(Address* targets, Address* sources, size_t* bytes, size_t count,
                          const CopyAttributes* attributes, size_t* first_of_attributes, size_t attribute_count,
                          Stream* handle) {
  constexpr int kAnyOrder = 3;
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  if (const int result = driver.enter("cuMemcpyBatchAsync"); result != kSuccess) return result;
  if (!driver.copy_batches) return kNotSupported;
  Stream* stream = driver.find_stream(handle);
  if (stream == nullptr || stream == &driver.defaults[Driver::current()->device]) return kInvalidHandle;
  if (stream->context != Driver::current()) return kInvalidHandle;
  if (count == 0 || attribute_count != 1 || *first_of_attributes != 0) return kInvalidValue;
  if (attributes->source_order != kAnyOrder || attributes->flags != 0) return kInvalidValue;
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  std::shuffle(order.begin(), order.end(), driver.random);
  for (const size_t i : order) {
    if (bytes[i] == 0) return kInvalidValue;
    const int result = put_copy(driver, reinterpret_cast<std::byte*>(targets[i]),
                                reinterpret_cast<const std::byte*>(sources[i]), bytes[i], true, *stream);
    if (result != kSuccess) return result;
  }
  return kSuccess;
}

int cuModuleLoadData(Module** module, const void* image) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  if (const int result = driver.enter("cuModuleLoadData"); result != kSuccess) return result;
  const std::string text = static_cast<const char*>(image);
  if (text.find(".version") == std::string::npos) return kInvalidImage;
  driver.modules.push_back(std::make_unique<Module>(Module{text}));
  *module = driver.modules.back().get();
  return kSuccess;
}

int cuModuleGetFunction(Function** function, Module* module, const char* name) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  if (const int result = driver.enter("cuModuleGetFunction"); result != kSuccess) return result;
  if (module->image.find(std::string(".entry ") + name + "(") == std::string::npos) return kNotFound;
  driver.functions.push_back(std::make_unique<Function>(Function{name}));
  *function = driver.functions.back().get();
  return kSuccess;
}

int cuLaunchKernel(Function* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned, Stream* handle, void** parameters, void**) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  if (const int result = driver.enter("cuLaunchKernel"); result != kSuccess) return result;
  Stream* stream = driver.find_stream(handle);
  if (stream == nullptr || stream->context != Driver::current()) return kInvalidHandle;
  if (grid_x * grid_y * grid_z == 0 || block_x * block_y * block_z == 0) return kInvalidValue;
  if (block_x * block_y * block_z > 1024 || block_x % 32 != 0) return kInvalidValue;
  if (function->name != "gdsdata_gather") end("no kernel is called " + function->name);
  return launch_gather(driver, *stream, parameters);
}

FakeCudaObjects fake_cuda_live_objects() {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  const auto destroyed = [](const Stream* stream) { return stream->destroyed; };
  const auto draining = std::count_if(driver.streams.begin(), driver.streams.end(), destroyed);
  uint64_t registered_bytes = 0;
  for (const auto& [begin, registered] : driver.registrations) registered_bytes += registered.bytes;
  return {driver.streams.size() - static_cast<size_t>(draining), driver.events.size(), driver.allocations.size(),
          driver.registrations.size(), registered_bytes};
}

uint64_t fake_cuda_calls(const char* name) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  return driver.calls[name];
}

void fake_cuda_fail_next(const char* name, int code) { fake_cuda_fail_after(name, 0, code); }

void fake_cuda_fail_after(const char* name, uint64_t calls, int code) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  driver.faults[name] = {calls, code};
}

void fake_cuda_break(int code) {
  Driver& driver = ::driver();
  std::unique_lock lock(driver.mutex);
  if (driver.process == ::getpid()) {  // else this is a forked child without the thread
    // Callers of a lost device reuse memory that copies read, so running copies end first.
    driver.breaking = true;
    driver.changed.wait(lock, [&] { return !driver.executing; });
    driver.breaking = false;
  }
  driver.broken = code;
  if (code != kSuccess) driver.lose_all();
  driver.changed.notify_all();
}

void fake_cuda_reset() {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  driver.faults.clear();
  driver.broken = kSuccess;
  driver.delay_us = kDelayUs;
  driver.link_bytes_per_s = 0;
  driver.read_only_register = true;
  driver.copy_batches = true;
  driver.one_address = false;
  driver.capturing = false;
}

void fake_cuda_set_delay_us(uint64_t most) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  driver.delay_us = most;
}

void fake_cuda_set_link_bytes_per_s(uint64_t most) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  driver.link_bytes_per_s = most;
}

void fake_cuda_keep_busy(int device, uint64_t us) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  Stream& stream = driver.defaults[device];
  stream.busy_until = std::max(stream.busy_until, Clock::now()) + std::chrono::microseconds(us);
  Work work{Work::kBusy};
  work.due = stream.busy_until;
  driver.put(stream, std::move(work));
}

void fake_cuda_set_seed(uint64_t seed) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  driver.random.seed(seed);
}

void fake_cuda_set_read_only_register(int supported) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  driver.read_only_register = supported != 0;
}

void fake_cuda_set_copy_batches(int supported) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  driver.copy_batches = supported != 0;
}

void fake_cuda_set_one_address(int one) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  driver.one_address = one != 0;
}

void fake_cuda_split(const void* memory) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  driver.splits.insert(address(memory));
}

void fake_cuda_join() {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  driver.splits.clear();
}

int fake_cuda_is_device_memory(const void* memory, size_t bytes) {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  return driver.on_device({address(memory), bytes}) ? 1 : 0;
}

void fake_cuda_begin_capture() {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  driver.capturing = driver.capture_is_whole = true;
}

int fake_cuda_end_capture() {
  Driver& driver = ::driver();
  std::lock_guard lock(driver.mutex);
  driver.capturing = false;
  return driver.capture_is_whole ? 1 : 0;
}

int fake_cuda_has_context() { return Driver::current() != nullptr ? 1 : 0; }

}  // extern "C"
