// cuFile, found at run time like the CUDA driver (device/cuda_api.h). Only cufile_api.cpp names its
// functions, and nothing of it is loaded before the first call of get().
//
// Source: the cuFile API reference; layouts as in cufile.h of CUDA 12.9 and 13.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <ctime>
#include <string>
#include <vector>

#include "base/error.h"

namespace gdsdata {

struct CufileApi {
  struct Status {  // CUfileError_t
    int code;
    int cuda_code;  // valid if code is kCudaDriverError
  };
  using Handle = void*;
  using Batch = void*;
  struct Descriptor {  // CUfileDescr_t
    int type;
    union {
      int fd;
      void* pointer;
    };
    const void* file_system_operations;
  };
  struct Properties {  // CUfileDrvProps_t
    unsigned nvfs_major_version, nvfs_minor_version;
    size_t poll_threshold_bytes, max_direct_io_kib;
    unsigned status_flags, control_flags;
    unsigned features;
    unsigned max_device_cache_kib, per_buffer_cache_kib, max_device_pinned_kib;
    unsigned max_batch_entries, max_batch_timeout_ms;
  };
  struct Entry {  // CUfileIOParams_t
    int mode;
    void* memory;
    off_t file_offset, memory_offset;
    size_t length;
    Handle handle;
    int operation;
    void* cookie;
  };
  struct Event {  // CUfileIOEvents_t
    void* cookie;
    int status;
    size_t result;  // a negative error, or a number of bytes
  };
  struct Counter {
    uint64_t ok, failed;
  };
  struct GpuStatistics {  // CUfilePerGpuStats_t
    char uuid[16];
    uint64_t read_bytes, read_rate, read_utilization, read_us;
    uint64_t reads, p2p_reads, nvfs_reads, posix_reads, unaligned_reads, rerouted_reads, sparse_reads, inline_reads,
        failed_reads;
    uint64_t written_bytes, write_rate, write_utilization, write_us;
    uint64_t writes, p2p_writes, nvfs_writes, posix_writes, unaligned_writes, rerouted_writes, failed_writes;
    uint64_t registrations[5];
  };
  struct Statistics {  // CUfileStatsLevel3_t
    Counter operations[6];
    uint64_t rates[10];
    Counter batch_calls[5];
    Counter batch_enqueued, batch_posix_enqueued, batch_processed, batch_posix_processed;
    Counter batch_nvfs, batch_p2p, batch_aio, batch_uring, batch_mixed, batch_total;
    uint64_t batch_rates[12];
    uint64_t histograms[64];
    uint32_t gpu_count;
    GpuStatistics gpus[16];
    std::byte of_later_versions[16384];  // later versions may write more
  };

  static constexpr int kTypeFd = 1;
  static constexpr int kBatchMode = 1;
  static constexpr int kOperationRead = 0, kOperationWrite = 1;
  // Values of Event::status.
  static constexpr int kWaiting = 1, kPending = 2, kInvalid = 4, kCanceled = 8, kComplete = 16, kTimeout = 32;
  static constexpr int kFirstCode = 5000;  // lower codes are values of errno
  static constexpr int kCudaDriverError = 5011;

  Status (*driver_open)();
  Status (*driver_properties)(Properties*);
  Status (*handle_register)(Handle*, Descriptor*);
  void (*handle_deregister)(Handle);
  Status (*memory_register)(const void*, size_t, int flags);
  Status (*memory_deregister)(const void*);
  ssize_t (*read)(Handle, void* memory, size_t, off_t file_offset, off_t memory_offset);
  ssize_t (*write)(Handle, const void* memory, size_t, off_t file_offset, off_t memory_offset);
  Status (*batch_set_up)(Batch*, unsigned entries);
  Status (*batch_submit)(Batch, unsigned count, Entry*, unsigned flags);
  Status (*batch_status)(Batch, unsigned min, unsigned* count, Event*, timespec* timeout);
  Status (*batch_cancel)(Batch);
  void (*batch_destroy)(Batch);
  // Null before CUDA 12.9, whose libraries do not report routes.
  Status (*set_statistics_level)(int);
  Status (*statistics_start)();
  Status (*statistics)(Statistics*);

  Properties properties;  // of the open driver
  bool counts_routes;     // whether statistics() reports routes

  // Loads the library and opens its driver at the first call, for the life of the process. The
  // driver is not closed, because a library loaded by dlopen crashes at exit if it was. Throws
  // Failure (kUnavailable) if there is no cuFile, if it refuses, or in a forked child.
  static const CufileApi& get();
  static const char* why_not_counted();  // if counts_routes is false

  // "CU_FILE_IO_NOT_SUPPORTED (5008); <remedy>"
  static std::string describe(Status status);
};

// Sets where to look besides the system's folders: files such as libcufile.so.0 of the pip wheel
// (nvidia/cu13/lib). Call it before the first get(). GDSDATA_LIBCUFILE names one library instead.
void set_cufile_search_path(std::vector<std::string> files);

// Call it before the process's exit handlers run. With statistics on, the library writes a report
// at exit and may crash.
void stop_cufile_statistics();

// Returns true if DMA is possible: nvidia-fs is loaded, or cuFile's configuration names P2PDMA. It
// loads no library, so a machine without either never opens cuFile's driver.
bool cufile_dma_is_possible();

// The number of this process's operations by route, so far.
struct CufileRoutes {
  uint64_t dma = 0;   // by nvidia-fs or PCI P2PDMA
  uint64_t host = 0;  // through host memory
  static CufileRoutes now(const CufileApi& api);
};

// Returns an Error for a call that failed. `code` is an errno or cuFile's own code.
Error cufile_error(const std::string& operation, const std::string& path, CufileApi::Status status, uint64_t offset = 0,
                   uint64_t length = 0);

}  // namespace gdsdata
