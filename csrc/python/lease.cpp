#include "python/lease.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/without_memory.h"

namespace gdsdata {

namespace {

// The leases of device memory, by the address of its end. Never destroyed, because tensors may
// outlive static destructors.
struct Leases {
  std::mutex mutex;
  std::map<const std::byte*, Lease*> by_end;
};

Leases& leases() {
  static auto* instance = new Leases;
  return *instance;
}

}  // namespace

Lease::Lease(std::shared_ptr<Device> device, std::shared_ptr<DeviceBuffer> buffer, std::vector<uintptr_t> streams,
             std::shared_ptr<std::atomic<size_t>> count)
    : device_(std::move(device)), buffer_(std::move(buffer)), streams_(std::move(streams)), count_(std::move(count)) {
  ++*count_;
  if (device_->host_addressable()) return;
  std::lock_guard lock(leases().mutex);
  leases().by_end[data() + buffer_->size_bytes()] = this;
}

Lease::~Lease() {
  if (!device_->host_addressable()) {
    {
      std::lock_guard lock(leases().mutex);
      leases().by_end.erase(data() + buffer_->size_bytes());
    }
    for (const uintptr_t stream : streams_) {
      // Other errors: the driver has shut down, or the device is lost.
      retry_without_memory([&] { buffer_->uses.push_back(device_->foreign_stream(stream)->record()); });
    }
  }
  buffer_.reset();
  --*count_;
}

void Lease::used_on(uintptr_t stream) {
  std::lock_guard lock(mutex_);
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
}

bool Lease::record_stream(const std::byte* address, uintptr_t stream) {
  std::lock_guard lock(leases().mutex);
  const auto found = leases().by_end.upper_bound(address);
  if (found == leases().by_end.end() || address < found->second->data()) return false;
  found->second->used_on(stream);
  return true;
}

}  // namespace gdsdata
