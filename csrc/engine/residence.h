// A data set's files, mapped and registered with the device, which then reads records out of the
// page cache by itself.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "base/file_table.h"
#include "device/device.h"
#include "tuning.h"

namespace gdsdata {

// Maps and registers on a thread of its own, which brings what is not in memory yet into it. Copies
// to the device wait while the driver registers, so the first batch goes first: it starts at
// begin(), or kPatience after it was made. Thread-safe.
class Residence {
 public:
  Residence(std::shared_ptr<Device> device, std::shared_ptr<FileTable> files);
  ~Residence();  // after the files that are being registered; nothing may be gathered any more
  Residence(const Residence&) = delete;
  Residence& operator=(const Residence&) = delete;

  void begin();
  bool ready() const { return ready_.load(std::memory_order_acquire); }
  uint64_t registered_bytes() const { return registered_bytes_.load(std::memory_order_relaxed); }
  std::optional<Error> error() const;  // why it will never be ready

  // Once ready: where the device finds an extent, or 0 where the file does not have it.
  uint64_t address(uint32_t file, uint64_t offset, uint64_t length) const {
    const Mapping* mapping = mappings_[file].get();  // null: an empty file
    if (mapping == nullptr || offset > mapping->size_bytes() || length > mapping->size_bytes() - offset) return 0;
    return reinterpret_cast<uint64_t>(mapping->data()) + offset;
  }
  const FileTable& files() const { return *files_; }
  Device& device() const { return *device_; }

 private:
  static constexpr std::chrono::milliseconds kPatience{100};
  void register_files();
  void register_file(uint32_t index);
  const std::shared_ptr<Device> device_;
  const std::shared_ptr<FileTable> files_;
  std::vector<std::unique_ptr<Mapping>> mappings_;
  std::vector<std::unique_ptr<Registration>> registrations_;  // go before the mappings
  std::atomic<bool> ready_{false};
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> registered_bytes_{0};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool begun_ = false;
  std::optional<Error> error_;
  std::thread thread_;
};

// Has the device gather batches out of a residence. Used by one thread at a time.
class Gatherer {
 public:
  Gatherer(std::shared_ptr<Residence> residence, size_t batch_samples);
  ~Gatherer();  // when all that it asked for has ended
  Gatherer(const Gatherer&) = delete;
  Gatherer& operator=(const Gatherer&) = delete;

  // Samples of `sample_bytes` each, one behind the other, to `target`, behind `before`. Returns at
  // once, with the event that they are there. Throws Failure, of a file that ends before a sample
  // too.
  std::shared_ptr<Event> gather(std::byte* target, std::span<const int32_t> files, std::span<const int64_t> offsets,
                                uint64_t sample_bytes, const Events& before);

 private:
  // Batches whose addresses the device may not have read yet; asking for one more waits for the
  // oldest.
  static constexpr size_t kInFlight = tuning::kMostGathersInFlight;
  const std::shared_ptr<Residence> residence_;
  const size_t batch_samples_;
  std::unique_ptr<PinnedBuffer> addresses_;  // kInFlight times batch_samples
  std::vector<std::shared_ptr<Event>> ended_;
  size_t next_ = 0;
  std::unique_ptr<Stream> stream_;
};

}  // namespace gdsdata
