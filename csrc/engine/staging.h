// Pinned memory of one worker, for bytes between storage and a device that the processor cannot
// write. Its layout lets disks write to it without a bounce, and needs few copies to the device. It
// is allocated when it is needed, and only a part for short segments. Pinning takes milliseconds,
// in which the driver serves no other thread.
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
    bool owns_pages = false;  // no page of its transfers has other bytes
  };
  // The memory of one segment.
  struct Place {
    std::byte* memory = nullptr;
    uint64_t bytes = 0;
    std::vector<Run> runs;
    // Returns true if the pages of this piece have no other bytes.
    bool has_pages_of(const Piece& piece) const;
    bool holds(const std::byte* address) const { return address >= memory && address < memory + bytes; }
  };

  // If transfers of so many bytes in all are contiguous in file and device, they lie on pages as
  // they do in the file. Storage then writes them without a bounce. An exception is a page that two
  // such runs share, if one copy is to move both. Shorter ones are packed as on the device.
  static constexpr uint64_t kPagedBytes = tuning::kPagedBytes;

  // The most memory that a segment with `segment_bytes` in its transfers needs.
  static constexpr uint64_t most_bytes(uint64_t segment_bytes) {
    return segment_bytes + segment_bytes / 4 + (64 << 10);
  }

  // Segments that fit use only so much memory, if that is less than all, until it is full or a
  // longer segment comes.
  static constexpr uint64_t kFirstBytes =
      tuning::kShortReadBytes + tuning::kShortReadBytes / 4 + (64 << 10);  // most_bytes
  static constexpr uint64_t taken_at_most(uint64_t bytes) { return bytes + (bytes > kFirstBytes ? kFirstBytes : 0); }

  // Allocates at most taken_at_most(bytes).
  Staging(Device& device, uint64_t bytes) : device_(device), bytes_(bytes) {}

  // Changes the transfers' memory from the device's to staging memory. If there is no room, changes
  // nothing and returns false. Throws Failure if no memory can be allocated.
  bool place(std::span<Transfer> transfers, Place& place);
  void release(Place& place);

  void take_all();
  // Each allocated span, oldest first.
  const std::vector<std::span<std::byte>>& memory() const { return memory_; }

 private:
  std::byte* take(uint64_t bytes);
  std::unique_ptr<BounceArena> make_arena(uint64_t bytes);

  Device& device_;
  const uint64_t bytes_;
  std::unique_ptr<BounceArena> first_, all_;
  std::vector<std::span<std::byte>> memory_;
  std::vector<uint64_t> at_, run_at_;  // scratch: offsets of transfers and runs in the place
};

}  // namespace gdsdata
