#include "engine/plain_worker.h"

namespace gdsdata {

bool PlainWorker::turn() {
  clock_.count_active();
  const bool busy = segments_.has_unfinished() || lane_.busy();
  const bool has_room = !segments_.has_unfinished() && lane_.waiting() == 0;
  ActiveSegment* taken = has_room ? take(/*wait=*/!busy) : nullptr;
  if (!busy) clock_.count_idle();
  if (taken == nullptr && !busy) return false;
  if (taken != nullptr && taken->prepares()) make_backend(lane_, *taken);
  read_unfinished();
  if (taken != nullptr) {
    start(*taken);
    gather();
  }
  drop_cancelled(lane_);
  if (!lane_.busy()) return true;
  const bool waits = taken == nullptr || lane_.waiting() > 0;
  exchange(lane_, waits ? kReapTimeout : std::chrono::milliseconds(0), !segments_.has_unfinished());
  return true;
}

bool PlainWorker::start(ActiveSegment& active) {
  if (active.stopped()) {
    end(active);
    return true;
  }
  try {
    active.group().place();
    if (active.is_read()) {
      active.host_parts = active.parts().size();
      read_on(active);
    } else if (!active.parts().empty() && make_backend(lane_, active)) {
      requests_.add_writes(lane_, active, active.parts());
    }
  } catch (...) {
    active.error = current_error();
  }
  settle(active);
  return true;
}

void PlainWorker::request_reads(ActiveSegment& active, std::span<Transfer>) {
  if (!left_.empty() && make_backend(lane_, active)) requests_.add_reads(lane_, active, left_);
}

void PlainWorker::end(ActiveSegment& active) {
  take_checksums(active);
  segments_.finish(active, log_.counters).report();
}

}  // namespace gdsdata
