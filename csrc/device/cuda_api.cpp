#include "device/cuda_api.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <optional>

#include "base/error.h"

namespace gdsdata {

namespace {

struct Loaded {
  CudaApi api{};
  std::optional<Error> error;
  pid_t process = 0;
};

// If the library lacks a function, loading fails: the driver is older than CUDA 11.0.
template <typename Function>
void find(void* library, const char* name, Function& function, std::optional<Error>& error) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (function == nullptr && !error) {
    error = Error{ErrorCode::kUnavailable,
                  std::string("the CUDA driver has no ") + name + "; gdsdata needs a driver of CUDA 11.0 or later"};
  }
}

Loaded load() {
  Loaded loaded;
  loaded.process = ::getpid();
  const char* given = std::getenv("GDSDATA_LIBCUDA");
  const std::string name = given != nullptr && *given != '\0' ? given : "libcuda.so.1";
  void* library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed: torch uses it too
  if (library == nullptr) {
    const char* why = ::dlerror();
    loaded.error = Error{ErrorCode::kUnavailable, "no CUDA driver was found (" + std::string(why ? why : name) +
                                                      "): install NVIDIA's driver, or use device=\"cpu\""};
    return loaded;
  }
  CudaApi& api = loaded.api;
  const auto get = [&](const char* symbol, auto& function) { find(library, symbol, function, loaded.error); };
  get("cuInit", api.init);
  get("cuGetErrorName", api.error_name);
  get("cuGetErrorString", api.error_string);
  get("cuDeviceGetCount", api.device_count);
  get("cuDeviceGet", api.device_get);
  get("cuDeviceGetAttribute", api.device_attribute);
  get("cuDevicePrimaryCtxRetain", api.primary_context_retain);
  get("cuCtxPushCurrent_v2", api.context_push);
  get("cuCtxPopCurrent_v2", api.context_pop);
  get("cuCtxSetCurrent", api.context_set);
  get("cuThreadExchangeStreamCaptureMode", api.exchange_capture_mode);
  get("cuMemAlloc_v2", api.memory_allocate);
  get("cuMemFree_v2", api.memory_free);
  get("cuMemGetAddressRange_v2", api.memory_range);
  get("cuMemHostRegister_v2", api.host_register);
  get("cuMemHostUnregister", api.host_unregister);
  get("cuMemHostGetDevicePointer_v2", api.host_device_pointer);
  get("cuStreamCreate", api.stream_create);
  get("cuStreamDestroy_v2", api.stream_destroy);
  get("cuStreamWaitEvent", api.stream_wait_event);
  get("cuEventCreate", api.event_create);
  get("cuEventDestroy_v2", api.event_destroy);
  get("cuEventRecord", api.event_record);
  get("cuEventQuery", api.event_query);
  get("cuMemcpyHtoDAsync_v2", api.copy_in_async);
  get("cuMemcpyDtoHAsync_v2", api.copy_out_async);
  api.copy_batch_async = reinterpret_cast<decltype(api.copy_batch_async)>(::dlsym(library, "cuMemcpyBatchAsync_v2"));
  if (api.copy_batch_async == nullptr) api.copy_batch_async = [](auto...) { return CudaApi::kNotSupported; };
  get("cuModuleLoadData", api.module_load);
  get("cuModuleGetFunction", api.module_function);
  get("cuLaunchKernel", api.launch);
  if (loaded.error) return loaded;
  if (const CudaApi::Result result = api.init(0); result != CudaApi::kSuccess) {
    loaded.error = Error{ErrorCode::kUnavailable, "the CUDA driver does not start: " + api.describe(result) +
                                                      "; does nvidia-smi work here? Otherwise use device=\"cpu\""};
  }
  return loaded;
}

}  // namespace

const CudaApi& CudaApi::get() {
  static const Loaded* loaded = new Loaded(load());  // never destroyed: buffers may be released at exit
  if (loaded->error) throw Failure(*loaded->error);
  if (loaded->process != ::getpid()) {
    throw Failure(
        {ErrorCode::kUnavailable,
         "CUDA does not work in a process forked after its first use; start workers with the 'spawn' method"});
  }
  return loaded->api;
}

std::string CudaApi::describe(Result result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  error_name(result, &name);
  error_string(result, &text);
  if (name == nullptr) return "CUDA error " + std::to_string(result);
  return std::string(name) + (text != nullptr ? std::string(" (") + text + ")" : "");
}

void CudaApi::check(Result result, const std::string& operation) const {
  if (result != kSuccess) throw Failure({ErrorCode::kDevice, operation + " failed: " + describe(result)});
}

}  // namespace gdsdata
