// A GPU, through the driver's interface. Each call makes the device's primary context current only
// for its own duration, because the thread may use another GPU, in torch for example.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "device/anonymous_memory.h"
#include "device/cuda_api.h"
#include "device/device.h"
#include "device/gather_kernel.h"
#include "tuning.h"

namespace gdsdata {

namespace {

// Buffers, streams and events of a device use this object, which is never freed. They may outlive
// the engines, until the interpreter exits and the driver only reports that it has shut down.
class Gpu {
 public:
  Gpu(const CudaApi& api, int ordinal) : api(api), ordinal(ordinal) {
    int count = 0;
    api.check(api.device_count(&count), "counting the CUDA devices");
    if (ordinal < 0 || ordinal >= count) {
      throw Failure(
          {ErrorCode::kUnavailable, "there is no cuda:" + std::to_string(ordinal) + ", but " + std::to_string(count) +
                                        " CUDA device(s), counted from 0; CUDA_VISIBLE_DEVICES may hide some"});
    }
    api.check(api.device_get(&id, ordinal), "opening " + name());
    // Retained for the life of the process, as torch does.
    api.check(api.primary_context_retain(&context, id), "making a CUDA context on " + name());
    if (api.device_attribute(&numa_node, CudaApi::kAttributeHostNumaId, id) != CudaApi::kSuccess) numa_node = -1;
  }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  std::string name() const { return "cuda:" + std::to_string(ordinal); }

  CudaApi::Event take_event() {
    {
      std::lock_guard lock(events_mutex_);
      if (!events_.empty()) {
        const CudaApi::Event event = events_.back();
        events_.pop_back();
        return event;
      }
      if (events_.capacity() == made_events_) events_.reserve(2 * made_events_ + 1);
      ++made_events_;
    }
    CudaApi::Event event = nullptr;
    // Not an event on which a thread can sleep: each of those raises an interrupt, and consecutive
    // copies lose a tenth of the link's rate (docs/design-decisions.md).
    api.check(api.event_create(&event, CudaApi::kEventDisableTiming), "making a CUDA event");
    return event;
  }
  void release_event(CudaApi::Event event) {
    if (process_ != process_id()) return;  // in a forked child, the lock may be held forever
    std::lock_guard lock(events_mutex_);
    events_.push_back(event);
  }

  CudaApi::Function gather_function() {
    std::lock_guard lock(module_mutex_);
    if (gather_ == nullptr) {
      CudaApi::Module module = nullptr;
      api.check(api.module_load(&module, kGatherPtx), "compiling the gather kernel on " + name());
      api.check(api.module_function(&gather_, module, kGatherName), "finding the gather kernel on " + name());
    }
    return gather_;
  }

  const CudaApi& api;
  const int ordinal;
  CudaApi::DeviceId id = 0;
  CudaApi::Context context = nullptr;
  int numa_node = -1;

 private:
  const int64_t process_ = process_id();
  std::mutex events_mutex_;
  // Events that nobody uses. It has room for all, so that a destructor returns one without memory.
  std::vector<CudaApi::Event> events_;
  size_t made_events_ = 0;
  std::mutex module_mutex_;
  CudaApi::Function gather_ = nullptr;
};

// The thread's mode towards captures before it stepped beside them; -1: it has not.
thread_local int mode_before = -1;

// While another thread of the program captures a CUDA graph, a call such as event_query fails, and
// ends that capture. It does not if the calling thread's mode says that it has nothing to do with
// captures.
bool step_beside(const CudaApi& api) noexcept {
  if (mode_before >= 0) return false;
  int mode = CudaApi::kCaptureModeRelaxed;
  if (api.exchange_capture_mode(&mode) != CudaApi::kSuccess) return false;
  mode_before = mode;
  return true;
}

void step_back_from(const CudaApi& api) noexcept {
  int mode = std::exchange(mode_before, -1);
  api.exchange_capture_mode(&mode);
}

class Stepped {
 public:
  explicit Stepped(const CudaApi& api) : api_(api), stepped_(step_beside(api)) {}
  ~Stepped() {
    if (stepped_) step_back_from(api_);
  }
  Stepped(const Stepped&) = delete;
  Stepped& operator=(const Stepped&) = delete;

 private:
  const CudaApi& api_;
  const bool stepped_;
};

class Current {
 public:
  explicit Current(Gpu& gpu) : gpu_(gpu), stepped_(gpu.api) {
    gpu.api.check(gpu.api.context_push(gpu.context), "using " + gpu.name());
  }
  ~Current() {
    CudaApi::Context context = nullptr;
    gpu_.api.context_pop(&context);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  Gpu& gpu_;
  const Stepped stepped_;
};

// For destructors. If the driver has shut down, everything is released already.
template <typename Call>
void release_on(Gpu& gpu, Call call) {
  const Stepped stepped(gpu.api);
  if (gpu.api.context_push(gpu.context) != CudaApi::kSuccess) return;
  call();
  CudaApi::Context context = nullptr;
  gpu.api.context_pop(&context);
}

std::byte* pointer(CudaApi::Address address) { return reinterpret_cast<std::byte*>(address); }
CudaApi::Address address(const std::byte* pointer) { return reinterpret_cast<CudaApi::Address>(pointer); }

class CudaEvent final : public Event {
 public:
  explicit CudaEvent(Gpu& gpu) : gpu_(gpu), event_(gpu.take_event()) {}
  ~CudaEvent() override { gpu_.release_event(event_); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  bool done() override {
    if (done_.load(std::memory_order_acquire)) return true;  // a worker has seen it, so a consumer need not ask
    const Current current(gpu_);
    const CudaApi::Result result = gpu_.api.event_query(event_);
    if (result == CudaApi::kNotReady) return false;
    gpu_.api.check(result, "asking for an event on " + gpu_.name());
    done_.store(true, std::memory_order_release);
    return true;
  }
  // Sleeps between polls, because a thread that spins would take a core from the program.
  void wait() override {
    std::chrono::microseconds sleep = tuning::kShortestEventSleep;
    while (!done()) {
      std::this_thread::sleep_for(sleep);
      sleep = std::min(2 * sleep, tuning::kLongestEventSleep);
    }
  }
  CudaApi::Event handle() const { return event_; }

 private:
  Gpu& gpu_;
  const CudaApi::Event event_;
  std::atomic<bool> done_{false};  // never reset: an event is recorded once
};

class CudaStream final : public Stream {
 public:
  explicit CudaStream(Gpu& gpu) : gpu_(gpu), owned_(true) {
    const Current current(gpu);
    gpu.api.check(gpu.api.stream_create(&stream_, CudaApi::kStreamNonBlocking), "making a stream on " + gpu.name());
  }
  CudaStream(Gpu& gpu, CudaApi::Stream stream) : gpu_(gpu), owned_(false), stream_(stream) {}
  ~CudaStream() override {
    if (owned_) release_on(gpu_, [&] { gpu_.api.stream_destroy(stream_); });
  }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  void copy_in(std::byte* device, const std::byte* host, size_t bytes) override {
    const Current current(gpu_);
    gpu_.api.check(gpu_.api.copy_in_async(address(device), host, bytes, stream_),
                   "copying " + std::to_string(bytes) + " bytes to " + gpu_.name());
  }
  void copy_all_in(std::span<const CopyIn> copies) override {
    if (copies.size() > 1 && copied_together(copies)) return;
    for (const CopyIn& copy : copies) copy_in(copy.device, copy.host, copy.bytes);
  }
  void copy_out(std::byte* host, const std::byte* device, size_t bytes) override {
    const Current current(gpu_);
    gpu_.api.check(gpu_.api.copy_out_async(host, address(device), bytes, stream_),
                   "copying " + std::to_string(bytes) + " bytes from " + gpu_.name());
  }
  void gather(std::byte* target, const uint64_t* addresses, size_t count, size_t bytes) override {
    const Current current(gpu_);
    const CudaApi::Function function = gpu_.gather_function();
    if (count == 0 || bytes == 0) return;
    uint64_t common = address(target) | bytes;
    for (size_t i = 0; i < count; ++i) common |= addresses[i];
    CudaApi::Address target_address = address(target);
    uint64_t count_parameter = count, bytes_parameter = bytes;
    unsigned unit_bytes = gather_unit_bytes(common);
    void* parameters[] = {&target_address, &addresses, &count_parameter, &bytes_parameter, &unit_bytes};
    gpu_.api.check(gpu_.api.launch(function, tuning::kGatherBlocks, 1, 1, tuning::kGatherThreads, 1, 1, 0, stream_,
                                   parameters, nullptr),
                   "gathering " + std::to_string(count) + " records on " + gpu_.name());
  }
  void wait(Event& event) override {
    const auto* recorded = dynamic_cast<const CudaEvent*>(&event);
    if (recorded == nullptr) {
      throw Failure({ErrorCode::kInvalidArgument,
                     "a stream of " + gpu_.name() + " waits for events of GPUs only, not for one of another kind"});
    }
    const Current current(gpu_);
    gpu_.api.check(gpu_.api.stream_wait_event(stream_, recorded->handle(), 0),
                   "making a stream wait on " + gpu_.name());
  }
  std::shared_ptr<Event> record() override {
    const Current current(gpu_);
    auto event = std::make_shared<CudaEvent>(gpu_);
    gpu_.api.check(gpu_.api.event_record(event->handle(), stream_), "recording an event on " + gpu_.name());
    return event;
  }

 private:
  // Returns false if the driver cannot do it.
  bool copied_together(std::span<const CopyIn> copies) {
    std::vector<CudaApi::Address> targets, sources;
    std::vector<size_t> sizes;
    for (const CopyIn& copy : copies) {
      targets.push_back(address(copy.device));
      sources.push_back(address(copy.host));
      sizes.push_back(copy.bytes);
    }
    CudaApi::CopyAttributes attributes{CudaApi::kSourceOrderAny, {}, {}, 0};
    size_t of_all = 0;
    const Current current(gpu_);
    const CudaApi::Result result = gpu_.api.copy_batch_async(targets.data(), sources.data(), sizes.data(),
                                                             copies.size(), &attributes, &of_all, 1, stream_);
    if (result == CudaApi::kNotSupported) return false;
    gpu_.api.check(result, "copying " + std::to_string(std::accumulate(sizes.begin(), sizes.end(), size_t{0})) +
                               " bytes in " + std::to_string(copies.size()) + " pieces to " + gpu_.name());
    return true;
  }

  Gpu& gpu_;
  const bool owned_;
  CudaApi::Stream stream_ = nullptr;
};

class CudaBuffer final : public DeviceBuffer {
 public:
  CudaBuffer(Gpu& gpu, size_t bytes) : gpu_(gpu), size_bytes_(bytes) {
    const Current current(gpu);
    gpu.api.check(gpu.api.memory_allocate(&address_, bytes == 0 ? 1 : bytes),
                  "allocating " + std::to_string(bytes) + " bytes on " + gpu.name() +
                      " for a batch (a smaller batch_size or prefetch takes less)");
  }
  // The driver waits for work that still uses the buffer.
  ~CudaBuffer() override {
    release_on(gpu_, [&] { gpu_.api.memory_free(address_); });
  }
  CudaBuffer(const CudaBuffer&) = delete;
  CudaBuffer& operator=(const CudaBuffer&) = delete;
  std::byte* data() override { return pointer(address_); }
  size_t size_bytes() const override { return size_bytes_; }

 private:
  Gpu& gpu_;
  const size_t size_bytes_;
  CudaApi::Address address_ = 0;
};

// Anonymous memory that is registered afterwards. That is three times faster than memory that the
// driver allocates, and io_uring accepts it too.
class CudaPinnedBuffer final : public PinnedBuffer {
 public:
  CudaPinnedBuffer(Gpu& gpu, size_t bytes) : gpu_(gpu), memory_(bytes) {
    memory_.prefer_node(gpu.numa_node);
    memory_.hide_from_children();
    memory_.populate();
    const Current current(gpu);
    gpu.api.check(gpu.api.host_register(memory_.data(), memory_.mapped_bytes(),
                                        CudaApi::kRegisterPortable | CudaApi::kRegisterDeviceMap),
                  "pinning " + std::to_string(bytes) + " bytes for " + gpu.name());
  }
  ~CudaPinnedBuffer() override {
    if (process_ != process_id()) return;  // a forked child has nothing registered
    release_on(gpu_, [&] { gpu_.api.host_unregister(memory_.data()); });
  }
  CudaPinnedBuffer(const CudaPinnedBuffer&) = delete;
  CudaPinnedBuffer& operator=(const CudaPinnedBuffer&) = delete;
  std::byte* data() override { return memory_.data(); }
  size_t size_bytes() const override { return memory_.size_bytes(); }

 private:
  Gpu& gpu_;
  const int64_t process_ = process_id();
  AnonymousMemory memory_;
};

class CudaRegistration final : public Registration {
 public:
  CudaRegistration(Gpu& gpu, const std::byte* memory, size_t bytes)
      : gpu_(gpu), memory_(const_cast<std::byte*>(memory)) {
    const Current current(gpu);
    int read_only = 0;
    gpu.api.device_attribute(&read_only, CudaApi::kAttributeReadOnlyRegisterSupported, gpu.id);
    if (read_only == 0) {
      throw Failure({ErrorCode::kUnavailable,
                     gpu.name() + " cannot register memory that is mapped read-only, which mapped files are"});
    }
    gpu.api.check(
        gpu.api.host_register(memory_, bytes,
                              CudaApi::kRegisterPortable | CudaApi::kRegisterDeviceMap | CudaApi::kRegisterReadOnly),
        "registering " + std::to_string(bytes) + " mapped bytes with " + gpu.name());
    CudaApi::Address on_device = 0;
    const CudaApi::Result result = gpu.api.host_device_pointer(&on_device, memory_, 0);
    if (result != CudaApi::kSuccess) gpu.api.host_unregister(memory_);
    gpu.api.check(result, "finding registered memory on " + gpu.name());
    on_device_ = pointer(on_device);
  }
  ~CudaRegistration() override {
    release_on(gpu_, [&] { gpu_.api.host_unregister(memory_); });
  }
  CudaRegistration(const CudaRegistration&) = delete;
  CudaRegistration& operator=(const CudaRegistration&) = delete;
  const std::byte* on_device() const override { return on_device_; }

 private:
  Gpu& gpu_;
  std::byte* const memory_;
  const std::byte* on_device_ = nullptr;
};

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(Gpu& gpu) : gpu_(gpu) {}
  std::string name() const override { return gpu_.name(); }
  int ordinal() const override { return gpu_.ordinal; }
  bool host_addressable() const override { return false; }
  std::unique_ptr<DeviceBuffer> allocate(size_t bytes) override { return std::make_unique<CudaBuffer>(gpu_, bytes); }
  std::unique_ptr<PinnedBuffer> allocate_pinned(size_t bytes) override {
    return std::make_unique<CudaPinnedBuffer>(gpu_, bytes);
  }
  std::unique_ptr<Registration> register_mapping(const std::byte* memory, size_t bytes) override {
    return std::make_unique<CudaRegistration>(gpu_, memory, bytes);
  }
  std::unique_ptr<Stream> make_stream() override { return std::make_unique<CudaStream>(gpu_); }
  std::unique_ptr<Stream> foreign_stream(uintptr_t handle) override {
    return std::make_unique<CudaStream>(gpu_, reinterpret_cast<CudaApi::Stream>(handle));
  }
  AddressRange allocation_of(const std::byte* memory) override {
    const Current current(gpu_);
    CudaApi::Address begin = 0;
    size_t bytes = 0;
    if (gpu_.api.memory_range(&begin, &bytes, address(memory)) != CudaApi::kSuccess) return {};
    const auto* first = reinterpret_cast<const std::byte*>(begin);
    return {first, first + bytes};
  }
  bool step_beside_captures() noexcept override { return step_beside(gpu_.api); }
  void step_back() noexcept override { step_back_from(gpu_.api); }
  void bind_thread() override {
    step_beside_captures();
    gpu_.api.check(gpu_.api.context_set(gpu_.context), "using " + gpu_.name());
  }

 private:
  Gpu& gpu_;
};

}  // namespace

std::shared_ptr<Device> cuda_device(int ordinal) {
  const CudaApi& api = CudaApi::get();
  static std::mutex mutex;
  static auto* devices = new std::map<int, std::shared_ptr<Device>>;
  std::lock_guard lock(mutex);
  std::shared_ptr<Device>& device = (*devices)[ordinal];
  if (device == nullptr) device = std::make_shared<CudaDevice>(*new Gpu(api, ordinal));
  return device;
}

int exchange_capture_mode(int mode) {
  const CudaApi& api = CudaApi::get();
  api.check(api.exchange_capture_mode(&mode), "changing a thread's mode towards captures of CUDA graphs");
  return mode;
}

}  // namespace gdsdata
