#include "backend/flight.h"

#include <algorithm>
#include <cerrno>
#include <string>
#include <thread>

#include "base/extent_math.h"
#include "base/file.h"

namespace gdsdata {

namespace {

// A kernel that answers so often without moving a byte will not move one.
constexpr uint64_t kMaxIdleAnswers = 1000;

bool aligned(const void* memory, uint64_t alignment) {
  return reinterpret_cast<uintptr_t>(memory) % alignment == 0;
}

bool refuses_direct(int system_errno) { return system_errno == EINVAL || system_errno == EOPNOTSUPP; }

}  // namespace

bool Flight::begin(const Request& request, BounceArena& arena, const BackendOptions& options, FaultPlan* faults) {
  *this = Flight();
  request_ = request;
  completion_.tag = request.tag;
  arena_ = &arena;
  options_ = &options;
  faults_ = faults;
  position_ = request.offset;
  direct_ = options.direct != DirectMode::kNever && request.file->direct() >= 0;
  if (!direct_ && options.direct != DirectMode::kNever && (options.strict || options.direct == DirectMode::kAlways)) {
    fail({ErrorCode::kUnavailable,
          "O_DIRECT was asked for, but the file system of '" + request.file->path() +
              "' refuses it; use direct=\"auto\" without strict, or a file system that allows it (ext4, xfs)",
          request.file->path(), request.offset, request.length});
    return true;
  }
  alignment_ = direct_ ? request.file->direct_alignment() : 1;
  return take_window();
}

bool Flight::take_window() {
  const bool write = request_.direction == Direction::kWrite;
  if (write) {
    if (!direct_) return true;  // straight from memory
    window_offset_ = align_up(request_.offset, alignment_);
    const uint64_t window_end = align_down(end(), alignment_);
    if (window_end <= window_offset_) return true;  // edges only
    window_length_ = window_end - window_offset_;
  } else {
    window_offset_ = align_down(request_.offset, alignment_);
    window_length_ = align_up(end(), alignment_) - window_offset_;
  }
  const Piece& piece = request_.pieces.front();
  const bool in_place = request_.pieces.size() == 1 && request_.conversion == Conversion::kNone;
  std::byte* memory = piece.memory + (write ? window_offset_ - request_.offset : 0);
  const bool fits = write || (window_offset_ == piece.offset && window_length_ == piece.length);
  if (in_place && fits && aligned(memory, alignment_)) {
    window_ = memory;
    return true;
  }
  window_ = arena_->take(window_length_);
  if (window_ == nullptr) return false;
  bounce_bytes_ = window_length_;
  if (write) std::copy_n(memory, window_length_, window_);
  return true;
}

Flight::Step Flight::next() {
  step_ = {};
  step_.write = request_.direction == Direction::kWrite;
  if (!step_.write) {
    step_.offset = align_down(position_, alignment_);
    step_.length = window_offset_ + window_length_ - step_.offset;
    step_.buffer = window_ + (step_.offset - window_offset_);
    step_.fd = direct_ ? request_.file->direct() : request_.file->buffered();
    step_.in_bounce = bounce_bytes_ != 0;
    return step_;
  }
  const uint64_t window_end = window_offset_ + window_length_;
  if (direct_ && window_length_ != 0 && position_ >= window_offset_ && position_ < window_end) {
    step_.offset = align_down(position_, alignment_);
    step_.length = window_end - step_.offset;
    step_.buffer = window_ + (step_.offset - window_offset_);
    step_.fd = request_.file->direct();
    step_.in_bounce = bounce_bytes_ != 0;
    return step_;
  }
  // An edge that shares its block with neighbours, or a file without direct I/O: the page cache merges it.
  const bool before_window = direct_ && window_length_ != 0 && position_ < window_offset_;
  step_.offset = position_;
  step_.length = (before_window ? window_offset_ : end()) - position_;
  step_.buffer = request_.pieces.front().memory + (position_ - request_.offset);
  step_.fd = request_.file->buffered();
  return step_;
}

void Flight::advance(int64_t result) {
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
    const bool direct_step = direct_ && step_.fd == request_.file->direct();
    const std::string operation =
        std::string(step_.write ? "write" : "read") + (direct_step ? " with O_DIRECT" : "");
    if (direct_step && refuses_direct(system_errno) && options_->direct == DirectMode::kAuto && !options_->strict) {
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
  if (moved == 0) return fail_truncated();
  if (reached > position_) {
    position_ = reached;
    idle_answers_ = 0;
  } else if (reached >= request_.file->current_size_bytes() || ++idle_answers_ >= kMaxIdleAnswers) {
    return fail_truncated();  // the same bytes again: aligned down, the end of the file comes before ours
  }
  if (position_ >= end()) ended_ = true;
}

void Flight::advance_write(uint64_t moved) {
  const uint64_t reached = step_.offset + moved;
  if (reached > position_) {
    const bool direct_step = direct_ && step_.fd == request_.file->direct();
    completion_.bytes[direct_step ? Route::kDirect : Route::kBuffered] += reached - position_;
    position_ = reached;
    idle_answers_ = 0;
  } else if (++idle_answers_ >= kMaxIdleAnswers) {
    return fail(system_error("write", request_.file->path(), EIO, step_.offset, step_.length));
  }
  if (position_ >= end()) ended_ = true;
}

// The bounce window, where there is one, is larger than buffered I/O needs and serves it as well.
void Flight::fall_back_to_buffered(const std::string& refused, int system_errno) {
  request_.file->refuse_direct(
      system_error(refused, request_.file->path(), system_errno, step_.offset, step_.length).message);
  direct_ = false;
  alignment_ = 1;
  if (request_.direction == Direction::kRead) window_length_ = end() - window_offset_;
}

void Flight::fail(Error error) {
  completion_.error = std::move(error);
  completion_.bytes = {};
  ended_ = true;
}

void Flight::fail_truncated() {
  const uint64_t size_bytes = request_.file->current_size_bytes();
  fail({ErrorCode::kCorrupt,
        "'" + request_.file->path() + "' ends at " + std::to_string(size_bytes) + " bytes, before offset " +
            std::to_string(request_.offset) + " + length " + std::to_string(request_.length) +
            " that was to be read; it was truncated, or its index is of another file",
        request_.file->path(), request_.offset, request_.length});
}

Completion Flight::finish() {
  if (!completion_.error && request_.direction == Direction::kRead) {
    for (const Piece& piece : request_.pieces) {
      const std::byte* source = window_ + (piece.offset - window_offset_);
      if (source != piece.memory) convert(request_.conversion, piece.memory, source, piece.length);
      completion_.bytes[direct_ ? Route::kDirect : Route::kBuffered] += piece.length;
    }
  }
  if (bounce_bytes_ != 0) arena_->give_back(window_, bounce_bytes_);
  bounce_bytes_ = 0;
  return std::move(completion_);
}

}  // namespace gdsdata
