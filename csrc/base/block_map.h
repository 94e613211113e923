// Which blocks of a cached object are there: a mapped file with 8 bytes a block.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace gdsdata {

// A number that differs from boot to boot of the machine, and is never 0. All processes have the
// same one, unless the system does not say which boot this is.
uint32_t this_boot();

// How many blocks of an object are there, and whether the last one, which may be short, is.
struct HeldBlocks {
  size_t count = 0;
  bool has_last = false;
};

// How an object is divided.
struct BlockGeometry {
  uint64_t size_bytes = 0;
  unsigned shift = 0;  // a block has 2^shift bytes

  uint64_t block_bytes() const { return uint64_t{1} << shift; }
  size_t count() const { return static_cast<size_t>((size_bytes + block_bytes() - 1) >> shift); }
  uint64_t begin(size_t block) const { return uint64_t{block} << shift; }
  uint64_t length(size_t block) const;
  uint64_t bytes_of(HeldBlocks held) const;
  // The space on the disk, in whole pages.
  uint64_t disk_bytes_of(size_t block) const;
  uint64_t disk_bytes_of(HeldBlocks held) const;
  // The space without any block: of the map, of the name for people, and of the file system's list
  // of the data's ranges.
  uint64_t overhead_bytes() const;
};

// Thread-safe, also between processes.
class BlockMap {
 public:
  // CRC-32C of a block, and the boot in which it was written, or last compared with that. 0: it is
  // missing.
  struct Entry {
    uint32_t checksum = 0;
    uint32_t boot = 0;
  };

  // Creates the file `name` in `folder` with every block missing, and allocates it in full: a full
  // disk is an error here, and never SIGBUS later. Returns errno, or 0.
  static int create(int folder, const std::string& name, size_t blocks);
  // Returns null and sets `error`: ENOENT if there is no map for so many blocks.
  static std::unique_ptr<BlockMap> open(int folder, const std::string& name, size_t blocks, int& error);
  // Counts the blocks without mapping the file. Returns 0 or errno, ENOENT as `open` does.
  static int count_held(int folder, const std::string& name, size_t blocks, HeldBlocks& held);
  ~BlockMap();
  BlockMap(const BlockMap&) = delete;
  BlockMap& operator=(const BlockMap&) = delete;

  Entry entry(size_t block) const noexcept {
    const uint64_t both = entries_[block].load(std::memory_order_acquire);
    return {static_cast<uint32_t>(both >> 32), static_cast<uint32_t>(both)};
  }
  // Makes visible, with the entry, what this thread wrote before.
  void set(size_t block, Entry entry) noexcept {
    entries_[block].store(uint64_t{entry.checksum} << 32 | entry.boot, std::memory_order_release);
  }
  bool is_of_boot(size_t block, uint32_t boot) const noexcept { return entry(block).boot == boot; }

 private:
  BlockMap(std::atomic<uint64_t>* entries, uint64_t bytes) : entries_(entries), bytes_(bytes) {}
  static uint64_t file_bytes(size_t blocks);

  std::atomic<uint64_t>* const entries_;
  const uint64_t bytes_;
};

}  // namespace gdsdata
