#include "engine/worker.h"

#include <algorithm>
#include <utility>

namespace gdsdata {

namespace {
// A worker that waits for its disk looks up this often; nothing depends on it.
constexpr std::chrono::milliseconds kReapTimeout{100};
}  // namespace

Worker::Worker(const EngineOptions& options, const std::string& backend_name, Device& device, SegmentQueue& queue)
    : options_(options), backend_name_(backend_name), device_(device), queue_(queue) {}

void Worker::run() {
  while (true) {
    const bool busy = in_flight_ > 0 || !waiting_.empty();
    Segment segment;
    bool taken = false;
    if (waiting_.empty()) {  // a backend without room gets no more
      const auto asked = Clock::now();
      taken = queue_.pop(segment, /*wait=*/!busy);
      if (!busy) counters_.idle_ns.add(static_cast<uint64_t>((Clock::now() - asked).count()));
    }
    if (taken) {
      Active& active = begin(std::move(segment));
      serve_from_memory(active);
      if (!left_.empty() && make_backend_once(active)) request(active);
      if (active.open_requests == 0) end(active);
    }
    if (!taken && !busy) return;
    if (in_flight_ > 0 || !waiting_.empty()) exchange(/*idle=*/!taken);
  }
}

bool Worker::help() {
  Segment segment;
  if (!queue_.pop_fresh(segment)) return false;
  Active& active = begin(std::move(segment));
  serve_from_memory(active);
  if (left_.empty()) {
    end(active);
    return true;
  }
  active.segment.rest = left_;
  active.segment.bytes = active.bytes;
  queue_.push_for_storage(std::move(active.segment));
  retire(active);
  return true;
}

Worker::Active& Worker::begin(Segment segment) {
  if (idle_actives_.empty()) {
    actives_.push_back(std::make_unique<Active>());
    idle_actives_.push_back(actives_.back().get());
  }
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
  idle_actives_.push_back(&active);
}

void Worker::serve_from_memory(Active& active) {
  left_.clear();
  const Segment& segment = active.segment;
  const Group& group = *segment.group;
  if (group.abandoned_.load(std::memory_order_relaxed)) return;
  const bool asked_before = !segment.rest.empty();
  const auto parts = asked_before ? std::span<const Transfer>(segment.rest)
                                  : std::span(group.parts_).subspan(segment.first_part, segment.part_count);
  active.error = open_files(active, parts);
  if (active.error) return;
  if (!asked_before) counters_.transfers.add(parts.size());
  if (asked_before || group.direction == Direction::kWrite || options_.io.direct == DirectMode::kAlways) {
    left_.assign(parts.begin(), parts.end());
    return;
  }
  active.error = page_cache_.serve(parts, part_files_, group.conversion, left_, active.bytes);
  if (active.error) left_.clear();
}

std::optional<Error> Worker::open_files(Active& active, std::span<const Transfer> parts) {
  part_files_.resize(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    try {
      part_files_[i] = &active.file(parts[i].file);
    } catch (const Failure& failure) {
      Error error = failure.error();
      error.offset = parts[i].offset;
      error.length = parts[i].length;
      return error;
    }
  }
  return std::nullopt;
}

File& Worker::Active::file(uint32_t index) {
  if (files.empty() || last_file != index) {
    last_file = index;
    files.push_back(segment.group->files->get(index));
  }
  return *files.back();
}

bool Worker::make_backend_once(Active& active) {
  if (backend_ != nullptr) return true;
  try {
    backend_ = make_backend(backend_name_, options_.io, device_);
    return true;
  } catch (const Failure& failure) {
    active.error = failure.error();
    return false;
  }
}

// Turns left_ into requests that wait for room.
void Worker::request(Active& active) {
  const Group& group = *active.segment.group;
  ranges_.clear();
  active.pieces.clear();
  const bool read = group.direction == Direction::kRead;
  const uint64_t limit_bytes = read ? options_.io.request_bytes : 0;  // writes are not joined
  coalesce(left_, options_.coalesce_gap_bytes, limit_bytes, ranges_, active.pieces);
  for (const Range& range : ranges_) {
    File* file = nullptr;
    try {
      file = &active.file(range.file);
    } catch (const Failure& failure) {  // closed meanwhile for want of descriptors, and gone when opened again
      active.error = failure.error();
      break;
    }
    if (free_tags_.empty()) {
      free_tags_.push_back(by_tag_.size());
      by_tag_.push_back(nullptr);
    }
    const uint64_t tag = free_tags_.back();
    free_tags_.pop_back();
    by_tag_[tag] = &active;
    waiting_.push_back({tag, group.direction, group.conversion, file, range.offset, range.length,
                        std::span(active.pieces).subspan(range.first_piece, range.piece_count)});
    ++active.open_requests;
  }
  counters_.requests.add(active.open_requests);
}

// Gives the backend what it takes and receives what it has; waits for a completion where there is nothing
// else to do: no segment to start, or no room for the requests of the last one.
void Worker::exchange(bool idle) {
  drop_abandoned();
  if (!waiting_.empty()) {
    const size_t offered = std::min(waiting_.size(), options_.io.queue_depth);
    batch_.assign(waiting_.begin(), waiting_.begin() + static_cast<ptrdiff_t>(offered));
    const size_t taken = backend_->submit(batch_);
    waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<ptrdiff_t>(taken));
    in_flight_ += taken;
  }
  if (in_flight_ == 0) return;
  completions_.resize(options_.io.queue_depth);
  const size_t completed = backend_->reap(completions_, idle || !waiting_.empty() ? 1 : 0, kReapTimeout);
  in_flight_ -= completed;
  for (size_t i = 0; i < completed; ++i) {
    Completion& completion = completions_[i];
    Active& active = *by_tag_[completion.tag];
    free_tags_.push_back(completion.tag);
    active.bytes += completion.bytes;
    counters_.storage_bytes.add(completion.storage_bytes);
    if (completion.error && !active.error) active.error = std::move(completion.error);
    completion.error.reset();
    if (--active.open_requests == 0) end(active);
  }
}

// Requests that wait for room while their group is cancelled, or has failed elsewhere, need not be made.
void Worker::drop_abandoned() {
  std::erase_if(waiting_, [this](const Request& request) {
    Active& active = *by_tag_[request.tag];
    if (!active.segment.group->abandoned_.load(std::memory_order_relaxed)) return false;
    free_tags_.push_back(request.tag);
    if (--active.open_requests == 0) end(active);
    return true;
  });
}

void Worker::end(Active& active) {
  for (size_t i = 0; i < kRouteCount; ++i) counters_.bytes[i].add(active.bytes.bytes[i]);
  counters_.segments.add(1);
  if (active.error) counters_.errors.add(1);
  counters_.segment_latency.add(Clock::now() - active.started);
  // Let go of everything before telling: whoever hears it may fill and submit the group again.
  const std::shared_ptr<Group> group = std::move(active.segment.group);
  const RouteBytes bytes = active.bytes;
  std::optional<Error> error = std::move(active.error);
  retire(active);
  group->segment_ended(bytes, std::move(error));
}

}  // namespace gdsdata
