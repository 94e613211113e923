#include "engine/worker.h"

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include "tuning.h"

namespace gdsdata {

namespace {

// The same exception may be thrown again at once, for as long as requests are in flight.
constexpr std::chrono::milliseconds kPauseAfterException{1};

}  // namespace

Worker::Worker(const EngineOptions& options, const Selection& selection, Device& device, SegmentQueue& queue)
    : options_(options),
      queue_(queue),
      reader_(options, device, log_.spans),
      requests_(options),
      lane_(selection.name, /*fallback=*/"posix", options.io, device, log_) {}

void Worker::run() noexcept {
  clock_.start();
  for (bool goes_on = true; goes_on;) {
    try {
      goes_on = turn();
    } catch (...) {
      fail_all(current_error());
      std::this_thread::sleep_for(kPauseAfterException);
    }
  }
  wait_for_copies();
}

// After an exception that belongs to no request (no memory, or a defect), each segment ends with
// it. Segments with requests in flight end after these, because they use the segment's memory.
void Worker::fail_all(const Error& error) noexcept {
  drop_waiting();
  segments_.drop_unfinished();
  segments_.visit([&](ActiveSegment& active) {
    if (!active.error) active.error = copy_of(error);
    if (active.open_requests == 0) end(active);
  });
}

ActiveSegment* Worker::take(bool wait) {
  segments_.reserve();
  Segment segment;
  if (!queue_.pop(segment, wait)) return nullptr;
  return &segments_.begin(std::move(segment));
}

ActiveSegment* Worker::gather() {
  if (lane_.waiting() == 0) return nullptr;  // else there is a backend
  const size_t at_once = std::min(tuning::kRequestsAtOnce, lane_.capabilities().queue_depth);
  size_t gathered = 0;
  Segment segment;
  while (!segments_.has_unfinished() && lane_.waiting() > gathered && lane_.waiting() < at_once) {
    gathered = lane_.waiting();
    segments_.reserve();
    if (!queue_.pop_spare(segment)) return nullptr;
    ActiveSegment& active = segments_.begin(std::move(segment));
    if (!start(active)) return &active;
  }
  return nullptr;
}

// Continues a read in rounds until one waits for storage or for descriptors. Each round has as many
// parts as there are descriptors for.
void Worker::read_on(ActiveSegment& active) {
  while (!active.stopped() && active.open_requests == 0) {
    const auto rest = active.parts().subspan(active.begun_parts);
    const size_t to_host = active.host_parts - std::min(active.host_parts, active.begun_parts);
    left_.clear();
    const size_t count =
        reader_.read(active, rest, to_host, holds_files() ? WhenTaken::kGiveUp : WhenTaken::kWait, left_);
    if (count == 0 || active.error) return;
    active.begun_parts += count;
    active.pieces.clear();
    active.device_pieces.clear();
    request_reads(active, rest.first(count).subspan(std::min(to_host, count)));
  }
}

void Worker::read_unfinished() {
  const auto unfinished = segments_.take_unfinished();
  for (auto active = unfinished.rbegin(); active != unfinished.rend(); ++active) {
    try {
      read_on(**active);
    } catch (...) {
      (*active)->error = current_error();
    }
    settle(**active);
  }
}

// Ends a segment that waits for nothing. A read with parts left continues later.
void Worker::settle(ActiveSegment& active) {
  if (active.open_requests > 0 || active.copied != nullptr) return;
  const bool reads_on = active.is_read() && active.begun_parts < active.parts().size();
  if (!reads_on || active.stopped()) return end(active);
  active.files.clear();
  segments_.add_unfinished(active);
}

bool Worker::make_backend(Lane& lane, ActiveSegment& active) {
  try {
    lane.make_backend_once();
    return true;
  } catch (const Failure& failure) {
    active.error = failure.error();
    return false;
  }
}

void Worker::drop_cancelled(Lane& lane) {
  lane.drop_cancelled([this](ActiveSegment& active) { settle(active); });
}

bool Worker::exchange(Lane& lane, std::chrono::milliseconds patience, bool has_room) {
  const Lane::Exchange exchange = lane.exchange(patience, has_room ? &queue_ : nullptr);
  for (Completion& completion : exchange.completions) completed(lane, completion);
  if (exchange.failure) std::rethrow_exception(exchange.failure);
  return exchange.moved;
}

void Worker::completed(Lane& lane, Completion& completion) {
  const Lane::Asked asked = lane.complete(completion);
  ActiveSegment& active = *asked.active;
  if (completion.error) {
    const bool retried = retries(lane, asked, *completion.error);
    if (!retried && !active.error) active.error = std::move(completion.error);
    completion.error.reset();
  }
  --active.open_requests;
  settle(active);
}

}  // namespace gdsdata
