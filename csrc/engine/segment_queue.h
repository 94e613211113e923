// Segments that wait for a worker, and which idle worker is woken for them.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <vector>

#include "backend/backend.h"
#include "engine/group.h"

namespace gdsdata {

// First in, first out. Segments that only storage can serve come before fresh ones, because they
// have waited. Training comes before the background, which gets at least every ninth turn, so that
// it ends too.
class SegmentQueue {
 public:
  // Takes them all, at least one, of one group; none if it throws. `helped`: somebody pops one of
  // them at once.
  void push_fresh(std::vector<Segment>& segments, bool helped = false);
  void push_for_storage(Segment&& segment);  // leaves it alone if it throws
  void hurry();  // segments that a push has left without a worker get one
  // Waits when asked to; false when there is none (or, waiting, when the queue was closed).
  bool pop(Segment& segment, bool wait);
  bool pop_spare(Segment& segment);  // one that no worker waits for
  bool pop_fresh(Segment& segment, Priority lowest);
  bool pop_fresh_of(const Group& group, Segment& segment);
  // A worker that could take a segment is about to wait for its backend. Returns false if one is
  // queued. Until `wakes`, a segment that no other worker waits for interrupts the backend.
  bool sleeps(Backend& backend);
  void wakes(Backend& backend);
  void close();

 private:
  // With the lock: how many idle workers are to be woken for so many segments; backends are
  // interrupted for the others.
  size_t claim_workers(size_t segments);
  void wake(size_t workers);
  struct Waiting {
    std::deque<Segment> for_storage;  // go first: their groups are the oldest
    std::deque<Segment> fresh;
    size_t size() const { return for_storage.size() + fresh.size(); }
    bool empty() const { return size() == 0; }
  };
  Waiting& of(Priority priority) { return waiting_segments_[static_cast<size_t>(priority)]; }
  bool take_next(Segment& segment);
  size_t waiting_segments() const;
  static Segment take_from(std::deque<Segment>& segments);
  std::mutex mutex_;
  std::condition_variable filled_;
  std::array<Waiting, 2> waiting_segments_;  // by priority
  size_t passed_over_ = 0;                    // turns that the background has waited
  size_t waiting_workers_ = 0;
  std::vector<Backend*> sleeping_;  // backends that are waited for
  bool closed_ = false;
};

}  // namespace gdsdata
