// The copies from staging memory to the device, shared by all workers. Copies that come while the
// link is busy leave as one batch, because each one alone costs the link as much as 100 KiB
// (docs/design-decisions.md).
//
//   a worker's segment --> waiting --fewer than two batches in flight--> one batch, one event --> its group ends
//
// Nothing waits here for long. A thread that adds a copy, or waits for one, submits as much as the
// device has room for. A worker submits everything before it sleeps for another reason.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "device/device.h"
#include "engine/active_segment.h"
#include "engine/staging.h"

namespace gdsdata {

class Link {
 public:
  // The copies of one segment. It may not be submitted yet, so no stream can wait for it.
  class Ticket {
   public:
    explicit Ticket(Link& link) : link_(link) {}
    // True if the copies are done or could not be submitted. Throws Failure if the device is lost.
    bool done() { return is_submitted() && (event_ == nullptr || event_->done()); }
    void wait();  // sleeps until they are done

   private:
    friend class Link;
    bool is_submitted();
    void submitted(std::shared_ptr<Event> event);  // null: submitting failed

    Link& link_;
    std::shared_ptr<Event> event_;
    std::atomic<bool> submitted_{false};
  };

  explicit Link(Device& device) : device_(device) {}

  // Copies the runs, and reports the segment's end when its copies are submitted: now, or soon, on
  // any worker. Runs and memory must stay unchanged until the ticket is done. If this throws, it
  // has done nothing.
  std::shared_ptr<Ticket> carry(EndedSegment& segment, std::span<const Staging::Run> runs);
  void flush() { submit(std::numeric_limits<size_t>::max()); }

 private:
  struct Load {
    EndedSegment segment;
    std::span<const Staging::Run> runs;
    std::shared_ptr<Ticket> ticket;
  };

  void submit(size_t most_in_flight);
  // The caller holds the lock. Appends the loads that it takes, whether submitted or failed.
  // Returns false if there is no memory for that.
  bool submit_batch(std::vector<Load>& submitted);

  Device& device_;
  std::mutex mutex_;                // guards the members that follow
  std::unique_ptr<Stream> stream_;  // created for the first copy
  std::deque<Load> waiting_;
  std::deque<std::shared_ptr<Event>> in_flight_;  // batches, oldest first
  std::vector<CopyIn> batch_;                     // scratch
};

}  // namespace gdsdata
