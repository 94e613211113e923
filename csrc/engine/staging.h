// Where a segment's bytes stop over between storage and a device that the processor cannot write:
// pinned memory of one worker, laid out so that disks write into it without a bounce and few copies
// carry it on. It is taken when it is needed, and little of it for short segments: to pin it takes
// the driver milliseconds, in which no other thread gets anything of it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/bounce.h"
#include "base/types.h"
#include "device/device.h"
#include "tuning.h"

namespace gdsdata {

class Staging {
 public:
  struct Run {  // one copy
    std::byte* host = nullptr;
    std::byte* device = nullptr;
    uint64_t bytes = 0;
    bool owns_pages = false;  // each of its transfers' pages are nobody else's, in staging memory
  };
  // What one segment occupies.
  struct Place {
    std::byte* memory = nullptr;
    uint64_t bytes = 0;
    std::vector<Run> runs;
    // Whether nobody else's bytes are on its pages.
    bool has_pages_of(const Piece& piece) const;
    bool holds(const std::byte* address) const { return address >= memory && address < memory + bytes; }
  };

  // Transfers that follow one another in file and device over so many bytes lie on pages as they do
  // in the file: storage then writes them without a bounce, but for a page that two such stretches
  // share where one copy is to carry both. Shorter ones are packed as on the device.
  static constexpr uint64_t kPagedBytes = tuning::kPagedBytes;

  // Room that any segment with at most `segment_bytes` in its transfers takes at most.
  static constexpr uint64_t most_bytes(uint64_t segment_bytes) {
    return segment_bytes + segment_bytes / 4 + (64 << 10);
  }

  // Segments that fit share so much, where it is less than all, until it is full or a longer one
  // comes.
  static constexpr uint64_t kFirstBytes =
      tuning::kShortReadBytes + tuning::kShortReadBytes / 4 + (64 << 10);  // most_bytes
  static constexpr uint64_t taken_at_most(uint64_t bytes) { return bytes + (bytes > kFirstBytes ? kFirstBytes : 0); }

  // Takes taken_at_most(bytes) at most.
  Staging(Device& device, uint64_t bytes) : device_(device), bytes_(bytes) {}

  // Points the transfers, which point into device memory, at staging memory instead. False where
  // there is no room, and then nothing was changed. Throws Failure where memory is not to be had.
  bool place(std::span<Transfer> transfers, Place& place);
  void give_back(Place& place);

  void take_all();
  // Each piece of it, in the order in which they were taken.
  const std::vector<std::span<std::byte>>& memory() const { return memory_; }

 private:
  std::byte* take(uint64_t bytes);
  std::unique_ptr<BounceArena> make_arena(uint64_t bytes);

  Device& device_;
  const uint64_t bytes_;
  std::unique_ptr<BounceArena> first_, all_;
  std::vector<std::span<std::byte>> memory_;
  std::vector<uint64_t> at_, run_at_;  // scratch: where transfers and runs lie, from the place's begin
};

}  // namespace gdsdata
