// A cache of blocks of remote objects, in a folder that all processes of a machine share.
//
// A block that is there is an ordinary range of an ordinary file. It may be read by any means, as
// long as the CachedObject exists.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/block_map.h"
#include "base/cache_folder.h"
#include "base/descriptors.h"
#include "base/file.h"

namespace gdsdata {

class BlockCache;

struct BlockCacheStatistics {
  uint64_t used_bytes = 0;  // of all processes, with the files that say what is there
  uint64_t most_bytes = 0;  // 0: nobody has said it yet
  uint64_t block_bytes = 0;
  // By this process:
  uint64_t filled_blocks = 0, filled_bytes = 0;
  uint64_t evicted_objects = 0, evicted_bytes = 0;
  uint64_t damaged_blocks = 0;  // their checksum was wrong, and they are missing now
  uint64_t refused_blocks = 0;  // there was no room
};

// One object of one version. It is in use, and so not evicted, as long as it exists, in forked
// children too. Thread-safe. It has one descriptor.
//
// A forked child may read the blocks of its parent's object, and neither claims nor fills one. It
// gets an object of its own from BlockCache::object.
class CachedObject {
 public:
  ~CachedObject();
  CachedObject(const CachedObject&) = delete;
  CachedObject& operator=(const CachedObject&) = delete;

  const std::string& data_path() const { return data_path_; }  // sparse, of the object's size
  int descriptor() const { return data_.get(); }               // for reading and writing
  uint64_t size_bytes() const { return geometry_.size_bytes; }
  uint64_t block_bytes() const { return geometry_.block_bytes(); }
  size_t block_count() const { return geometry_.count(); }

  // True if every block of the range is there. A system call is not needed.
  bool holds(uint64_t offset, uint64_t length) const noexcept {
    if (offset > geometry_.size_bytes || length > geometry_.size_bytes - offset) return false;
    if (length == 0) return true;
    const auto last = static_cast<size_t>((offset + length - 1) >> geometry_.shift);
    for (auto block = static_cast<size_t>(offset >> geometry_.shift); block <= last; ++block) {
      if (!map_->is_of_boot(block, boot_)) return false;
    }
    return true;
  }

  // kPresent: it can be read. kClaimed: this caller fetches it, and ends with `fill` or `release`.
  // kElsewhere: another thread or process fetches it. kNoRoom: it can be fetched, but not kept.
  enum class Claim { kPresent, kClaimed, kElsewhere, kNoRoom };
  // Does not wait for others. It reads a block that another boot of the machine wrote, once, and
  // may evict objects to find room.
  Claim claim(size_t block);
  // Keeps a claimed block, and releases the claim. Returns false if it cannot be kept.
  bool fill(size_t block, std::span<const std::byte> bytes) noexcept;
  void release(size_t block) noexcept;

  // Compares the blocks that are there with their checksums. Wrong ones become missing.
  struct Verified {
    size_t right = 0, wrong = 0;
  };
  Verified verify();

 private:
  friend class BlockCache;
  CachedObject(std::shared_ptr<BlockCache> cache, const std::string& name, CacheFolder::Opened files);
  uint64_t claim_byte(size_t block) const;
  bool is_own() const;
  bool begin_claim(size_t block, Claim& otherwise);
  void end_claim(size_t block) noexcept;
  bool has_claim(size_t block) const;
  bool is_right(size_t block, BlockMap::Entry entry) const;
  void drop_wrong(size_t block);
  int write(size_t block, std::span<const std::byte> bytes);

  const std::shared_ptr<BlockCache> cache_;
  const std::string data_path_;
  const uint64_t claims_from_;  // random, but the same in all processes
  const Descriptor data_;
  const std::unique_ptr<BlockMap> map_;
  const BlockGeometry geometry_;
  const uint32_t boot_;
  const int64_t process_;
  mutable std::mutex mutex_;
  std::unordered_set<size_t> claimed_;  // by threads of this process; guarded by mutex_
};

// One folder. Thread-safe. All users in a process share one BlockCache.
class BlockCache : public std::enable_shared_from_this<BlockCache> {
 public:
  static constexpr uint64_t kLeastBlockBytes = 64 << 10, kMostBlockBytes = 64 << 20;

  // Throws Failure if the folder cannot be used. `block_bytes` is a power of two, and for a new
  // folder: others keep theirs. `most_bytes` replaces the bound that this process gave before, and
  // UINT64_MAX leaves it as it is. `boot`: for tests.
  static std::shared_ptr<BlockCache> open(const std::string& folder, uint64_t most_bytes, uint64_t block_bytes,
                                          uint32_t boot = this_boot());

  // Opens or creates an object. Null if it cannot be cached now, which is noted as a fallback.
  // `location` may have a query, which no file will have.
  std::shared_ptr<CachedObject> object(const std::string& location, int64_t version, uint64_t size_bytes,
                                       const std::string& tag);
  // The same, but notes nothing. Null: `error` says why, as that of CacheFolder::Opened.
  std::shared_ptr<CachedObject> try_object(const std::string& location, int64_t version, uint64_t size_bytes,
                                           const std::string& tag, int& error);
  void note_refusal(int error) const;

  const std::string& folder() const { return files_.path(); }
  BlockCacheStatistics statistics() const;

  // For `python -m gdsdata.cache`. Names are those of `list`.
  std::vector<CachedObjectSummary> list() const { return files_.list(); }
  std::shared_ptr<CachedObject> object_named(const std::string& name);  // null: none
  bool evict(const std::string& name) { return files_.evict(name); }    // false: in use, or none

 private:
  friend class CachedObject;
  BlockCache(std::string path, Descriptor folder, int claims, unsigned shift, uint32_t boot)
      : files_(std::move(path), std::move(folder), claims, shift, boot) {}
  std::shared_ptr<CachedObject> keep(const std::string& name, CacheFolder::Opened files);
  std::shared_ptr<CachedObject> find(const std::string& name) const;
  std::mutex& opening(const std::string& name);
  void note_full(int error) noexcept;
  bool is_full() const;

  CacheFolder files_;
  const int64_t process_ = process_id();
  // Held while an object is opened, so that a process has one object of a name. A thread that opens
  // many does not hold up those that need others.
  std::array<std::mutex, 64> opening_;
  mutable std::mutex mutex_;  // guards the next one
  std::unordered_map<std::string, std::weak_ptr<CachedObject>> objects_;
  std::atomic<int64_t> full_until_ns_{0};  // the disk was full
  std::atomic<uint64_t> filled_blocks_{0}, filled_bytes_{0}, damaged_blocks_{0}, refused_blocks_{0};
};

// The cache of this process's remote files, for files that are opened from now on. Null: none.
std::shared_ptr<BlockCache> active_cache();
void use_cache(std::shared_ptr<BlockCache> cache);

}  // namespace gdsdata
