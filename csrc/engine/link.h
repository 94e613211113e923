// The way from staging memory to the device, which all workers share. Copies that come while it is busy go together:
// each by itself costs the link as much as 100 KiB would (docs/design-decisions.md).
//
//   a worker's segment --> waiting --fewer than two batches under way--> one batch, one event --> its group is told
//
// Nothing waits here for long: whoever brings a copy, or waits for one, gives the device what it has room for, and a
// worker that is about to sleep for anything else gives it everything.
#pragma once

#include <cstddef>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "device/device.h"
#include "engine/group.h"
#include "engine/staging.h"

namespace gdsdata {

class Link {
 public:
  explicit Link(Device& device) : device_(device) {}

  // Copies the runs, and tells the group that a segment of it has ended when its bytes need only be waited for: now,
  // or soon, on any worker. The runs and their memory stay as they are until the event is done, which is not to be
  // given to a stream. If it throws, it has not taken them.
  std::shared_ptr<Event> carry(std::shared_ptr<Group> group, const RouteBytes& bytes,
                               std::span<const Staging::Run> runs);
  // The device gets all that waits.
  void flush() { give(std::numeric_limits<size_t>::max()); }

 private:
  class Ticket;
  struct Load {
    std::shared_ptr<Group> group;
    RouteBytes bytes;
    std::span<const Staging::Run> runs;
    std::shared_ptr<Ticket> ticket;
    std::optional<Error> error;
  };
  static constexpr size_t kMostUnderWay = 2;  // one that is copied, one that follows it at once
  static constexpr size_t kMostCopies = 64;   // of a batch; more where a segment has more

  void give(size_t most_under_way);
  void give_batch(std::vector<Load>& given);  // with the lock

  Device& device_;
  std::mutex mutex_;
  std::unique_ptr<Stream> stream_;  // made when the first copy comes
  std::deque<Load> waiting_;
  std::deque<std::shared_ptr<Event>> under_way_;  // batches, oldest first
  std::vector<CopyIn> batch_;                     // scratch
};

}  // namespace gdsdata
