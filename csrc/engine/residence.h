// Maps a data set's files and registers them with the device, which then reads the page cache.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "base/condition.h"
#include "base/file_table.h"
#include "device/device.h"
#include "tuning.h"

namespace gdsdata {

class Residence;

// Makes the device gather batches from a residence. One thread at a time may use it.
class Gatherer {
 public:
  Gatherer(const Residence& residence, size_t most_samples);
  ~Gatherer();  // waits for all its gathers
  Gatherer(const Gatherer&) = delete;
  Gatherer& operator=(const Gatherer&) = delete;

  // Gathers samples of `sample_bytes` each, one after the other, into `target`, after `before`.
  // Returns the event of the end at once. Throws Failure, also if a file ends before a sample.
  std::shared_ptr<Event> gather(std::byte* target, std::span<const int32_t> files, std::span<const int64_t> offsets,
                                uint64_t sample_bytes, const Events& before);

 private:
  const Residence& residence_;
  const size_t most_samples_;
  // The ends of gathers whose addresses the device may not have read yet. If there are so many, the
  // next gather waits for the oldest.
  std::vector<std::shared_ptr<Event>> ended_;
  std::unique_ptr<PinnedBuffer> addresses_;  // most_samples_ for each of these gathers
  size_t next_ = 0;
  // Consecutive gathers use different ones: one's first reads overlap the last ones of the one
  // before.
  std::array<std::unique_ptr<Stream>, tuning::kGatherStreams> streams_;
};

// Maps and registers on a thread of its own, which also reads missing pages into the page cache.
// Copies to the device wait while the driver registers. So the first batch comes first:
// registration starts at begin(), or kPatience after construction. It pauses between windows, so
// that batches come about as fast as without it. Thread-safe.
class Residence {
 public:
  // Gathers have at most `most_samples` each.
  Residence(std::shared_ptr<Device> device, std::shared_ptr<FileTable> files, size_t most_samples);
  ~Residence();  // waits for the registration in progress, and for all gathers
  Residence(const Residence&) = delete;
  Residence& operator=(const Residence&) = delete;

  void begin();
  // Becomes false if a file was changed. Readers of the file table then report that.
  bool ready() const { return ready_.load(std::memory_order_acquire) && !files_->had_changed_files(); }
  uint64_t registered_bytes() const { return registered_bytes_.load(std::memory_order_relaxed); }
  std::optional<Error> error() const;  // why it will never be ready

  // If ready: as Gatherer::gather.
  std::shared_ptr<Event> gather(std::byte* target, std::span<const int32_t> files, std::span<const int64_t> offsets,
                                uint64_t sample_bytes, const Events& before);

  // If ready: the address of an extent on the device, or 0 if the file ends before it.
  uint64_t address(uint32_t file, uint64_t offset, uint64_t length) const {
    const Mapping* mapping = mappings_[file].get();  // null: an empty file
    if (mapping == nullptr || offset > mapping->size_bytes() || length > mapping->size_bytes() - offset) return 0;
    return reinterpret_cast<uint64_t>(mapping->data()) + offset;
  }
  const FileTable& files() const { return *files_; }
  Device& device() const { return *device_; }
  size_t most_samples() const { return most_samples_; }

 private:
  static constexpr std::chrono::milliseconds kPatience{100};
  void register_files();
  void register_file(uint32_t index);
  void pause(std::chrono::nanoseconds time);
  const std::shared_ptr<Device> device_;
  const std::shared_ptr<FileTable> files_;
  const size_t most_samples_;
  std::vector<std::unique_ptr<Mapping>> mappings_;
  std::vector<std::unique_ptr<Registration>> registrations_;  // destroyed before the mappings
  std::mutex gathering_;  // guards the gatherer
  // Set when ready, and kept from epoch to epoch, so that an epoch's end does not wait for its
  // gathers. Destroyed before the registrations.
  std::unique_ptr<Gatherer> gatherer_;
  std::atomic<bool> ready_{false};
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> registered_bytes_{0};
  mutable std::mutex mutex_;
  Condition changed_;
  bool begun_ = false;
  std::optional<Error> error_;
  std::thread thread_;
};

}  // namespace gdsdata
