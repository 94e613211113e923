#include "backend/cufile_api.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <regex>
#include <utility>

#include "device/cuda_api.h"

namespace gdsdata {

namespace {

// The names are those of cufile.h. A remedy is given where one is known.
struct Code {
  int code;
  const char* name;
  const char* remedy;
};

constexpr const char* kRetry = "; it passes, try again";
constexpr const char* kNvfs = "; is nvidia-fs loaded (lsmod), or else use_pci_p2pdma set in cufile.json?";
constexpr const char* kFileSystem =
    "; GPUDirect Storage wants a local NVMe disk with ext4 or xfs, or a distributed file system that supports it";
constexpr const char* kPinned =
    "; raise max_device_pinned_mem_size_kb in cufile.json, or keep fewer bytes in flight (prefetch, batch_size)";
constexpr const char* kUdev =
    "; in a container without /run/udev cuFile knows no file system: bind-mount it (cufile.log says more)";

constexpr Code kCodes[] = {
    {5001, "CU_FILE_DRIVER_NOT_INITIALIZED", "; load nvidia-fs, or set allow_compat_mode in cufile.json"},
    {5002, "CU_FILE_DRIVER_INVALID_PROPS", "; see cufile.json"},
    {5003, "CU_FILE_DRIVER_UNSUPPORTED_LIMIT", "; see cufile.json"},
    {5004, "CU_FILE_DRIVER_VERSION_MISMATCH", "; nvidia-fs and libcufile must come of one release"},
    {5005, "CU_FILE_DRIVER_VERSION_READ_ERROR", kNvfs},
    {5006, "CU_FILE_DRIVER_CLOSING", "; somebody in this process closed cuFile's driver"},
    {5007, "CU_FILE_PLATFORM_NOT_SUPPORTED", "; use backend=\"auto\" on this machine"},
    {5008, "CU_FILE_IO_NOT_SUPPORTED", kFileSystem},
    {5009, "CU_FILE_DEVICE_NOT_SUPPORTED", "; use backend=\"auto\" with this GPU"},
    {5010, "CU_FILE_NVFS_DRIVER_ERROR", "; see the kernel's log"},
    {5011, "CU_FILE_CUDA_DRIVER_ERROR", ""},
    {5012, "CU_FILE_CUDA_POINTER_INVALID", ""},
    {5013, "CU_FILE_CUDA_MEMORY_TYPE_INVALID", ""},
    {5014, "CU_FILE_CUDA_POINTER_RANGE_ERROR", ""},
    {5015, "CU_FILE_CUDA_CONTEXT_MISMATCH", ""},
    {5016, "CU_FILE_INVALID_MAPPING_SIZE", kPinned},
    {5017, "CU_FILE_INVALID_MAPPING_RANGE", kPinned},
    {5018, "CU_FILE_INVALID_FILE_TYPE", "; only regular files and block devices can be read"},
    {5019, "CU_FILE_INVALID_FILE_OPEN_FLAG", kFileSystem},
    {5020, "CU_FILE_DIO_NOT_SET", "; the file system refuses O_DIRECT, which GPUDirect Storage needs"},
    {5022, "CU_FILE_INVALID_VALUE", ""},
    {5023, "CU_FILE_MEMORY_ALREADY_REGISTERED", ""},
    {5024, "CU_FILE_MEMORY_NOT_REGISTERED", ""},
    {5025, "CU_FILE_PERMISSION_DENIED", "; check the permissions of the file and of /dev/nvidia-fs*"},
    {5026, "CU_FILE_DRIVER_ALREADY_OPEN", ""},
    {5027, "CU_FILE_HANDLE_NOT_REGISTERED", kUdev},
    {5028, "CU_FILE_HANDLE_ALREADY_REGISTERED", ""},
    {5029, "CU_FILE_DEVICE_NOT_FOUND", ""},
    {5030, "CU_FILE_INTERNAL_ERROR", kUdev},
    {5031, "CU_FILE_GETNEWFD_FAILED", "; raise the limit of open files (ulimit -n)"},
    {5033, "CU_FILE_NVFS_SETUP_ERROR", kNvfs},
    {5034, "CU_FILE_IO_DISABLED", "; cufile.json forbids it for this file"},
    {5035, "CU_FILE_BATCH_SUBMIT_FAILED", "; without cufile_batch calls block, and work in more places"},
    {5036, "CU_FILE_GPU_MEMORY_PINNING_FAILED", kPinned},
    {5037, "CU_FILE_BATCH_FULL", "; lower queue_depth, or raise io_batchsize in cufile.json"},
    {5038, "CU_FILE_ASYNC_NOT_SUPPORTED", ""},
    {5039, "CU_FILE_INTERNAL_BATCH_SETUP_ERROR", kRetry},
    {5040, "CU_FILE_INTERNAL_BATCH_SUBMIT_ERROR", kRetry},
    {5041, "CU_FILE_INTERNAL_BATCH_GETSTATUS_ERROR", kRetry},
    {5042, "CU_FILE_INTERNAL_BATCH_CANCEL_ERROR", kRetry},
    {5043, "CU_FILE_NOMEM_ERROR", kRetry},
    {5044, "CU_FILE_IO_ERROR", "; the disk reported a failure, see the kernel's log"},
    {5045, "CU_FILE_INTERNAL_BUF_REGISTER_ERROR", kPinned},
    {5046, "CU_FILE_HASH_OPR_ERROR", ""},
    {5047, "CU_FILE_INVALID_CONTEXT_ERROR", ""},
    {5048, "CU_FILE_NVFS_INTERNAL_DRIVER_ERROR", "; see the kernel's log"},
    {5049, "CU_FILE_BATCH_NOCOMPAT_ERROR", "; without cufile_batch calls block, and work in more places"},
};

std::atomic<CufileApi::Status (*)(int)> set_level{nullptr};  // set when the library is loaded

struct Loaded {
  CufileApi api{};
  std::optional<Error> error;
  pid_t process = 0;
};

struct SearchPath {
  std::mutex mutex;
  std::vector<std::string> files;
};

SearchPath& search_path() {
  static auto* instance = new SearchPath;
  return *instance;
}

std::vector<std::string> candidates() {
  const char* given = std::getenv("GDSDATA_LIBCUFILE");
  if (given != nullptr && *given != '\0') return {given};
  // The bare names come first, so that a library that torch has loaded is used.
  std::vector<std::string> names = {"libcufile.so.0", "libcufile.so", "/usr/local/cuda/lib64/libcufile.so.0"};
  std::lock_guard lock(search_path().mutex);
  names.insert(names.end(), search_path().files.begin(), search_path().files.end());
  return names;
}

template <typename Function>
void find(void* library, const char* name, Function& function, std::optional<Error>& error) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (function == nullptr && !error) {
    error = Error{ErrorCode::kUnavailable,
                  std::string("cuFile: the library has no ") + name + "; gdsdata needs cuFile of CUDA 12.1 or later"};
  }
}

void* open_library(std::optional<Error>& error) {
  std::string refusals;
  for (const std::string& name : candidates()) {
    if (void* library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL); library != nullptr) return library;
    const char* why = ::dlerror();
    refusals += (refusals.empty() ? "" : "; ") + std::string(why != nullptr ? why : name);
  }
  error = Error{ErrorCode::kUnavailable,
                "cuFile: no libcufile was found (" + refusals +
                    "): pip install nvidia-cufile, or name one by GDSDATA_LIBCUFILE, or use backend=\"auto\""};
  return nullptr;
}

bool exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The driver reads the level of statistics when it opens, so the level is set before and counting
// starts after. If any of this fails, transfers still work, but none is reported as DMA.
bool start_counting(const CufileApi& api) {
  if (api.statistics_start == nullptr || api.statistics == nullptr) return false;
  if (api.statistics_start().code != 0) return false;
  const auto probe = std::make_unique<CufileApi::Statistics>();
  return api.statistics(probe.get()).code == 0 && probe->gpu_count <= std::size(probe->gpus);
}

Loaded load() {
  Loaded loaded;
  loaded.process = ::getpid();
  void* library = open_library(loaded.error);
  if (library == nullptr) return loaded;
  CufileApi& api = loaded.api;
  const auto get = [&](const char* symbol, auto& function) { find(library, symbol, function, loaded.error); };
  get("cuFileDriverOpen", api.driver_open);
  get("cuFileDriverGetProperties", api.driver_properties);
  get("cuFileHandleRegister", api.handle_register);
  get("cuFileHandleDeregister", api.handle_deregister);
  get("cuFileBufRegister", api.memory_register);
  get("cuFileBufDeregister", api.memory_deregister);
  get("cuFileRead", api.read);
  get("cuFileWrite", api.write);
  get("cuFileBatchIOSetUp", api.batch_set_up);
  get("cuFileBatchIOSubmit", api.batch_submit);
  get("cuFileBatchIOGetStatus", api.batch_status);
  get("cuFileBatchIOCancel", api.batch_cancel);
  get("cuFileBatchIODestroy", api.batch_destroy);
  if (loaded.error) return loaded;
  std::optional<Error> ignored;
  find(library, "cuFileSetStatsLevel", api.set_statistics_level, ignored);
  find(library, "cuFileStatsStart", api.statistics_start, ignored);
  find(library, "cuFileGetStatsL3", api.statistics, ignored);
  set_level = api.set_statistics_level;

  constexpr int kRoutesLevel = 3;
  const bool counting = cufile_dma_is_possible() && api.set_statistics_level != nullptr &&
                        api.set_statistics_level(kRoutesLevel).code == 0;
  constexpr int kAlreadyOpen = 5026;
  const CufileApi::Status opened = api.driver_open();
  if (opened.code != 0 && opened.code != kAlreadyOpen) {
    loaded.error = Error{ErrorCode::kUnavailable, "cuFile: its driver does not open: " + CufileApi::describe(opened)};
    return loaded;
  }
  if (const CufileApi::Status status = api.driver_properties(&api.properties); status.code != 0) {
    loaded.error =
        Error{ErrorCode::kUnavailable, "cuFile: its driver has no properties: " + CufileApi::describe(status)};
  }
  api.counts_routes = counting && start_counting(api);
  return loaded;
}

}  // namespace

const CufileApi& CufileApi::get() {
  static const Loaded* loaded = new Loaded(load());  // never destroyed: memory may be released at exit
  if (loaded->error) throw Failure(*loaded->error);
  if (loaded->process != ::getpid()) {
    throw Failure({ErrorCode::kUnavailable,
                   "cuFile does not work in a process forked after its first use; start workers with 'spawn'"});
  }
  return loaded->api;
}

std::string CufileApi::describe(Status status) {
  const auto known =
      std::find_if(std::begin(kCodes), std::end(kCodes), [&](const Code& code) { return code.code == status.code; });
  const std::string number = std::to_string(status.code);
  if (known == std::end(kCodes)) return "cuFile error " + number;
  std::string text = std::string(known->name) + " (" + number + ")";
  if (status.code == kCudaDriverError && status.cuda_code != 0) {
    text += ": " + CudaApi::get().describe(status.cuda_code);
  }
  return text + known->remedy;
}

void stop_cufile_statistics() {
  if (const auto set = set_level.load(); set != nullptr) set(0);
}

const char* CufileApi::why_not_counted() {
  return cufile_dma_is_possible() ? "this version does not say which way bytes go; use cuFile of CUDA 12.9 or later"
                                  : "nvidia-fs is not loaded, and cufile.json has no use_pci_p2pdma";
}

bool cufile_dma_is_possible() {
  // If a library is named, DMA is assumed. Otherwise statistics are enabled only if there is
  // something to count. With statistics on, libcufile writes a report at exit, and has crashed
  // there (rapidsai/kvikio issue 497).
  const char* named = std::getenv("GDSDATA_LIBCUFILE");
  if (named != nullptr && *named != '\0') return true;
  if (exists("/proc/driver/nvidia-fs") || exists("/sys/module/nvidia_fs")) return true;
  const char* given = std::getenv("CUFILE_ENV_PATH_JSON");
  const std::string configuration = text_of(given != nullptr && *given != '\0' ? given : "/etc/cufile.json") +
                                    text_of("/usr/local/cuda/gds/cufile.json");
  return std::regex_search(configuration, std::regex("\"use_pci_p2pdma\"\\s*:\\s*true"));
}

void set_cufile_search_path(std::vector<std::string> files) {
  std::lock_guard lock(search_path().mutex);
  search_path().files = std::move(files);
}

CufileRoutes CufileRoutes::now(const CufileApi& api) {
  CufileRoutes routes;
  if (!api.counts_routes) return routes;
  thread_local auto statistics = std::make_unique<CufileApi::Statistics>();
  if (api.statistics(statistics.get()).code != 0) return routes;
  // Batches are counted when they are submitted. Some versions count them only there.
  routes.dma = statistics->batch_nvfs.ok + statistics->batch_p2p.ok;
  routes.host = statistics->batch_posix_enqueued.ok + statistics->batch_aio.ok + statistics->batch_uring.ok +
                statistics->batch_mixed.ok;
  const size_t gpus = std::min<size_t>(statistics->gpu_count, std::size(statistics->gpus));
  for (size_t i = 0; i < gpus; ++i) {
    const CufileApi::GpuStatistics& gpu = statistics->gpus[i];
    routes.dma += gpu.p2p_reads + gpu.nvfs_reads + gpu.p2p_writes + gpu.nvfs_writes;
    routes.host += gpu.posix_reads + gpu.posix_writes;
  }
  return routes;
}

Error cufile_error(const std::string& operation, const std::string& path, CufileApi::Status status, uint64_t offset,
                   uint64_t length) {
  if (status.code < CufileApi::kFirstCode) return system_error(operation, path, status.code, offset, length);
  Error error{ErrorCode::kDevice, "could not " + operation + " '" + path + "'", path, offset, length};
  if (length != 0) {
    error.message += " (offset " + std::to_string(offset) + ", length " + std::to_string(length) + " bytes)";
  }
  error.message += ": " + CufileApi::describe(status);
  return error;
}

}  // namespace gdsdata
