// The CUDA driver, found at run time. The build needs nothing of CUDA, and nothing of it is loaded
// before the first call of get(). Only this file and cuda_api.cpp name the driver's functions.
//
// Source: the CUDA Driver API reference. The versions named below are those of CUDA 11.0, which
// later drivers keep. One function may be missing and says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace gdsdata {

struct CudaApi {
  using Result = int;  // CUresult
  using DeviceId = int;
  using Address = uint64_t;  // CUdeviceptr
  struct ContextRecord;
  struct StreamRecord;
  struct EventRecord;
  struct ModuleRecord;
  struct FunctionRecord;
  using Context = ContextRecord*;
  using Stream = StreamRecord*;
  using Event = EventRecord*;
  using Module = ModuleRecord*;
  using Function = FunctionRecord*;

  // CUmemcpyAttributes: how a batch of copies reads. The locations do not matter for pinned memory.
  struct CopyAttributes {
    int source_order;
    struct {
      int type, id;
    } source, target;
    unsigned flags;
  };
  static constexpr int kSourceOrderAny = 3;  // the source is complete already

  static constexpr Result kSuccess = 0;
  static constexpr Result kDeinitialized = 4;
  static constexpr Result kNotReady = 600;
  static constexpr Result kNotSupported = 801;
  static constexpr int kCaptureModeRelaxed = 2;
  static constexpr unsigned kStreamNonBlocking = 1;
  static constexpr unsigned kEventDisableTiming = 2;
  static constexpr unsigned kRegisterPortable = 1, kRegisterDeviceMap = 2, kRegisterReadOnly = 8;
  static constexpr int kAttributeReadOnlyRegisterSupported = 113;
  static constexpr int kAttributeHostNumaId = 134;

  Result (*init)(unsigned flags);
  Result (*error_name)(Result, const char**);
  Result (*error_string)(Result, const char**);
  Result (*device_count)(int*);
  Result (*device_get)(DeviceId*, int ordinal);
  Result (*device_attribute)(int*, int attribute, DeviceId);
  Result (*primary_context_retain)(Context*, DeviceId);
  Result (*context_push)(Context);
  Result (*context_pop)(Context*);
  Result (*context_set)(Context);
  Result (*exchange_capture_mode)(int* mode);  // of the calling thread
  Result (*memory_allocate)(Address*, size_t);
  Result (*memory_free)(Address);
  Result (*memory_range)(Address* begin, size_t* bytes, Address);
  Result (*host_register)(void*, size_t, unsigned flags);
  Result (*host_unregister)(void*);
  Result (*host_device_pointer)(Address*, void*, unsigned flags);
  Result (*stream_create)(Stream*, unsigned flags);
  Result (*stream_destroy)(Stream);
  Result (*stream_wait_event)(Stream, Event, unsigned flags);
  Result (*event_create)(Event*, unsigned flags);
  Result (*event_destroy)(Event);
  Result (*event_record)(Event, Stream);
  Result (*event_query)(Event);
  Result (*copy_in_async)(Address, const void*, size_t, Stream);
  Result (*copy_out_async)(void*, Address, size_t, Stream);
  // Returns kNotSupported if the driver is older than CUDA 13.0.
  Result (*copy_batch_async)(Address* targets, Address* sources, size_t* bytes, size_t count, CopyAttributes*,
                             size_t* first_of_attributes, size_t attribute_count, Stream);
  Result (*module_load)(Module*, const void* image);
  Result (*module_function)(Function*, Module, const char* name);
  Result (*launch)(Function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared_bytes, Stream, void** parameters, void** extra);

  // Loads and initializes the driver at the first call. Throws Failure (kUnavailable) if there is
  // no driver or it refuses. The same happens in a child that was forked after the first call,
  // because CUDA does not work there. GDSDATA_LIBCUDA names another library than libcuda.so.1.
  static const CudaApi& get();

  // "CUDA_ERROR_OUT_OF_MEMORY (out of memory)"
  std::string describe(Result result) const;
  // Throws Failure (kDevice) if `result` is an error: "<operation> failed: <name>".
  void check(Result result, const std::string& operation) const;
};

}  // namespace gdsdata
