// The state of one request in a kernel interface: the next call, and the meaning of its result.
// Only this class resumes short transfers, repeats interrupted ones, and replaces refused direct
// I/O by buffered I/O. It makes no system call: a backend issues each Step and reports its result.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "backend/backend.h"
#include "backend/bounce.h"
#include "backend/faulty.h"
#include "base/types.h"

namespace gdsdata {

class Flight {
 public:
  struct Step {
    bool write = false;
    int fd = -1;
    bool direct = false;  // fd is the O_DIRECT descriptor
    uint64_t offset = 0;
    uint64_t length = 0;
    // The memory that the bytes are read to or written from, in order.
    std::array<iovec, 3> memory;
    unsigned memory_count = 0;
  };

  // Allocates bounce memory from `arena`. For a write, also copies the bytes that need it and
  // updates the checksums. Returns false if there is no room, and has then done nothing. If others
  // are in flight, it also returns false if the memory is not touched yet, or if no descriptor is
  // left for the file or for O_DIRECT: try again when one of them has completed.
  bool begin(const Request& request, BounceArena& arena, bool others_in_flight, const BackendOptions& options,
             FaultPlan* faults);

  bool ended() const { return ended_; }
  bool is_write() const { return request_.direction == Direction::kWrite; }
  uint64_t length() const { return request_.length; }
  // The next call to issue, until `ended`. Valid until the next call of this.
  const Step& next();
  // Reports the result: bytes moved, or a negative errno. An exception would lose the request, so
  // it becomes the request's error.
  void advance(int64_t result) noexcept;
  // Call it after the end. Delivers the pieces and returns the memory to the arena.
  Completion finish() noexcept;

 private:
  bool is_direct() const { return direct_fd_ >= 0; }
  bool take_window(bool others_in_flight);
  void leave_memory();
  void point_step_at_pieces(uint64_t end);
  void point_step_at(uint64_t offset, uint64_t end);
  void take_result(int64_t result);
  void advance_read(uint64_t moved);
  void advance_write(uint64_t moved);
  void fall_back_to_buffered(const std::string& refused, int system_errno);
  void fail(Error error) noexcept;
  uint64_t end() const { return request_.offset + request_.length; }

  Request request_;
  BounceArena* arena_ = nullptr;
  const BackendOptions* options_ = nullptr;
  FaultPlan* faults_ = nullptr;

  // -1 if this request uses the page cache. Stored, because the file's own value becomes -1 when
  // another request is refused, while this one has steps in flight on the descriptor.
  int direct_fd_ = -1;
  uint64_t alignment_ = 1;  // of the descriptor in use

  // The window is the range of the file that moves. For reads it contains the request; for direct
  // writes it is the aligned middle of it. It has three parts, each of which may be empty: a head
  // in bounce memory, a middle in the caller's memory, and a tail in bounce memory. So memory that
  // is congruent to the file, modulo the alignment, needs a bounce only for its two edges.
  uint64_t window_begin_ = 0;
  uint64_t middle_begin_ = 0;
  uint64_t middle_end_ = 0;
  uint64_t window_end_ = 0;
  std::byte* bounce_ = nullptr;
  uint64_t bounce_bytes_ = 0;
  std::byte* tail_ = nullptr;

  uint64_t position_ = 0;            // in the file: bytes before it have been moved
  uint64_t idle_answers_ = 0;        // in a row without progress
  bool ended_ = false;
  Step step_;
  Completion completion_;
};

}  // namespace gdsdata
