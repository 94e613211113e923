// A worker for a device whose memory the processor cannot write.
//
//   read    page cache, then backend --> staging memory --copy--> device
//           backend --> device                      (a second lane, if a backend reaches the device)
//   write   the reverse
//
// Copies to the device use the link that all workers share. This worker's own stream makes copies
// from the device, and copies to it that must wait for the group's `before`.
#pragma once

#include <deque>

#include "engine/link.h"
#include "engine/staged_copies.h"
#include "engine/worker.h"

namespace gdsdata {

class StagedWorker final : public Worker {
 public:
  StagedWorker(const EngineOptions& options, const Selection& selection, Device& device, SegmentQueue& queue,
               Link& link);

 private:
  bool turn() override;
  bool start(ActiveSegment& active) override;
  void request_reads(ActiveSegment& active, std::span<Transfer> to_device) override;
  void end(ActiveSegment& active) override;
  void drop_waiting() noexcept override;
  void wait_for_copies() noexcept override { copies_.wait_for_all(); }
  bool holds_files() const override { return lane_.busy() || device_lane_.busy(); }
  bool retries(const Lane& lane, const Lane::Asked& asked, const Error& error) override;

  bool has_room() const {
    return parked_ == nullptr && !segments_.has_unfinished() && lane_.waiting() == 0 && device_lane_.waiting() == 0;
  }
  ActiveSegment* take_next(bool busy);
  void open_device(ActiveSegment& active);
  void start_parked();
  bool place(ActiveSegment& active);
  size_t count_host_parts(ActiveSegment& active, std::span<Transfer> parts);
  void start_write(ActiveSegment& active);
  void write_what_was_copied(bool wait);
  bool make_host_backend(ActiveSegment& active);
  void request_of_device(ActiveSegment& active, std::span<const Transfer> parts);
  void exchange_all(bool idle);
  bool exchange_lane(Lane& lane, std::chrono::milliseconds patience);
  bool goes_by_link(const ActiveSegment& active) const;
  void copy_by_own_stream(ActiveSegment& active) noexcept;

  const bool has_device_lane_;
  Device& device_;
  Link& link_;
  StagedCopies copies_;
  Lane device_lane_;  // for device memory; idle without such a backend
  std::deque<ActiveSegment*> leaving_;  // writes whose copies from the device are queued, oldest first
  ActiveSegment* parked_ = nullptr;  // waits for staging memory
};

}  // namespace gdsdata
