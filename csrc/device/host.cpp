#include <cstring>
#include <string>

#include "base/error.h"
#include "device/anonymous_memory.h"
#include "device/device.h"

namespace gdsdata {

namespace {

template <typename Interface>
class HostBuffer final : public Interface {
 public:
  explicit HostBuffer(size_t bytes) : memory_(bytes) {}
  std::byte* data() override { return memory_.data(); }
  size_t size_bytes() const override { return memory_.size_bytes(); }

 private:
  AnonymousMemory memory_;
};

class HostDevice final : public Device {
 public:
  std::string name() const override { return "cpu"; }
  int ordinal() const override { return 0; }
  bool host_addressable() const override { return true; }
  std::unique_ptr<DeviceBuffer> allocate(size_t bytes) override {
    return std::make_unique<HostBuffer<DeviceBuffer>>(bytes);
  }
  std::unique_ptr<PinnedBuffer> allocate_pinned(size_t bytes) override {
    return std::make_unique<HostBuffer<PinnedBuffer>>(bytes);
  }
  // Not needed, because the processor itself delivers.
  std::unique_ptr<Registration> register_mapping(const std::byte*, size_t) override { refuse(); }
  std::unique_ptr<Stream> make_stream() override { refuse(); }
  std::unique_ptr<Stream> foreign_stream(uintptr_t) override { refuse(); }
  AddressRange allocation_of(const std::byte*) override {
    return {nullptr, reinterpret_cast<const std::byte*>(UINTPTR_MAX)};
  }
  void bind_thread() override {}
  bool step_beside_captures() noexcept override { return false; }
  void step_back() noexcept override {}

 private:
  [[noreturn]] static void refuse() {
    throw Failure({ErrorCode::kInvalidArgument, "the processor has no streams and registers no memory"});
  }
};

}  // namespace

std::shared_ptr<Device> host_device() { return std::make_shared<HostDevice>(); }

}  // namespace gdsdata
