// A cuFile for machines without one. It uses the fake CUDA driver's memory, and its transfers are
// pread and pwrite. It answers wrong calls with cuFile's errors. If cuFile would go wrong silently,
// it ends the process: a handle deregistered or memory freed under a transfer, a descriptor closed
// under its handle.
//
// Source: the cuFile API reference. Entries of a batch move when their status is requested.
#include "fake_cufile.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backend/cufile_api.h"
#include "fake_cuda.h"

namespace {

using Api = gdsdata::CufileApi;
using Clock = std::chrono::steady_clock;

constexpr unsigned kPerBufferCacheKib = 64, kMaxBatchEntries = 16, kMaxPinnedKib = 8192;
constexpr int kFailed = 64;

[[noreturn]] void end(const std::string& message) {
  std::fprintf(stderr, "fake cuFile: %s\n", message.c_str());
  std::abort();
}

struct File {
  int registered_fd;
  dev_t device;
  ino_t inode;
  int fd;  // a separate one, without O_DIRECT
  size_t in_flight = 0;
};

struct Entry {
  Api::Entry asked;
  Clock::time_point due;
};

struct Batch {
  unsigned capacity;
  std::vector<Entry> entries = {};  // in flight
};

struct Fault {
  uint64_t calls;  // calls before the one that fails
  int code;
};

class Library {
 public:
  std::mutex mutex;
  std::map<void*, std::unique_ptr<File>> files;
  std::map<const std::byte*, size_t> buffers;
  std::multimap<const std::byte*, size_t> in_flight;  // memory
  std::set<Batch*> batches;
  std::map<std::string, Fault> faults;
  int end_next_status = 0;
  double shorten = 0, interrupt = 0;
  uint64_t late_us = 0;
  int route = 2;
  std::mt19937_64 random{1};
  int statistics_level = 0;
  bool counting = false;
  Api::Statistics statistics{};
  FakeCufileCounts counts{};
  decltype(&fake_cuda_is_device_memory) is_device_memory = nullptr;
  decltype(&fake_cuda_has_context) has_context = nullptr;

  Library() {
    void* driver = ::dlopen(std::getenv("GDSDATA_LIBCUDA"), RTLD_NOW | RTLD_LOCAL);
    if (driver == nullptr) end("it needs the fake CUDA driver");
    is_device_memory = reinterpret_cast<decltype(is_device_memory)>(::dlsym(driver, "fake_cuda_is_device_memory"));
    has_context = reinterpret_cast<decltype(has_context)>(::dlsym(driver, "fake_cuda_has_context"));
  }

  // Returns 0, or the code of a fault.
  int fault(const char* name) {
    const auto found = faults.find(name);
    if (found == faults.end() || found->second.calls-- != 0) return 0;
    const int code = found->second.code;
    faults.erase(found);
    return code;
  }

  // Returns 0, or the error with which a call ends.
  int enter(const char* name, bool needs_driver = true) {
    if (const int code = fault(name); code != 0) return code;
    if (needs_driver && counts.opens == 0) return 5001;
    return 0;
  }

  bool happens(double probability) { return std::uniform_real_distribution<>(0, 1)(random) < probability; }

  // Returns 0, or the error with which a transfer fails.
  int check(void* handle, const std::byte* base, size_t bytes, off_t memory_offset) {
    if (files.count(handle) == 0) return 5027;
    if (!has_context()) return 5011;
    const auto* memory = base + memory_offset;
    if (!is_device_memory(memory, bytes)) return 5012;
    const auto buffer = buffers.find(base);
    if (buffer == buffers.end()) {
      for (const auto& [begin, length] : buffers) {
        if (memory < begin + length && begin < memory + bytes) end("registered memory is not named by its begin");
      }
    } else if (static_cast<size_t>(memory_offset) + bytes > buffer->second) {
      return 5017;
    } else {
      ++counts.registered_bases;
    }
    return 0;
  }

  void begin(File& file, const std::byte* memory, size_t bytes) {
    ++file.in_flight;
    in_flight.emplace(memory, bytes);
  }

  void finish(File& file, const std::byte* memory) {
    --file.in_flight;
    in_flight.erase(in_flight.find(memory));
  }

  // Moves bytes, or returns a negative errno. The caller does not hold the lock.
  static int64_t move(const File& file, bool write, std::byte* memory, size_t bytes, off_t offset) {
    const ssize_t moved = write ? ::pwrite(file.fd, memory, bytes, offset) : ::pread(file.fd, memory, bytes, offset);
    return moved < 0 ? -errno : moved;
  }

  size_t asked_of_disk(size_t bytes) {
    return bytes > 1 && happens(shorten) ? std::uniform_int_distribution<size_t>(1, bytes - 1)(random) : bytes;
  }

  void count(bool write) {
    ++(write ? counts.writes : counts.reads);
    if (!counting || route == 4) return;
    Api::GpuStatistics& gpu = statistics.gpus[0];
    const int taken = route == 3 ? static_cast<int>(random() % 3) : route;
    if (taken == 0) ++(write ? gpu.posix_writes : gpu.posix_reads);
    if (taken == 1) ++(write ? gpu.nvfs_writes : gpu.nvfs_reads);
    if (taken == 2) ++(write ? gpu.p2p_writes : gpu.p2p_reads);
  }
};

Library& library() {
  static auto* instance = new Library;
  return *instance;
}

ssize_t transfer(const char* name, bool write, void* handle, void* base, size_t bytes, off_t offset,
                 off_t memory_offset) {
  Library& library = ::library();
  std::unique_lock lock(library.mutex);
  if (const int code = library.enter(name); code != 0) {
    errno = code;
    return code < Api::kFirstCode ? -1 : -code;
  }
  auto* begin = static_cast<std::byte*>(base);
  if (const int code = library.check(handle, begin, bytes, memory_offset); code != 0) return -code;
  if (library.happens(library.interrupt)) {
    errno = library.happens(0.5) ? EINTR : EAGAIN;
    return -1;
  }
  std::byte* memory = begin + memory_offset;
  File& file = *library.files.at(handle);
  const size_t asked = library.asked_of_disk(bytes);
  library.begin(file, memory, bytes);
  lock.unlock();
  const int64_t result = Library::move(file, write, memory, asked, offset);
  lock.lock();
  library.finish(file, memory);
  library.count(write);
  if (result >= 0) return result;
  errno = static_cast<int>(-result);
  return -1;
}

Api::Status answer(int code) { return {code, code == Api::kCudaDriverError ? 201 : 0}; }

}  // namespace

// Tests have allocations of the engine fail, and cuFile has memory of its own.
[[gnu::noinline]] void* operator new(size_t bytes) {
  void* memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) std::abort();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

extern "C" {

Api::Status cuFileDriverOpen() {
  Library& library = ::library();
  std::lock_guard lock(library.mutex);
  if (!library.has_context()) return answer(5011);
  const int code = library.enter("cuFileDriverOpen", false);
  if (code == 0) ++library.counts.opens;
  return answer(code);
}

Api::Status cuFileDriverGetProperties(Api::Properties* properties) {
  Library& library = ::library();
  std::lock_guard lock(library.mutex);
  *properties = {};
  properties->per_buffer_cache_kib = kPerBufferCacheKib;
  properties->max_batch_entries = kMaxBatchEntries;
  properties->max_device_pinned_kib = kMaxPinnedKib;
  return answer(library.enter("cuFileDriverGetProperties"));
}

Api::Status cuFileSetStatsLevel(int level) {
  Library& library = ::library();
  std::lock_guard lock(library.mutex);
  library.statistics_level = level;
  return answer(library.enter("cuFileSetStatsLevel", false));
}

Api::Status cuFileStatsStart() {
  Library& library = ::library();
  std::lock_guard lock(library.mutex);
  const int code = library.enter("cuFileStatsStart");
  library.counting = code == 0 && library.statistics_level >= 3;
  return answer(code);
}

Api::Status cuFileGetStatsL3(Api::Statistics* statistics) {
  Library& library = ::library();
  std::lock_guard lock(library.mutex);
  if (const int code = library.enter("cuFileGetStatsL3"); code != 0) return answer(code);
  if (!library.counting) return answer(5022);
  library.statistics.gpu_count = 1;
  std::memcpy(statistics, &library.statistics, offsetof(Api::Statistics, of_later_versions));
  return answer(0);
}

Api::Status cuFileHandleRegister(Api::Handle* handle, Api::Descriptor* descriptor) {
  Library& library = ::library();
  std::lock_guard lock(library.mutex);
  if (const int code = library.enter("cuFileHandleRegister"); code != 0) return answer(code);
  struct stat status{};
  if (descriptor->type != Api::kTypeFd || descriptor->file_system_operations != nullptr) return answer(5022);
  if (::fstat(descriptor->fd, &status) != 0 || !S_ISREG(status.st_mode)) return answer(5018);
  for (const auto& [known, file] : library.files) {
    if (file->registered_fd == descriptor->fd) return answer(5028);
  }
  const int access = ::fcntl(descriptor->fd, F_GETFL) & O_ACCMODE;
  const int fd = ::open(("/proc/self/fd/" + std::to_string(descriptor->fd)).c_str(), access | O_CLOEXEC);
  if (fd < 0) return answer(5031);
  auto file = std::make_unique<File>(File{descriptor->fd, status.st_dev, status.st_ino, fd});
  *handle = file.get();
  library.files[*handle] = std::move(file);
  return answer(0);
}

void cuFileHandleDeregister(Api::Handle handle) {
  Library& library = ::library();
  std::lock_guard lock(library.mutex);
  const auto found = library.files.find(handle);
  if (found == library.files.end()) end("a handle is released that is not registered");
  const File& file = *found->second;
  if (file.in_flight > 0) end("a handle is released while a transfer uses it");
  struct stat status{};
  if (::fstat(file.registered_fd, &status) != 0 || status.st_dev != file.device || status.st_ino != file.inode) {
    end("a descriptor was closed before its handle was released");
  }
  ::close(file.fd);
  library.files.erase(found);
}

Api::Status cuFileBufRegister(const void* memory, size_t bytes, int) {
  Library& library = ::library();
  std::lock_guard lock(library.mutex);
  if (const int code = library.enter("cuFileBufRegister"); code != 0) return answer(code);
  const auto* begin = static_cast<const std::byte*>(memory);
  if (!library.has_context()) return answer(5011);
  if (!library.is_device_memory(memory, bytes)) return answer(5012);
  if (library.buffers.count(begin) != 0) return answer(5023);
  library.buffers[begin] = bytes;
  return answer(0);
}

Api::Status cuFileBufDeregister(const void* memory) {
  Library& library = ::library();
  std::lock_guard lock(library.mutex);
  if (const int code = library.enter("cuFileBufDeregister"); code != 0) return answer(code);
  const auto found = library.buffers.find(static_cast<const std::byte*>(memory));
  if (found == library.buffers.end()) return answer(5024);
  if (!library.is_device_memory(memory, found->second)) end("registered memory was freed before it was released");
  for (const auto& [begin, bytes] : library.in_flight) {
    if (begin < found->first + found->second && found->first < begin + bytes) {
      end("registered memory is released while a transfer uses it");
    }
  }
  library.buffers.erase(found);
  return answer(0);
}

ssize_t cuFileRead(Api::Handle handle, void* base, size_t bytes, off_t offset, off_t memory_offset) {
  return transfer("cuFileRead", false, handle, base, bytes, offset, memory_offset);
}

ssize_t cuFileWrite(Api::Handle handle, const void* base, size_t bytes, off_t offset, off_t memory_offset) {
  return transfer("cuFileWrite", true, handle, const_cast<void*>(base), bytes, offset, memory_offset);
}

Api::Status cuFileBatchIOSetUp(Api::Batch* handle, unsigned entries) {
  Library& library = ::library();
  std::lock_guard lock(library.mutex);
  if (const int code = library.enter("cuFileBatchIOSetUp"); code != 0) return answer(code);
  if (entries == 0 || entries > kMaxBatchEntries) return answer(5022);
  auto* batch = new Batch{entries};
  library.batches.insert(batch);
  *handle = batch;
  return answer(0);
}

Api::Status cuFileBatchIOSubmit(Api::Batch handle, unsigned count, Api::Entry* entries, unsigned) {
  Library& library = ::library();
  std::lock_guard lock(library.mutex);
  if (const int code = library.enter("cuFileBatchIOSubmit"); code != 0) return answer(code);
  auto* batch = static_cast<Batch*>(handle);
  if (library.batches.count(batch) == 0) return answer(5022);
  if (!batch->entries.empty()) end("a batch is given entries before it is done with those it has");
  if (count > batch->capacity) return answer(5037);
  for (unsigned i = 0; i < count; ++i) {
    const Api::Entry& entry = entries[i];
    if (entry.mode != Api::kBatchMode || entry.length == 0) return answer(5022);
    auto* base = static_cast<std::byte*>(entry.memory);
    if (const int code = library.check(entry.handle, base, entry.length, entry.memory_offset)) return answer(code);
  }
  for (unsigned i = 0; i < count; ++i) {
    const Api::Entry& entry = entries[i];
    const auto late = std::chrono::microseconds(library.random() % (library.late_us + 1));
    batch->entries.push_back({entry, Clock::now() + late});
    library.begin(*library.files.at(entry.handle), static_cast<std::byte*>(entry.memory) + entry.memory_offset,
                  entry.length);
    ++library.counts.entries;
    library.counts.longest_entry = std::max<uint64_t>(library.counts.longest_entry, entry.length);
  }
  uint64_t in_flight = 0;
  for (const Batch* each : library.batches) in_flight += each->entries.size();
  library.counts.most_entries_in_flight = std::max(library.counts.most_entries_in_flight, in_flight);
  return answer(0);
}

Api::Status cuFileBatchIOGetStatus(Api::Batch handle, unsigned min, unsigned* count, Api::Event* events,
                                   timespec* timeout) {
  Library& library = ::library();
  std::unique_lock lock(library.mutex);
  const unsigned room = *count;
  *count = 0;
  if (const int code = library.enter("cuFileBatchIOGetStatus"); code != 0) return answer(code);
  auto* batch = static_cast<Batch*>(handle);
  if (library.batches.count(batch) == 0) return answer(5022);
  const auto deadline =
      Clock::now() + std::chrono::seconds(timeout->tv_sec) + std::chrono::nanoseconds(timeout->tv_nsec);
  while (true) {
    std::shuffle(batch->entries.begin(), batch->entries.end(), library.random);
    for (auto entry = batch->entries.begin(); entry != batch->entries.end() && *count < room;) {
      if (entry->due > Clock::now()) {
        ++entry;
        continue;
      }
      const Api::Entry& asked = entry->asked;
      const bool write = asked.operation == Api::kOperationWrite;
      std::byte* memory = static_cast<std::byte*>(asked.memory) + asked.memory_offset;
      File& file = *library.files.at(asked.handle);
      Api::Event& event = events[(*count)++];
      event = {asked.cookie, Api::kComplete, 0};
      int64_t result = 0;
      if (const int code = library.fault("entry"); code != 0) {
        result = -code;
      } else if (library.happens(library.interrupt)) {
        result = -EAGAIN;
      } else if (library.end_next_status == 0) {
        result = Library::move(file, write, memory, library.asked_of_disk(asked.length), asked.file_offset);
      }
      event.result = static_cast<size_t>(result);
      if (result < 0) event.status = kFailed;
      if (library.end_next_status != 0) event.status = std::exchange(library.end_next_status, 0);
      library.finish(file, memory);
      library.count(write);
      entry = batch->entries.erase(entry);
    }
    if (*count >= min || batch->entries.empty() || Clock::now() >= deadline) return answer(0);
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    lock.lock();
  }
}

Api::Status cuFileBatchIOCancel(Api::Batch handle) {
  Library& library = ::library();
  std::lock_guard lock(library.mutex);
  for (const Entry& entry : static_cast<Batch*>(handle)->entries) {
    library.finish(*library.files.at(entry.asked.handle),
                   static_cast<std::byte*>(entry.asked.memory) + entry.asked.memory_offset);
  }
  static_cast<Batch*>(handle)->entries.clear();
  return answer(library.enter("cuFileBatchIOCancel"));
}

void cuFileBatchIODestroy(Api::Batch handle) {
  Library& library = ::library();
  std::lock_guard lock(library.mutex);
  auto* batch = static_cast<Batch*>(handle);
  if (library.batches.erase(batch) == 0) end("a batch is destroyed that there is not");
  if (!batch->entries.empty()) end("a batch is destroyed while its entries are in flight");
  delete batch;
}

FakeCufileCounts fake_cufile_counts() {
  Library& library = ::library();
  std::lock_guard lock(library.mutex);
  FakeCufileCounts counts = library.counts;
  counts.handles = library.files.size();
  counts.buffers = library.buffers.size();
  counts.batches = library.batches.size();
  return counts;
}

void fake_cufile_fail_next(const char* name, int code) { fake_cufile_fail_after(name, 0, code); }

void fake_cufile_fail_after(const char* name, uint64_t calls, int code) {
  Library& library = ::library();
  std::lock_guard lock(library.mutex);
  library.faults[name] = {calls, code};
}

void fake_cufile_end_next_entry(int status) {
  Library& library = ::library();
  std::lock_guard lock(library.mutex);
  library.end_next_status = status;
}

void fake_cufile_set_trouble(double shorten, double interrupt) {
  Library& library = ::library();
  std::lock_guard lock(library.mutex);
  library.shorten = shorten;
  library.interrupt = interrupt;
}

void fake_cufile_set_late_us(uint64_t most) {
  Library& library = ::library();
  std::lock_guard lock(library.mutex);
  library.late_us = most;
}

void fake_cufile_set_seed(uint64_t seed) {
  Library& library = ::library();
  std::lock_guard lock(library.mutex);
  library.random.seed(seed);
}

void fake_cufile_set_route(int route) {
  Library& library = ::library();
  std::lock_guard lock(library.mutex);
  library.route = route;
}

void fake_cufile_reset() {
  Library& library = ::library();
  std::lock_guard lock(library.mutex);
  library.faults.clear();
  library.end_next_status = 0;
  library.shorten = library.interrupt = 0;
  library.late_us = 0;
  library.route = 2;
  library.counts.longest_entry = library.counts.most_entries_in_flight = 0;
}

}  // extern "C"
