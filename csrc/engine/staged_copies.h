// The staging memory of a worker or guest, its own stream, and the copies that use the memory.
//
// The host waits for a copy only if it needs that staging memory, or writes the bytes to storage.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "device/device.h"
#include "engine/active_segment.h"
#include "engine/link.h"
#include "engine/staging.h"
#include "engine/worker_log.h"

namespace gdsdata {

class StagedCopies {
 public:
  // kSoon: polls before it sleeps, because a caller waits.
  enum class Waits { kAsleep, kSoon };

  StagedCopies(Device& device, Link& link, uint64_t staging_bytes, Waits waits, WorkerLog& log)
      : device_(device), link_(link), staging_bytes_(staging_bytes), waits_(waits), log_(log) {}
  StagedCopies(const StagedCopies&) = delete;
  StagedCopies& operator=(const StagedCopies&) = delete;

  // Creates the stream, once. Throws Failure.
  void open_once();
  bool is_open() const { return staging_ != nullptr; }
  void allocate_all() { staging_->take_all(); }
  const std::vector<std::span<std::byte>>& memory() const { return staging_->memory(); }

  // See Staging::place.
  bool place(std::span<Transfer> parts, Staging::Place& place) { return staging_->place(parts, place); }
  void release(Staging::Place& place) { staging_->release(place); }

  // Queues the copies of a segment from the device, after work that still writes there. Sets
  // ActiveSegment::copied.
  void copy_out(ActiveSegment& active);
  // Queues the copies of a read to the device, on this stream. Sets ActiveSegment::copied, or its
  // error, or neither if there is nothing to copy.
  void copy_in(ActiveSegment& active);
  // Keeps a segment's place until the copies of copy_in are done, and adds them to its group's
  // result. Releases the place if there are none.
  void release_when_copied(ActiveSegment& active);
  // Makes the link copy from `place` and report the segment's end. If it cannot, sets the segment's
  // error and returns false.
  bool carry(EndedSegment& segment, Staging::Place&& place);

  // Releases the places whose copies are done.
  void reclaim();
  bool has_copies() const { return !in_flight_.empty(); }
  // Copies complete in the order in which they were queued.
  void wait_for_oldest();

  // Call it before destruction. Copies of a lost device count as done.
  void wait_for_all() noexcept;
  // Waits for `uses`: other work that conflicts with the next access to the memory.
  void wait_for_device(const Events& uses);
  // Waits for a segment's own copies, which were queued after its group's `before`.
  void wait_for_copied(ActiveSegment& active);
  // Polls for them a moment. Returns whether they are done.
  static bool copied_soon(ActiveSegment& active);
  // After an error, waits until all queued work is done.
  void finish_stream() noexcept {
    if (stream_ != nullptr) finish(*stream_);
  }

 private:
  struct Copy {
    Events before;  // events that the copy waits for
    std::variant<std::shared_ptr<Event>, std::shared_ptr<Link::Ticket>> end;
    Staging::Place place;

    bool done() const {
      return std::visit([](const auto& end) { return end->done(); }, end);
    }
  };
  template <typename Wait>
  void count_wait(Work work, Counter& counter, Wait wait);
  void wait_for(Event& event) { waits_ == Waits::kSoon ? wait_soon(event) : event.wait(); }

  Device& device_;
  Link& link_;
  const uint64_t staging_bytes_;
  const Waits waits_;
  WorkerLog& log_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Staging> staging_;
  std::deque<Copy> in_flight_;  // to the device, oldest first
};

}  // namespace gdsdata
