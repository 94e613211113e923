// One request on its way through a kernel interface: what to ask for next, and what an answer
// means. Here, and nowhere else, short transfers are resumed, interrupted ones repeated and
// refusals of direct I/O answered by buffered I/O. It makes no system call: a backend issues each
// Step and reports its result.
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
    // Where the bytes go or come from, in order.
    std::array<iovec, 3> memory;
    unsigned memory_count = 0;
  };

  // Takes what it needs from `arena`, and of a write copies what bounces and goes on with its
  // checksums; false where there is no room, and then nothing was begun. If others are in flight,
  // false too if its memory is not there yet, or no descriptor is left for O_DIRECT: it can be
  // tried again when one of them has ended.
  bool begin(const Request& request, BounceArena& arena, bool others_in_flight, const BackendOptions& options,
             FaultPlan* faults);

  bool ended() const { return ended_; }
  bool is_write() const { return request_.direction == Direction::kWrite; }
  uint64_t length() const { return request_.length; }
  // The next call to issue, while it has not ended. Valid until the next call of this.
  const Step& next();
  // Its result: bytes moved, or a negative errno.
  void advance(int64_t result);
  // After the end: delivers the pieces, returns the memory to the arena.
  Completion finish();

 private:
  bool is_direct() const { return direct_fd_ >= 0; }
  bool take_window(bool others_in_flight);
  void leave_memory();
  void point_step_at_pieces(uint64_t end);
  void point_step_at(uint64_t offset, uint64_t end);
  void advance_read(uint64_t moved);
  void advance_write(uint64_t moved);
  void fall_back_to_buffered(const std::string& refused, int system_errno);
  void fail(Error error);
  uint64_t end() const { return request_.offset + request_.length; }

  Request request_;
  BounceArena* arena_ = nullptr;
  const BackendOptions* options_ = nullptr;
  FaultPlan* faults_ = nullptr;

  // Once this request goes through the page cache: -1. Asked of the file once: it answers -1 when
  // another request is refused, while this one has steps in flight on the descriptor.
  int direct_fd_ = -1;
  uint64_t alignment_ = 1;  // of the descriptor in use

  // The window is the range of the file that moves: for reads it contains the request, for direct
  // writes it is the aligned middle of it. It falls into three parts (any may be empty): a head in
  // bounce memory, a middle in the caller's own memory, a tail in bounce memory again. Memory that
  // lies like the file, modulo the alignment, thus needs a bounce for its two edges only.
  uint64_t window_begin_ = 0;
  uint64_t middle_begin_ = 0;
  uint64_t middle_end_ = 0;
  uint64_t window_end_ = 0;
  std::byte* bounce_ = nullptr;
  uint64_t bounce_bytes_ = 0;
  std::byte* tail_ = nullptr;

  uint64_t position_ = 0;            // in the file: what lies before it has been moved
  uint64_t idle_answers_ = 0;        // in a row without progress
  bool ended_ = false;
  Step step_;
  Completion completion_;
};

}  // namespace gdsdata
