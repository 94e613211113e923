#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/extent_math.h"
#include "device/device.h"

namespace gdsdata {

namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kHugePageBytes = 2 << 20;

// Anonymous memory. From one huge page on it is aligned to huge pages and asks for them: a batch of tens of
// megabytes then costs tens of page faults at its first use, not thousands.
class AnonymousMemory {
 public:
  explicit AnonymousMemory(size_t bytes) : size_bytes_(bytes) {
    const bool huge = bytes >= kHugePageBytes;
    const size_t alignment = huge ? kHugePageBytes : kPageBytes;
    mapped_bytes_ = align_up(std::max<size_t>(bytes, 1), alignment);
    const size_t reserved_bytes = mapped_bytes_ + (huge ? kHugePageBytes : 0);
    void* reserved = ::mmap(nullptr, reserved_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (reserved == MAP_FAILED) {
      throw Failure({ErrorCode::kDevice, "no memory for a buffer of " + std::to_string(bytes) +
                                             " bytes; use a smaller batch_size, prefetch or bounce_bytes"});
    }
    auto* begin = static_cast<std::byte*>(reserved);
    const auto address = reinterpret_cast<uintptr_t>(begin);
    data_ = begin + (align_up(address, alignment) - address);
    if (data_ != begin) ::munmap(begin, data_ - begin);
    std::byte* end = begin + reserved_bytes;
    if (data_ + mapped_bytes_ != end) ::munmap(data_ + mapped_bytes_, end - (data_ + mapped_bytes_));
    if (huge) ::madvise(data_, mapped_bytes_, MADV_HUGEPAGE);
  }
  ~AnonymousMemory() { ::munmap(data_, mapped_bytes_); }
  AnonymousMemory(const AnonymousMemory&) = delete;
  AnonymousMemory& operator=(const AnonymousMemory&) = delete;
  std::byte* data() { return data_; }
  size_t size_bytes() const { return size_bytes_; }

 private:
  size_t size_bytes_;
  size_t mapped_bytes_ = 0;
  std::byte* data_ = nullptr;
};

template <typename Interface>
class HostBuffer final : public Interface {
 public:
  explicit HostBuffer(size_t bytes) : memory_(bytes) {}
  std::byte* data() override { return memory_.data(); }
  size_t size_bytes() const override { return memory_.size_bytes(); }

 private:
  AnonymousMemory memory_;
};

class HostEvent final : public Event {
 public:
  bool done() override { return true; }
};

class HostStream final : public Stream {
 public:
  void copy_in(std::byte* device, const std::byte* host, size_t bytes) override { std::memcpy(device, host, bytes); }
  std::unique_ptr<Event> record() override { return std::make_unique<HostEvent>(); }
};

class HostDevice final : public Device {
 public:
  std::string name() const override { return "cpu"; }
  bool host_addressable() const override { return true; }
  std::unique_ptr<DeviceBuffer> allocate(size_t bytes) override {
    return std::make_unique<HostBuffer<DeviceBuffer>>(bytes);
  }
  std::unique_ptr<PinnedBuffer> allocate_pinned(size_t bytes) override {
    return std::make_unique<HostBuffer<PinnedBuffer>>(bytes);
  }
  std::unique_ptr<Stream> make_stream() override { return std::make_unique<HostStream>(); }
};

}  // namespace

std::shared_ptr<Device> host_device() { return std::make_shared<HostDevice>(); }

}  // namespace gdsdata
