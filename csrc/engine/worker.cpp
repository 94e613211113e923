#include "engine/worker.h"

#include <algorithm>
#include <exception>
#include <new>
#include <utility>

#include "base/crc32.h"
#include "base/fallbacks.h"

namespace gdsdata {

namespace {
// A worker that waits for its disk looks up this often; nothing depends on it.
constexpr std::chrono::milliseconds kReapTimeout{100};
// One that waits for two backends at once looks at each of them this often.
constexpr std::chrono::milliseconds kShortReapTimeout{1};
// One that has many requests in flight sleeps until a few have ended, or for so long: waking costs tens of
// microseconds (docs/design-decisions.md).
constexpr size_t kMostAtOnce = 8;
constexpr std::chrono::milliseconds kFewReapTimeout{1};
// The kernel joins requests for neighbouring bytes that it is given in one go: as many are gathered, where there are
// (docs/design-decisions.md).
constexpr size_t kGivenAtOnce = 8;

using Time = std::chrono::steady_clock::time_point;

uint64_t ns_between(Time begin, Time end) { return static_cast<uint64_t>((end - begin).count()); }

// Throws Failure, of a device that is lost.
bool all_done(const Events& events) {
  return std::all_of(events.begin(), events.end(), [](const auto& event) { return event->done(); });
}
}  // namespace

Worker::Worker(const EngineOptions& options, const Selection& selection, Device& device, SegmentQueue& queue,
               Link& link, bool is_guest)
    : options_(options),
      selection_(selection),
      device_(device),
      queue_(queue),
      link_(link),
      staged_(!device.host_addressable()),
      is_guest_(is_guest),
      most_files_in_round_(std::max<size_t>(1, most_cached_files() / (options.workers + 1))) {}

void Worker::run() {
  counted_at_ = Clock::now();
  for (bool goes_on = true; goes_on;) {
    try {
      goes_on = work();
    } catch (...) {
      fail_all(current_error());
    }
  }
  for (Copy& copy : copying_) {  // its memory goes with this
    try {
      copy.event->wait();
    } catch (const Failure&) {  // the device is lost, and its copies with it
    }
  }
}

// One turn of the loop; false if the queue is closed and nothing is left to do.
bool Worker::work() {
  const auto now = Clock::now();
  counters_.active_ns.add(ns_between(counted_at_, now));
  counted_at_ = now;
  const bool busy =
      parked_ != nullptr || !unfinished_.empty() || host_.busy() || device_lane_.busy() || !leaving_.empty();
  Segment segment;
  bool taken = false;
  if (has_room()) {  // else no more work
    reserve_active();
    taken = queue_.pop(segment, /*wait=*/false);
    if (!taken) link_.flush();
    if (!taken && !busy) taken = queue_.pop(segment, /*wait=*/true);
    if (!busy) {
      counted_at_ = Clock::now();
      counters_.idle_ns.add(ns_between(now, counted_at_));
    }
  }
  if (!taken && !busy) return false;
  if (taken) {
    parked_ = &begin(std::move(segment));
    const bool prepares = parked_->segment.range.count == 0;
    if (staged_) parked_->error = open_device(/*wholly=*/prepares);
    if (!staged_ && prepares) make_backend_once(host_, selection_.name, *parked_);
  }
  read_unfinished();
  if (parked_ != nullptr) {
    if (start(*parked_)) {
      parked_ = nullptr;
    } else {
      wait_for_staging();
    }
  }
  if (taken) gather();
  const bool idle = !taken && parked_ == nullptr;
  write_what_was_copied(/*wait=*/idle);
  exchange_all(idle);
  return true;
}

// After an exception that is no answer to any request: no memory, or a defect. Each segment ends with it, but what is
// in flight first ends by itself, because it uses the segment's memory.
void Worker::fail_all(const Error& error) {
  parked_ = nullptr;
  unfinished_.clear();
  if (!leaving_.empty()) finish(*stream_);
  for (Active* active : leaving_) active->copied.reset();
  leaving_.clear();
  for (Lane* lane : {&host_, &device_lane_}) {
    for (const Request& request : lane->waiting) {
      --by_tag_[request.tag].active->open_requests;
      free_tags_.push_back(request.tag);
    }
    lane->waiting.clear();
  }
  for (const auto& active : actives_) {
    if (active->segment.group == nullptr) continue;  // idle
    if (!active->error) active->error = error;
    if (active->open_requests == 0) end(*active);
  }
}

// When its first segment comes. One of nothing wants all to be ready for what follows (Engine::prepare).
std::optional<Error> Worker::open_device(bool wholly) {
  try {
    if (staging_ == nullptr) {
      device_.bind_thread();
      make_staging();
    }
    if (wholly) staging_->take_all();
  } catch (const Failure& failure) {
    return failure.error();  // the next segment asks again
  }
  return std::nullopt;
}

void Worker::make_staging() {
  stream_ = device_.make_stream();
  staging_ = std::make_unique<Staging>(device_, is_guest_ ? kGuestStagingBytes : options_.staging_bytes);
}

void Worker::gather() {
  if (host_.waiting.empty()) return;  // else there is a backend
  const size_t at_once = std::min(kGivenAtOnce, host_.backend->capabilities().queue_depth);
  size_t gathered = 0;
  Segment segment;
  while (parked_ == nullptr && unfinished_.empty() && host_.waiting.size() > gathered &&
         host_.waiting.size() < at_once) {
    gathered = host_.waiting.size();
    reserve_active();
    if (!queue_.pop_spare(segment)) return;
    Active& active = begin(std::move(segment));
    if (!start(active)) parked_ = &active;
  }
}

bool Worker::help(Priority lowest) {
  if (!has_active()) return false;
  Segment segment;
  if (!queue_.pop_fresh(segment, lowest)) return false;
  Active& active = begin(std::move(segment));
  try {
    left_.clear();
    if (!active.segment.group->abandoned_.load(std::memory_order_relaxed)) {
      serve_all_from_memory(active, parts_of(active));
    }
    if (!left_.empty()) {
      active.segment.rest = left_;
      active.segment.bytes = active.bytes;
      queue_.push_for_storage(std::move(active.segment));
      retire(active);
      return true;
    }
  } catch (...) {
    active.error = current_error();
  }
  end(active);
  return true;
}

bool Worker::help_with(const Group& group) {
  if (!has_active()) return false;
  Segment segment;
  if (!queue_.pop_fresh_of(group, segment)) return false;
  Active& active = begin(std::move(segment));
  try {
    if (!group.abandoned_.load(std::memory_order_relaxed) && !served_by_staging(active)) {
      queue_.push_for_storage(std::move(active.segment));
      retire(active);
      return true;
    }
  } catch (...) {
    active.error = current_error();
  }
  end(active);
  return true;
}

// False, and nothing was changed, where the page cache does not have all of it, or there is no memory to stage it.
bool Worker::served_by_staging(Active& active) {
  const auto parts = parts_of(active);
  parts_.assign(parts.begin(), parts.end());
  left_.clear();
  try {
    if (staging_ == nullptr) make_staging();
    if (!staging_->place(parts, active.place)) return false;
  } catch (const Failure&) {
    return false;
  }
  serve_all_from_memory(active, parts);
  if (left_.empty()) return true;
  std::copy(parts_.begin(), parts_.end(), parts.begin());
  staging_->give_back(active.place);
  return false;
}

// So that nothing can fail between the queue, which gives a segment once, and an Active.
void Worker::reserve_active() {
  if (!idle_actives_.empty()) return;
  for (auto* actives : {&idle_actives_, &unfinished_, &continued_}) actives->reserve(actives_.size() + 1);
  actives_.push_back(std::make_unique<Active>());
  idle_actives_.push_back(actives_.back().get());
}

// The same for a guest, who need not help: false without memory.
bool Worker::has_active() {
  try {
    reserve_active();
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

Worker::Active& Worker::begin(Segment segment) {
  Active& active = *idle_actives_.back();
  idle_actives_.pop_back();
  active.segment = std::move(segment);
  active.bytes = active.segment.bytes;
  active.started = Clock::now();
  return active;
}

void Worker::retire(Active& active) {
  active.files.clear();
  active.segment = {};
  active.bytes = {};
  active.error.reset();
  active.copied.reset();
  active.begun_parts = 0;
  active.pieces.clear();
  active.device_pieces.clear();
  idle_actives_.push_back(&active);
}

std::span<Transfer> Worker::parts_of(Active& active) {
  Segment& segment = active.segment;
  if (!segment.rest.empty()) return segment.rest;
  return std::span(segment.group->segmentation_.parts).subspan(segment.range.first, segment.range.count);
}

bool Worker::start(Active& active) {
  const Group& group = *active.segment.group;
  if (active.error || group.abandoned_.load(std::memory_order_relaxed)) {
    end(active);
    return true;
  }
  try {
    active.host_parts = parts_of(active).size();
    if (staged_ && !place(active)) return false;
    group.direction == Direction::kRead ? read_on(active) : start_write(active);
  } catch (...) {
    active.error = current_error();
    if (staged_) finish(*stream_);  // copies that were asked for write staging memory
    active.copied.reset();
  }
  settle(active);
  return true;
}

bool Worker::place(Active& active) {
  const auto parts = parts_of(active);
  active.host_parts = count_host_parts(active, parts);
  reclaim_staging();
  return staging_->place(parts.first(active.host_parts), active.place);
}

// Moves what a backend is to bring to the device by itself to the end of the parts; returns how many stay before it.
size_t Worker::count_host_parts(Active& active, std::span<Transfer> parts) {
  const Segment& segment = active.segment;
  const Group& group = *segment.group;
  if (selection_.device_backend.empty() || segment.retried || group.checksum != Checksum::kNone) return parts.size();
  const bool ask_memory = group.direction == Direction::kRead && options_.io.direct != DirectMode::kAlways;
  const WhenTaken when_taken = holds_files() ? WhenTaken::kGiveUp : WhenTaken::kWait;
  std::shared_ptr<File> file;  // one at a time: all of them may be more than there are descriptors
  uint32_t file_index = 0;
  const auto for_host = [&](const Transfer& part) {
    if (!ask_memory) return false;
    if (file == nullptr || file_index != part.file) {
      file.reset();
      file = group.files->get(part.file, when_taken);
      file_index = part.file;
    }
    return file != nullptr && file->residency(part.offset, part.length) == File::Residency::kAll;
  };
  const auto others = std::stable_partition(parts.begin(), parts.end(), for_host);
  return static_cast<size_t>(others - parts.begin());
}

// Goes on with a read in rounds, each of as many parts as there are descriptors for, until one waits for storage or
// for descriptors.
void Worker::read_on(Active& active) {
  const Group& group = *active.segment.group;
  while (!active.error && active.open_requests == 0 && !group.abandoned_.load(std::memory_order_relaxed)) {
    const auto rest = parts_of(active).subspan(active.begun_parts);
    active.files.clear();
    const size_t count = open_files(active, rest, holds_files() ? WhenTaken::kGiveUp : WhenTaken::kWait);
    if (count == 0 || active.error) return;
    read_round(active, rest.first(count));
  }
}

void Worker::read_round(Active& active, std::span<Transfer> parts) {
  const size_t to_host = std::min(parts.size(), active.host_parts - std::min(active.host_parts, active.begun_parts));
  active.begun_parts += parts.size();
  active.pieces.clear();
  active.device_pieces.clear();
  left_.clear();
  serve_from_memory(active, parts.first(to_host));
  if (!left_.empty() && !active.error) request(active, left_);
  if (to_host < parts.size() && !active.error) request_of_device(active, parts.subspan(to_host));
}

void Worker::read_unfinished() {
  continued_.swap(unfinished_);
  while (!continued_.empty()) {
    Active& active = *continued_.back();
    continued_.pop_back();
    try {
      read_on(active);
    } catch (...) {
      active.error = current_error();
    }
    settle(active);
  }
}

// Ends a segment that waits for nothing; a read that has parts left goes on later.
void Worker::settle(Active& active) {
  if (active.open_requests > 0 || active.copied != nullptr) return;
  const Group& group = *active.segment.group;
  const bool reads_on = group.direction == Direction::kRead && active.begun_parts < parts_of(active).size();
  if (active.error || !reads_on || group.abandoned_.load(std::memory_order_relaxed)) return end(active);
  active.files.clear();
  unfinished_.push_back(&active);
}

void Worker::start_write(Active& active) {
  const auto parts = parts_of(active);
  const auto to_host = parts.first(active.host_parts), to_device = parts.subspan(active.host_parts);
  if (!staged_) {
    left_.assign(parts.begin(), parts.end());
    if (!left_.empty()) request(active, left_);
    return;
  }
  if (!to_device.empty()) request_of_device(active, to_device);
  if (to_host.empty()) return;
  for (const auto& event : active.segment.group->before) stream_->wait(*event);
  for (const Staging::Run& run : active.place.runs) stream_->copy_out(run.host, run.device, run.bytes);
  active.copied = stream_->record();
  leaving_.push_back(&active);
}

void Worker::write_what_was_copied(bool wait) {
  while (!leaving_.empty()) {
    Active& active = *leaving_.front();
    try {
      if (!active.copied->done()) {
        if (!wait) return;
        wait_for_copy(active.segment.group->before, *active.copied);
      }
      left_.clear();
      for (const Transfer& part : parts_of(active)) {
        if (active.place.holds(part.memory)) left_.push_back(part);
      }
      if (!active.segment.group->abandoned_.load(std::memory_order_relaxed)) request(active, left_);
    } catch (...) {
      active.error = current_error();
    }
    leaving_.pop_front();
    active.copied.reset();
    settle(active);
    wait = false;
  }
}

// A guest serves all of its parts, in rounds. What it cannot open is left, as is what the page cache lacks.
void Worker::serve_all_from_memory(Active& active, std::span<const Transfer> parts) {
  while (!parts.empty() && !active.error) {
    active.files.clear();
    const size_t count = open_files(active, parts, WhenTaken::kGiveUp);
    if (active.error) break;
    if (count == 0) {
      left_.insert(left_.end(), parts.begin(), parts.end());
      return;
    }
    serve_from_memory(active, parts.first(count));
    parts = parts.subspan(count);
  }
  if (active.error) left_.clear();
}

// Parts whose files are open (open_files).
void Worker::serve_from_memory(Active& active, std::span<const Transfer> parts) {
  const Segment& segment = active.segment;
  const Group& group = *segment.group;
  const bool asked_before = !segment.rest.empty();
  if (asked_before || group.direction == Direction::kWrite || options_.io.direct == DirectMode::kAlways) {
    left_.insert(left_.end(), parts.begin(), parts.end());
    return;
  }
  const auto asked = Clock::now();
  RouteBytes bytes;
  const auto files = std::span(part_files_).first(parts.size());
  active.error = page_cache_.serve(parts, files, group.conversion, group.past_caches_, left_, bytes);
  active.bytes += bytes;
  if (const uint64_t copied = bytes.total(); copied > 0) spans_.add(Work::kPageCache, asked, Clock::now(), copied);
  if (active.error) left_.clear();
}

// Opens the files of a round: of the first parts, as many as there are descriptors for, which it returns. Only who
// gives up gets none.
size_t Worker::open_files(Active& active, std::span<const Transfer> parts, WhenTaken when_taken) {
  part_files_.clear();
  size_t unused_before = 0;
  for (const Transfer& part : parts) {
    try {
      const bool is_first = part_files_.empty();
      const size_t opened_before = active.files.size();
      File* file = active.open(part.file, is_first ? when_taken : WhenTaken::kGiveUp);
      if (file == nullptr) {
        // The others of the round need a second descriptor for O_DIRECT: that of each other one.
        const size_t count = unused_before > 1 ? (part_files_.size() + 1) / 2 : part_files_.size();
        part_files_.resize(count);
        active.files.keep(part_files_);
        break;
      }
      part_files_.push_back(file);
      if (active.files.size() > opened_before && active.files.uses_last_alone()) ++unused_before;
    } catch (const Failure& failure) {
      active.error = failure.error();
      active.error->offset = part.offset;
      active.error->length = part.length;
      return 0;
    }
    if (unused_before >= most_files_in_round_) break;
  }
  return part_files_.size();
}

File* Worker::Active::open(uint32_t index, WhenTaken when_taken) {
  return files.open(*segment.group->files, index, when_taken);
}

void Worker::wait_for(Event& event) { is_guest_ ? wait_soon(event) : event.wait(); }

// Until it is done with memory that is written next, or has written what is read: work of others, not the link's.
void Worker::wait_for_device(const Events& uses) {
  if (all_done(uses)) return;
  link_.flush();
  const auto asked = Clock::now();
  for (const auto& event : uses) wait_for(*event);
  const auto ended = Clock::now();
  counters_.device_ns.add(ns_between(asked, ended));
  spans_.add(Work::kDevice, asked, ended, 0);
}

void Worker::wait_for_copy(const Events& before, Event& copied) {
  wait_for_device(before);
  const auto asked = Clock::now();
  wait_for(copied);
  const auto ended = Clock::now();
  counters_.link_ns.add(ns_between(asked, ended));
  spans_.add(Work::kLink, asked, ended, 0);
}

// A guest's copies: nothing of them is under way when its thread goes.
void Worker::wait_for_own_copy(Active& active) {
  try {
    wait_for_copy(active.segment.group->before, *active.copied);
  } catch (const Failure& failure) {
    active.error = failure.error();
    finish(*stream_);
  }
  active.copied.reset();
}

// Copies end in the order in which they were asked for. Where none is under way, storage holds all the memory.
void Worker::wait_for_staging() {
  if (copying_.empty()) {
    write_what_was_copied(/*wait=*/true);
    return exchange_all(/*idle=*/true);
  }
  try {
    wait_for_copy(copying_.front().before, *copying_.front().event);
  } catch (const Failure&) {  // the device is lost: whoever uses it next is told
  }
  reclaim_staging();
}

void Worker::reclaim_staging() {
  while (!copying_.empty()) {
    try {
      if (!copying_.front().event->done()) return;
    } catch (const Failure&) {
    }
    staging_->give_back(copying_.front().place);
    copying_.pop_front();
  }
}

bool Worker::make_backend_once(Lane& lane, const std::string& name, Active& active) {
  if (lane.backend != nullptr) return true;
  try {
    lane.backend = make_backend(name, options_.io, device_);
    return true;
  } catch (const Failure& failure) {
    const bool needs_descriptors = &lane == &host_ && is_out_of_descriptors(failure.error().system_errno);
    if (needs_descriptors && !options_.io.strict) {
      note_fallback("a worker uses posix calls instead: " + failure.error().message);
      lane.backend = make_backend("posix", options_.io, device_);  // which needs none
      return true;
    }
    active.error = failure.error();
    return false;
  }
}

// What there is more of it than when it was called before.
void Worker::expect_staging() {
  if (staging_ == nullptr || host_.backend->capabilities().reaches_device) return;
  const auto& memory = staging_->memory();
  for (; expected_ < memory.size(); ++expected_) host_.backend->expect_memory(memory[expected_]);
}

// Turns what is left into requests that wait for room.
void Worker::request(Active& active, std::span<const Transfer> left) {
  if (!make_backend_once(host_, selection_.name, active)) return;
  expect_staging();
  const Group& group = *active.segment.group;
  if (group.direction == Direction::kWrite) return request_writes(active, left);
  ranges_.clear();
  parts_.clear();
  for (const Transfer& transfer : left) split(transfer, options_.io.request_bytes, group.conversion, parts_);
  coalesce(parts_, options_.coalesce_gap_bytes, options_.io.request_bytes, ranges_, active.pieces);
  for (const Range& range : ranges_) {
    File* file = &active.file(range.file);  // which its round has opened
    const auto pieces = std::span(active.pieces).subspan(range.first_piece, range.piece_count);
    add_request(active, host_, range.file,
                {0, group.direction, group.conversion, file, range.offset, range.length, pieces,
                 /*owns_pages=*/staged_ && active.place.has_pages_of(pieces.front())});
  }
}

// Those that follow one another in the file are joined, and all keep their order: so each part's checksum goes on from
// request to request.
void Worker::request_writes(Active& active, std::span<const Transfer> left) {
  Group& group = *active.segment.group;
  const uint64_t most_bytes = options_.io.request_bytes;
  ranges_.clear();
  const auto goes_on_with = [&](const Transfer& next) {
    if (ranges_.empty()) return false;
    const Range& last = ranges_.back();
    return last.file == next.file && last.offset + last.length == next.offset;
  };
  uint64_t joined_bytes = 0;
  for (size_t i = 0; i < left.size(); ++i) {  // with checksums, these are all parts of the segment
    uint32_t* checksum =
        group.checksum != Checksum::kNone ? &group.part_checksums_[active.segment.range.first + i] : nullptr;
    parts_.clear();
    joined_bytes = split(left[i], most_bytes, group.conversion, parts_, goes_on_with(left[i]) ? joined_bytes : 0);
    for (const Transfer& part : parts_) {
      if (goes_on_with(part) && ranges_.back().length + part.length <= most_bytes + kCutBytes) {
        ranges_.back().length += part.length;
        ++ranges_.back().piece_count;
      } else {
        ranges_.push_back({part.file, part.offset, part.length, active.pieces.size(), 1});
      }
      active.pieces.push_back({part.offset, part.length, part.memory, checksum});
    }
  }
  for (const Range& range : ranges_) {
    add_request(active, host_, range.file,
                {0, group.direction, group.conversion, &active.file(range.file), range.offset, range.length,
                 std::span(active.pieces).subspan(range.first_piece, range.piece_count)});
  }
}

// The same for a backend that writes the device itself, where no gap can be read over: a request is a piece.
void Worker::request_of_device(Active& active, std::span<const Transfer> left) {
  if (!make_backend_once(device_lane_, selection_.device_backend, active)) return;
  const Group& group = *active.segment.group;
  wait_for_device(group.before);
  ranges_.clear();
  parts_.clear();
  for (const Transfer& transfer : left) split(transfer, options_.io.request_bytes, group.conversion, parts_);
  coalesce(parts_, 0, group.direction == Direction::kRead ? options_.io.request_bytes : 0, ranges_,
           active.device_pieces);
  for (const Range& range : ranges_) {
    File& file = active.file(range.file);
    for (const Piece& piece : std::span(active.device_pieces).subspan(range.first_piece, range.piece_count)) {
      add_request(active, device_lane_, range.file,
                  {0, group.direction, group.conversion, &file, piece.offset, piece.length, {&piece, 1}, false});
    }
  }
}

void Worker::add_request(Active& active, Lane& lane, uint32_t file, Request request) {
  if (free_tags_.empty()) {
    free_tags_.reserve(by_tag_.size() + 1);  // for all of them at once
    by_tag_.emplace_back();
    free_tags_.push_back(by_tag_.size() - 1);
  }
  request.tag = free_tags_.back();
  lane.waiting.push_back(request);
  free_tags_.pop_back();
  by_tag_[request.tag] = {&active, file, request};
  ++active.open_requests;
  counters_.requests.add(1);
}

// Gives the backends what they take and receives what they have; waits for a completion where there is nothing
// else to do: no segment to start, or no room for the requests of the last one.
void Worker::exchange_all(bool idle) {
  if (!device_lane_.busy()) {
    exchange(host_, idle || !host_.waiting.empty() ? kReapTimeout : std::chrono::milliseconds(0));
  } else if (!host_.busy()) {
    exchange(device_lane_, idle || !device_lane_.waiting.empty() ? kReapTimeout : std::chrono::milliseconds(0));
  } else {
    const bool moved = exchange(host_, std::chrono::milliseconds(0));
    exchange(device_lane_, moved || !idle ? std::chrono::milliseconds(0) : kShortReapTimeout);
  }
}

// Whether anything was taken or completed.
bool Worker::exchange(Lane& lane, std::chrono::milliseconds patience) {
  drop_abandoned(lane);
  if (!lane.busy()) return false;
  link_.flush();  // what follows may take long
  const auto asked = Clock::now();
  size_t taken = submit(lane);
  if (lane.in_flight == 0) return taken > 0;
  completions_.resize(std::min(options_.io.queue_depth, kMostAtOnce));
  const size_t few = patience.count() > 0 ? std::clamp<size_t>(lane.in_flight / 4, 1, kMostAtOnce) : 0;
  size_t count = reap(lane, few, few > 1 ? std::min(patience, kFewReapTimeout) : patience);
  if (count == 0 && few > 1) count = reap(lane, 1, patience);
  lane.in_flight -= count;
  std::exception_ptr failure;  // what was reaped is told first
  try {
    taken += submit(lane);  // before those are told who wait for what has ended: the disk is not to wait for that
  } catch (...) {
    failure = std::current_exception();
  }
  const auto ended = Clock::now();
  counters_.storage_ns.add(ns_between(asked, ended));
  RouteBytes bytes;
  for (size_t i = 0; i < count; ++i) bytes += completions_[i].bytes;
  const bool looked = taken + count == 0 && patience.count() == 0;  // and found nothing
  if (!looked) spans_.add(Work::kStorage, asked, ended, bytes.total());
  for (size_t i = 0; i < count; ++i) completed(lane, completions_[i]);
  if (failure) std::rethrow_exception(failure);
  return taken + count > 0;
}

size_t Worker::submit(Lane& lane) {
  if (lane.waiting.empty()) return 0;
  const size_t offered = std::min(lane.waiting.size(), options_.io.queue_depth);
  batch_.assign(lane.waiting.begin(), lane.waiting.begin() + static_cast<ptrdiff_t>(offered));
  const size_t taken = lane.backend->submit(batch_);
  for (size_t i = 0; i < taken; ++i) {
    by_tag_[batch_[i].tag].active->segment.group->requests_given_.fetch_add(1, std::memory_order_relaxed);
  }
  counters_.exchanged.add(taken);
  lane.waiting.erase(lane.waiting.begin(), lane.waiting.begin() + static_cast<ptrdiff_t>(taken));
  lane.in_flight += taken;
  return taken;
}

// Sleeps for no longer than until there is a segment to take.
size_t Worker::reap(Lane& lane, size_t min, std::chrono::milliseconds patience) {
  if (min == 0 || !has_room()) return lane.backend->reap(completions_, min, patience);
  if (!queue_.sleeps(*lane.backend)) return lane.backend->reap(completions_, 0, {});
  const size_t count = lane.backend->reap(completions_, min, patience);
  queue_.wakes(*lane.backend);
  return count;
}

void Worker::completed(Lane& lane, Completion& completion) {
  const Asked asked = by_tag_[completion.tag];
  Active& active = *asked.active;
  free_tags_.push_back(completion.tag);
  active.bytes += completion.bytes;
  active.segment.group->requests_completed_.fetch_add(1, std::memory_order_relaxed);
  counters_.exchanged.add(1);
  counters_.storage_bytes.add(completion.storage_bytes);
  if (completion.error) {
    const bool again = &lane == &device_lane_ && retry_by_host(asked, *completion.error);
    if (!again && !active.error) active.error = std::move(completion.error);
    completion.error.reset();
  }
  --active.open_requests;
  settle(active);
}

// What storage could not bring to the device goes by way of the host, once: as one more segment of its group.
bool Worker::retry_by_host(const Asked& asked, const Error& error) {
  if (options_.io.strict || error.code == ErrorCode::kCorrupt) return false;
  const Piece& piece = asked.request.pieces.front();
  const std::shared_ptr<Group>& group = asked.active->segment.group;
  group->open_segments_.fetch_add(1, std::memory_order_relaxed);
  try {
    note_fallback("a transfer between storage and " + device_.name() + " went by way of the host: " + error.message);
    queue_.push_for_storage({group, {}, {{asked.file, piece.offset, piece.length, piece.memory}}, {}, true});
  } catch (...) {
    group->open_segments_.fetch_sub(1, std::memory_order_relaxed);  // this one's own is still open
    return false;
  }
  counters_.retries.add(1);
  return true;
}

// Requests that wait for room while their group is cancelled, or has failed elsewhere, need not be made.
void Worker::drop_abandoned(Lane& lane) {
  std::erase_if(lane.waiting, [this](const Request& request) {
    Active& active = *by_tag_[request.tag].active;
    if (!active.segment.group->abandoned_.load(std::memory_order_relaxed)) return false;
    free_tags_.push_back(request.tag);
    --active.open_requests;
    settle(active);
    return true;
  });
}

// Not what has to wait in its stream: all that comes behind it would wait too. Nor a guest's, which is waited for.
bool Worker::goes_by_link(const Active& active) const {
  const Group& group = *active.segment.group;
  if (is_guest_ || active.place.runs.empty() || active.error || group.direction == Direction::kWrite) return false;
  if (group.abandoned_.load(std::memory_order_relaxed)) return false;
  try {
    return all_done(group.before);
  } catch (const Failure&) {
    return false;
  }
}

void Worker::copy_to_device(Active& active) {
  const Group& group = *active.segment.group;
  if (active.error || group.direction == Direction::kWrite || group.abandoned_.load(std::memory_order_relaxed)) return;
  try {
    for (const auto& event : group.before) {
      if (!event->done()) stream_->wait(*event);  // which takes the device microseconds, were it done already
    }
    for (const Staging::Run& run : active.place.runs) stream_->copy_in(run.device, run.host, run.bytes);
    active.copied = stream_->record();
  } catch (const Failure& failure) {
    active.error = failure.error();
    finish(*stream_);  // the copies before it read staging memory and write the device's
  }
}

// Of what was read, while it is in memory that the processor reads. What is written has its own on the way.
void Worker::take_checksums(const Active& active) {
  const Segment& segment = active.segment;
  Group& group = *segment.group;
  if (group.checksum == Checksum::kNone || group.direction == Direction::kWrite || active.error) return;
  if (group.abandoned_.load(std::memory_order_relaxed)) return;
  for (size_t i = segment.range.first; i < segment.range.first + segment.range.count; ++i) {
    const Transfer& part = group.segmentation_.parts[i];
    group.part_checksums_[i] = checksum_of(group.checksum, part.memory, part.length);
  }
}

// Tells its group, once, whatever fails meanwhile.
void Worker::end(Active& active) {
  take_checksums(active);
  const bool by_link = goes_by_link(active);
  Staging::Place carried;
  if (by_link) {
    carried = std::exchange(active.place, {});
  } else if (active.place.memory != nullptr) {
    try {
      copy_out_of_staging(active);
    } catch (...) {
      active.error = current_error();
      finish(*stream_);
      active.copied.reset();
      if (active.place.memory != nullptr) staging_->give_back(active.place);
    }
  }
  for (size_t i = 0; i < kRouteCount; ++i) counters_.bytes[i].add(active.bytes.bytes[i]);
  counters_.transfers.add(active.segment.range.count);
  counters_.segments.add(1);
  if (active.error) counters_.errors.add(1);
  counters_.segment_latency.add(Clock::now() - active.started);
  // Let go of everything before telling: whoever hears it may fill and submit the group again.
  std::shared_ptr<Group> group = std::move(active.segment.group);
  const RouteBytes bytes = active.bytes;
  std::optional<Error> error = std::move(active.error);
  retire(active);
  if (by_link) {
    try {
      Copy& copy = copying_.emplace_back();
      copy.place = std::move(carried);
      try {
        copy.event = link_.carry(group, bytes, copy.place.runs);
      } catch (...) {
        carried = std::move(copy.place);
        copying_.pop_back();
        throw;
      }
      return;
    } catch (...) {
      error = current_error();
      staging_->give_back(carried);
    }
  }
  group->segment_ended(bytes, std::move(error));
}

// By this worker's own stream, if there is something to copy; its place is free when that is done.
void Worker::copy_out_of_staging(Active& active) {
  Group& group = *active.segment.group;
  copy_to_device(active);
  if (is_guest_ && active.copied != nullptr) wait_for_own_copy(active);
  if (active.copied == nullptr) return staging_->give_back(active.place);
  group.copied_by(stream_.get(), active.copied);
  copying_.push_back({group.before, active.copied, {}});
  copying_.back().place = std::exchange(active.place, {});
}

}  // namespace gdsdata
