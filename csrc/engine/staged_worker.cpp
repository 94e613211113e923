#include "engine/staged_worker.h"

#include <algorithm>
#include <utility>

#include "base/fallbacks.h"

namespace gdsdata {

namespace {

// A worker that waits for two backends polls each of them this often.
constexpr std::chrono::milliseconds kShortReapTimeout{1};
constexpr std::chrono::milliseconds kNoWait{0};

}  // namespace

StagedWorker::StagedWorker(const EngineOptions& options, const Selection& selection, Device& device,
                           SegmentQueue& queue, Link& link)
    : Worker(options, selection, device, queue),
      has_device_lane_(!selection.device_backend.empty()),
      device_(device),
      link_(link),
      copies_(device, link, options.staging_bytes, StagedCopies::Waits::kAsleep, log_),
      device_lane_(selection.device_backend, /*fallback=*/"", options.io, device, log_) {}

bool StagedWorker::turn() {
  clock_.count_active();
  const bool busy =
      parked_ != nullptr || segments_.has_unfinished() || lane_.busy() || device_lane_.busy() || !leaving_.empty();
  ActiveSegment* taken = has_room() ? take_next(busy) : nullptr;
  if (!busy) clock_.count_idle();
  if (taken == nullptr && !busy) return false;
  if (taken != nullptr) {
    parked_ = taken;
    open_device(*taken);
  }
  read_unfinished();
  start_parked();
  if (taken != nullptr && parked_ == nullptr) parked_ = gather();
  const bool idle = taken == nullptr && parked_ == nullptr;
  write_what_was_copied(/*wait=*/idle);
  exchange_all(idle);
  return true;
}

ActiveSegment* StagedWorker::take_next(bool busy) {
  if (ActiveSegment* taken = take(/*wait=*/false)) return taken;
  link_.flush();
  return busy ? nullptr : take(/*wait=*/true);
}

void StagedWorker::open_device(ActiveSegment& active) {
  try {
    if (!copies_.is_open()) {
      device_.bind_thread();
      copies_.open_once();
    }
    if (active.prepares()) copies_.allocate_all();
  } catch (const Failure& failure) {
    active.error = failure.error();  // the next segment tries again
  }
}

void StagedWorker::start_parked() {
  if (parked_ == nullptr) return;
  if (start(*parked_)) {
    parked_ = nullptr;
  } else if (copies_.has_copies()) {
    copies_.wait_for_oldest();
  } else {  // requests and writes use all staging memory
    write_what_was_copied(/*wait=*/true);
    exchange_all(/*idle=*/true);
  }
}

bool StagedWorker::start(ActiveSegment& active) {
  if (active.stopped()) {
    end(active);
    return true;
  }
  try {
    if (!place(active)) return false;
    active.is_read() ? read_on(active) : start_write(active);
  } catch (...) {
    active.error = current_error();
    copies_.finish_stream();  // queued copies write staging memory
    active.copied.reset();
  }
  settle(active);
  return true;
}

bool StagedWorker::place(ActiveSegment& active) {
  const auto parts = active.parts();
  active.host_parts = count_host_parts(active, parts);
  copies_.reclaim();
  return copies_.place(parts.first(active.host_parts), active.place);
}

// Moves parts that a backend transfers to or from the device to the end. Returns where they begin.
size_t StagedWorker::count_host_parts(ActiveSegment& active, std::span<Transfer> parts) {
  const GroupRequest& asked = active.group().request();
  if (!has_device_lane_ || active.segment.retried || asked.checksum != Checksum::kNone) return parts.size();
  const bool asks_memory = active.is_read() && options_.io.direct != DirectMode::kAlways;
  const WhenTaken when_taken = holds_files() ? WhenTaken::kGiveUp : WhenTaken::kWait;
  std::shared_ptr<File> file;  // one at a time, because there may be more files than descriptors
  uint32_t file_index = 0;
  const auto for_host = [&](const Transfer& part) {
    if (!asks_memory && !asked.files->has_remote()) return false;
    if (file == nullptr || file_index != part.file) {
      file.reset();
      file = asked.files->get(part.file, when_taken);
      file_index = part.file;
    }
    if (file == nullptr) return false;
    if (!file->holds(part.offset, part.length)) return true;
    return asks_memory && file->residency(part.offset, part.length) == File::Residency::kAll;
  };
  const auto others = std::stable_partition(parts.begin(), parts.end(), for_host);
  return static_cast<size_t>(others - parts.begin());
}

void StagedWorker::request_reads(ActiveSegment& active, std::span<Transfer> to_device) {
  if (!left_.empty() && make_host_backend(active)) requests_.add_reads(lane_, active, left_);
  if (!to_device.empty() && !active.error) request_of_device(active, to_device);
}

void StagedWorker::start_write(ActiveSegment& active) {
  const auto parts = active.parts();
  const auto to_device = parts.subspan(active.host_parts);
  if (!to_device.empty()) request_of_device(active, to_device);
  if (active.host_parts == 0) return;
  copies_.copy_out(active);
  leaving_.push_back(&active);
}

void StagedWorker::write_what_was_copied(bool wait) {
  for (; !leaving_.empty(); wait = false) {
    ActiveSegment& active = *leaving_.front();
    try {
      if (!active.copied->done()) {
        if (!wait) return;
        copies_.wait_for_copied(active);
      }
      left_.clear();
      for (const Transfer& part : active.parts()) {
        if (active.place.holds(part.memory)) left_.push_back(part);
      }
      if (!active.group().cancelled() && make_host_backend(active)) requests_.add_writes(lane_, active, left_);
    } catch (...) {
      active.error = current_error();
    }
    leaving_.pop_front();
    active.copied.reset();
    settle(active);
  }
}

bool StagedWorker::make_host_backend(ActiveSegment& active) {
  if (!make_backend(lane_, active)) return false;
  lane_.expect_memory(copies_.memory());
  return true;
}

void StagedWorker::request_of_device(ActiveSegment& active, std::span<const Transfer> parts) {
  if (!make_backend(device_lane_, active)) return;
  copies_.wait_for_device(active.group().request().before);
  requests_.add_of_device(device_lane_, active, parts);
}

// Waits for a completion if there is no segment to start, or no room for the last one's requests.
void StagedWorker::exchange_all(bool idle) {
  const auto patience_of = [&](const Lane& lane) { return idle || lane.waiting() > 0 ? kReapTimeout : kNoWait; };
  if (!device_lane_.busy()) {
    exchange_lane(lane_, patience_of(lane_));
  } else if (!lane_.busy()) {
    exchange_lane(device_lane_, patience_of(device_lane_));
  } else {
    const bool moved = exchange_lane(lane_, kNoWait);
    exchange_lane(device_lane_, moved || !idle ? kNoWait : kShortReapTimeout);
  }
}

bool StagedWorker::exchange_lane(Lane& lane, std::chrono::milliseconds patience) {
  drop_cancelled(lane);
  if (!lane.busy()) return false;
  link_.flush();  // the exchange may take long
  const Lane& other = &lane == &lane_ ? device_lane_ : lane_;
  const bool has_room = parked_ == nullptr && !segments_.has_unfinished() && other.waiting() == 0;
  return exchange(lane, patience, has_room);
}

// If storage cannot deliver to the device, a new segment of the group goes through the host, once.
bool StagedWorker::retries(const Lane& lane, const Lane::Asked& asked, const Error& error) {
  if (&lane != &device_lane_ || options_.io.strict || error.code == ErrorCode::kCorrupt) return false;
  const Piece& piece = asked.request.pieces.front();
  const std::shared_ptr<Group>& group = asked.active->segment.group;
  group->add_segment();
  try {
    note_fallback("a transfer between storage and " + device_.name() + " went by way of the host: " + error.message);
    queue_.push_for_storage({group, {}, {{asked.file, piece.offset, piece.length, piece.memory}}, {}, true});
  } catch (...) {
    group->remove_segment();
    return false;
  }
  log_.counters.retries.add(1);
  return true;
}

void StagedWorker::end(ActiveSegment& active) {
  take_checksums(active);
  Staging::Place carried;
  const bool by_link = goes_by_link(active);
  if (by_link) {
    carried = std::exchange(active.place, {});
  } else if (active.place.memory != nullptr) {
    copy_by_own_stream(active);
  }
  EndedSegment ended = segments_.finish(active, log_.counters);
  if (by_link && copies_.carry(ended, std::move(carried))) return;
  ended.report();
}

// Returns false if the copies must wait in a stream: on the link, all later copies would wait too.
bool StagedWorker::goes_by_link(const ActiveSegment& active) const {
  return !active.place.runs.empty() && active.is_read() && !active.stopped() &&
         all_done(active.group().request().before);
}

// The place is released when its copies are done, or at once if there are none.
void StagedWorker::copy_by_own_stream(ActiveSegment& active) noexcept {
  try {
    copies_.copy_in(active);
    copies_.release_when_copied(active);
  } catch (...) {
    active.error = current_error();
    copies_.finish_stream();
    active.copied.reset();
    if (active.place.memory != nullptr) copies_.release(active.place);
  }
}

void StagedWorker::drop_waiting() noexcept {
  parked_ = nullptr;
  if (!leaving_.empty()) copies_.finish_stream();
  for (ActiveSegment* active : leaving_) active->copied.reset();
  leaving_.clear();
  lane_.drop_waiting();
  device_lane_.drop_waiting();
}

}  // namespace gdsdata
