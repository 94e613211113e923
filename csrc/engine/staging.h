// Where a segment's bytes stop over between storage and a device that the processor cannot write: pinned memory of
// one worker, laid out so that disks write into it without a bounce and few copies carry it on.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/bounce.h"
#include "base/types.h"
#include "device/device.h"

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

  // Transfers that follow one another in file and device over so many bytes lie on pages as they do in the file:
  // storage then writes them without a bounce, but for a page that two such stretches share where one copy is to carry
  // both. Shorter ones are packed as on the device.
  static constexpr uint64_t kPagedBytes = 64 * 1024;

  // Room that any segment with at most `segment_bytes` in its transfers takes at most.
  static constexpr uint64_t most_bytes(uint64_t segment_bytes) {
    return segment_bytes + segment_bytes / 4 + (64 << 10);
  }

  Staging(Device& device, uint64_t bytes) : arena_(device, bytes) {}

  // Points the transfers, which point into device memory, at staging memory instead. False where there is no room,
  // and then nothing was changed.
  bool place(std::span<Transfer> transfers, Place& place);
  void give_back(Place& place);

  std::span<std::byte> memory() { return {arena_.data(), arena_.size_bytes()}; }

 private:
  BounceArena arena_;
  std::vector<uint64_t> at_, run_at_;  // scratch: where transfers and runs lie, from the place's begin
};

}  // namespace gdsdata
