// Segments that wait for a worker. Decides which idle worker is woken for them.
#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <mutex>
#include <vector>

#include "backend/backend.h"
#include "base/condition.h"
#include "engine/group.h"

namespace gdsdata {

// First in, first out. Segments that only storage can serve come before fresh ones, because they
// have waited longer. Training comes before background work. That gets at least every ninth turn,
// so that it ends too.
class SegmentQueue {
 public:
  // Takes all segments, which are at least one and of one group; none if it throws. `helped`: the
  // caller pops one of them at once.
  void push_fresh(std::vector<Segment>& segments, bool helped = false);
  void push_for_storage(Segment&& segment);  // does not change it if it throws
  void hurry();  // wakes workers for queued segments
  // Returns false if there is none. If `wait`, waits until there is one or the queue is closed.
  bool pop(Segment& segment, bool wait);
  bool pop_spare(Segment& segment);  // a segment that no worker waits for
  bool pop_fresh(Segment& segment, Priority lowest);
  bool pop_fresh_of(const Group& group, Segment& segment);
  // Call it before a worker that could take a segment waits for its backend. Returns false if a
  // segment is queued. Until `wakes`, a new segment without another worker interrupts the backend.
  bool sleeps(Backend& backend);
  void wakes(Backend& backend);
  void close();

 private:
  // The caller holds the lock. Returns how many idle workers to wake for so many segments, and
  // interrupts sleeping backends for the others.
  size_t claim_workers(size_t segments);
  void wake(size_t workers);
  struct Waiting {
    std::deque<Segment> for_storage;  // taken first: their groups are the oldest
    std::deque<Segment> fresh;
    size_t size() const { return for_storage.size() + fresh.size(); }
    bool empty() const { return size() == 0; }
  };
  Waiting& of(Priority priority) { return waiting_segments_[static_cast<size_t>(priority)]; }
  bool take_next(Segment& segment);
  size_t waiting_segments() const;
  static Segment take_from(std::deque<Segment>& segments);
  std::mutex mutex_;
  Condition filled_;
  std::array<Waiting, 2> waiting_segments_;  // by priority
  size_t passed_over_ = 0;                    // turns that background work has waited
  size_t waiting_workers_ = 0;
  std::vector<Backend*> sleeping_;  // backends in which workers wait
  bool closed_ = false;
};

}  // namespace gdsdata
