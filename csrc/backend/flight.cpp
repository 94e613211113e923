#include "backend/flight.h"

#include <algorithm>
#include <cerrno>
#include <functional>
#include <string>
#include <thread>

#include "backend/request_error.h"
#include "base/copy.h"
#include "base/crc32.h"
#include "base/extent_math.h"
#include "base/file.h"
#include "tuning.h"

namespace gdsdata {

namespace {

constexpr uint64_t kPageBytes = 4096;

// After so many answers in a row without progress, the request fails.
constexpr uint64_t kMaxIdleAnswers = 1000;

// Returns true if memory and file offset are congruent modulo the alignment.
bool is_congruent(const Piece& piece, uint64_t alignment) {
  return (reinterpret_cast<uintptr_t>(piece.memory) - piece.offset) % alignment == 0;
}

// Returns true if the pieces are contiguous in the file and in memory.
bool in_one_place(std::span<const Piece> pieces) {
  const auto goes_on = [](const Piece& piece, const Piece& next) {
    return piece.offset + piece.length == next.offset && piece.memory + piece.length == next.memory;
  };
  return std::adjacent_find(pieces.begin(), pieces.end(), std::not_fn(goes_on)) == pieces.end();
}

}  // namespace

bool Flight::begin(const Request& request, BounceArena& arena, bool others_in_flight, const BackendOptions& options,
                   FaultPlan* faults) {
  *this = Flight();
  request_ = request;
  completion_.tag = request.tag;
  arena_ = &arena;
  options_ = &options;
  faults_ = faults;
  position_ = request.offset;
  if (request.file->buffered() < 0) {
    if (others_in_flight) return false;  // perhaps they have the last descriptors
    fail(closed_error(request));
    return true;
  }
  direct_fd_ = options.direct == DirectMode::kNever ? -1 : request.file->direct();
  if (!is_direct() && options.direct != DirectMode::kNever) {
    if (others_in_flight && request.file->may_be_direct_later()) return false;
    if (options.strict || options.direct == DirectMode::kAlways) {
      fail(direct_refused_error(request));
      return true;
    }
  }
  // Long requests use whole pages even if sectors would do. Their memory then is whole pages too,
  // which a virtual disk's host copies a tenth faster (docs/design-decisions.md). Writes always do.
  // If one request writes a part of a page around the page cache and another one writes through it,
  // the next fsync fails with EIO.
  if (is_direct()) {
    alignment_ = request.file->direct_alignment();
    if (request.length >= tuning::kInPlaceBytes) alignment_ = std::max(alignment_, kPageBytes);
    if (request.direction == Direction::kWrite) alignment_ = std::max(alignment_, page_bytes());
  }
  if (!take_window(others_in_flight)) return false;
  if (request.direction == Direction::kWrite) leave_memory();
  return true;
}

bool Flight::take_window(bool others_in_flight) {
  const bool write = request_.direction == Direction::kWrite;
  if (write) {
    if (!is_direct()) return true;  // directly from memory
    window_begin_ = align_up(request_.offset, alignment_);
    window_end_ = std::max(window_begin_, align_down(end(), alignment_));
  } else {
    window_begin_ = align_down(request_.offset, alignment_);
    window_end_ = align_up(end(), alignment_);
  }
  middle_begin_ = middle_end_ = window_end_;
  if (window_begin_ == window_end_) return true;
  const Piece& piece = request_.pieces.front();
  if (in_one_place(request_.pieces) && request_.conversion == Conversion::kNone && is_congruent(piece, alignment_) &&
      (write || request_.length >= tuning::kInPlaceBytes || !is_direct())) {
    const bool whole = request_.owns_pages && !write && alignment_ <= kPageBytes;
    middle_begin_ = whole ? window_begin_ : align_up(request_.offset, alignment_);
    middle_end_ = whole ? window_end_ : std::max(middle_begin_, align_down(end(), alignment_));
  }
  const uint64_t head_bytes = align_up(middle_begin_ - window_begin_, alignment_);
  bounce_bytes_ = head_bytes + (window_end_ - middle_end_);
  if (bounce_bytes_ == 0) return true;
  bounce_ = others_in_flight ? arena_->take(bounce_bytes_) : arena_->take_untouched(bounce_bytes_);
  if (bounce_ == nullptr) {
    bounce_bytes_ = 0;
    return false;
  }
  tail_ = bounce_ + head_bytes;
  return true;
}

// For writes: copies the bytes that bounce, and computes the checksums while the bytes are in the
// processor's caches.
void Flight::leave_memory() {
  const uint64_t bounced_end = bounce_bytes_ == 0 ? window_begin_ : window_end_;
  for (const Piece& piece : request_.pieces) {
    for (uint64_t done = 0; done < piece.length;) {
      const uint64_t offset = piece.offset + done;
      const bool bounces = offset >= window_begin_ && offset < bounced_end;
      const uint64_t stop = bounces ? bounced_end : offset < window_begin_ ? window_begin_ : end();
      const uint64_t bytes = std::min({piece.length - done, stop - offset, tuning::kCheckedAtOnceBytes});
      if (bounces) copy_bytes(bounce_ + (offset - window_begin_), piece.memory + done, bytes);
      if (piece.checksum != nullptr) *piece.checksum = crc32(piece.memory + done, bytes, *piece.checksum);
      done += bytes;
    }
  }
}

const Flight::Step& Flight::next() {
  step_ = {};
  step_.write = request_.direction == Direction::kWrite;
  const bool in_window = !step_.write || (position_ >= window_begin_ && position_ < window_end_);
  step_.direct = is_direct() && in_window;
  step_.fd = step_.direct ? direct_fd_ : request_.file->buffered();
  if (!step_.write || step_.direct) {
    point_step_at(align_down(position_, alignment_), window_end_);
  } else {
    // An edge that shares its block with neighbors, or a file without direct I/O.
    const bool before_window = is_direct() && position_ < window_begin_ && window_begin_ < window_end_;
    point_step_at_pieces(before_window ? window_begin_ : end());
  }
  return step_;
}

// From the current position to `end`, or until the step is full.
void Flight::point_step_at_pieces(uint64_t end) {
  step_.offset = position_;
  for (const Piece& piece : request_.pieces) {
    const uint64_t begin = std::max(position_, piece.offset), stop = std::min(end, piece.offset + piece.length);
    if (begin >= stop) continue;
    if (step_.memory_count == step_.memory.size()) break;
    step_.memory[step_.memory_count++] = {piece.memory + (begin - piece.offset), stop - begin};
    step_.length += stop - begin;
  }
}

void Flight::point_step_at(uint64_t offset, uint64_t end) {
  step_.offset = offset;
  step_.length = end - offset;
  // `memory` holds the byte at file offset `origin`.
  const auto add = [&](uint64_t part_begin, uint64_t part_end, std::byte* memory, uint64_t origin) {
    const uint64_t begin = std::max(offset, part_begin), stop = std::min(end, part_end);
    if (begin >= stop) return;
    const auto distance = static_cast<ptrdiff_t>(begin) - static_cast<ptrdiff_t>(origin);  // may be negative
    step_.memory[step_.memory_count++] = {memory + distance, stop - begin};
  };
  const Piece& piece = request_.pieces.front();
  add(window_begin_, middle_begin_, bounce_, window_begin_);
  add(middle_begin_, middle_end_, piece.memory, piece.offset);
  add(middle_end_, window_end_, tail_, middle_end_);
}

void Flight::advance(int64_t result) noexcept {
  try {
    take_result(result);
  } catch (...) {  // no memory for the text of an error
    fail(current_error());
  }
}

void Flight::take_result(int64_t result) {
  if (faults_ != nullptr) {
    if (faults_->happens(faults_->interrupt)) {
      result = faults_->happens(0.5) ? -EINTR : -EAGAIN;
    } else if (result > 0) {
      result = static_cast<int64_t>(faults_->shortened(static_cast<uint64_t>(result)));
    }
  }
  if (result == -EINTR || result == -EAGAIN) {
    if (++idle_answers_ < kMaxIdleAnswers) {
      if (result == -EAGAIN) std::this_thread::yield();
      return;
    }
  }
  if (result < 0) {
    const int system_errno = static_cast<int>(-result);
    const std::string operation = std::string(step_.write ? "write" : "read") + (step_.direct ? " with O_DIRECT" : "");
    if (step_.direct && refuses_direct(system_errno) && options_->direct == DirectMode::kAuto && !options_->strict) {
      return fall_back_to_buffered(operation, system_errno);
    }
    return fail(system_error(operation, request_.file->path(), system_errno, step_.offset, step_.length));
  }
  completion_.storage_bytes += static_cast<uint64_t>(result);
  if (step_.write) {
    advance_write(static_cast<uint64_t>(result));
  } else {
    advance_read(static_cast<uint64_t>(result));
  }
}

void Flight::advance_read(uint64_t moved) {
  const uint64_t reached = step_.offset + moved;
  if (moved == 0) return fail(truncated_error(request_));
  if (reached > position_) {
    position_ = reached;
    idle_answers_ = 0;
  } else if (reached >= request_.file->current_size_bytes() || ++idle_answers_ >= kMaxIdleAnswers) {
    // The same bytes were read again, so the file ends before the request does.
    return fail(truncated_error(request_));
  }
  if (position_ >= end()) ended_ = true;
}

void Flight::advance_write(uint64_t moved) {
  const uint64_t reached = step_.offset + moved;
  if (reached > position_) {
    completion_.bytes[step_.direct ? Route::kDirect : Route::kBuffered] += reached - position_;
    position_ = reached;
    idle_answers_ = 0;
  } else if (++idle_answers_ >= kMaxIdleAnswers) {
    return fail(system_error("write", request_.file->path(), EIO, step_.offset, step_.length));
  }
  if (position_ >= end()) ended_ = true;
}

// Bounce memory serves buffered I/O too. Only bytes beyond the request are no longer read.
void Flight::fall_back_to_buffered(const std::string& refused, int system_errno) {
  request_.file->refuse_direct(
      system_error(refused, request_.file->path(), system_errno, step_.offset, step_.length).message);
  direct_fd_ = -1;
  alignment_ = 1;
  if (request_.direction == Direction::kRead) window_end_ = end();
}

void Flight::fail(Error error) noexcept {
  completion_.error = std::move(error);
  completion_.bytes = {};
  ended_ = true;
}

Completion Flight::finish() noexcept {
  if (!completion_.error && request_.direction == Direction::kRead) {
    for (const Piece& piece : request_.pieces) {
      const uint64_t piece_end = piece.offset + piece.length;
      const uint64_t head_end = std::min(piece_end, middle_begin_), tail_begin = std::max(piece.offset, middle_end_);
      if (piece.offset < head_end) {
        convert(request_.conversion, piece.memory, bounce_ + (piece.offset - window_begin_), head_end - piece.offset);
      }
      if (tail_begin < piece_end) {
        convert(request_.conversion, piece.memory + (tail_begin - piece.offset), tail_ + (tail_begin - middle_end_),
                piece_end - tail_begin);
      }
      completion_.bytes[is_direct() ? Route::kDirect : Route::kBuffered] += piece.length;
    }
  }
  if (bounce_bytes_ != 0) arena_->release(bounce_, bounce_bytes_);
  bounce_bytes_ = 0;
  return std::move(completion_);
}

}  // namespace gdsdata
