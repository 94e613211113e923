// The files of a cache folder: how they are named, opened, counted and evicted.
//
//   FOLDER/cache.state              the block size, and what is in use (CacheTotals)
//   FOLDER/cache.claims             empty; locks on its bytes claim blocks
//   FOLDER/objects/ab/HASH.data     a sparse file of the object's size
//   FOLDER/objects/ab/HASH.map      which of its blocks are there (BlockMap)
//   FOLDER/objects/ab/HASH.json     what it is, for people
//
// Nothing else is created, and nothing else is removed. No name comes from a server, and symbolic
// links are not followed.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/block_map.h"
#include "base/cache_totals.h"
#include "base/descriptors.h"
#include "base/file_lock.h"

namespace gdsdata {

struct CachedObjectSummary {
  std::string name;       // in the folder
  std::string about;      // JSON: location, tag and size
  uint64_t size_bytes = 0;
  uint64_t held_bytes = 0;
  int64_t last_use_ns = 0;  // since 1970
  bool is_in_use = false;
};

// Thread-safe. Belongs to one process.
class CacheFolder {
 public:
  // `claims`: a descriptor of cache.claims, which outlives this. Throws Failure.
  CacheFolder(std::string path, Descriptor folder, int claims, unsigned shift, uint32_t boot);

  const std::string& path() const { return path_; }
  unsigned shift() const { return totals_.shift(); }
  uint32_t boot() const { return boot_; }
  CacheTotals& totals() { return totals_; }
  const CacheTotals& totals() const { return totals_; }
  void set_most_bytes(uint64_t most_bytes);
  uint64_t most_bytes() const { return most_bytes_; }

  static constexpr int kNoRoom = -1;  // within the bound
  // The files of an object that is in use as long as `data` is open.
  struct Opened {
    Descriptor data;
    std::unique_ptr<BlockMap> map;
    BlockGeometry geometry;
    int error = 0;  // errno or kNoRoom, if `map` is null
  };
  // Creates what is missing.
  Opened open_object(const std::string& name, uint64_t size_bytes, const std::string& about);
  // Only if it is complete.
  Opened open_existing(const std::string& name);
  std::string data_path(const std::string& name) const;

  // Reserves bytes within the bound, and evicts objects for that. They are unsettled then.
  bool reserve(uint64_t bytes);
  // Evicts the object that was used longest ago, of those that are not in use. Returns false if
  // there is none, or if another process evicts right now.
  bool evict_oldest();
  // Returns false if it is in use or does not exist.
  bool evict(const std::string& name);
  std::vector<CachedObjectSummary> list() const;

  // An object of this process is no longer in use.
  void note_unused() { has_unused_ = true; }

  // Claims are locks of the process: those of a forked child are its own, and its parent's end with
  // the parent.
  Lock claim(uint64_t byte) const { return lock_process(claims_, F_WRLCK, byte); }
  void release_claim(uint64_t byte) const { lock_process(claims_, F_UNLCK, byte); }

  std::atomic<uint64_t> evicted_objects{0}, evicted_bytes{0};  // by this process

 private:
  struct Candidate {
    int64_t last_use_ns;
    std::string name;
  };
  static constexpr int64_t kAnyUse = -1;
  Descriptor open_subfolder(const std::string& name, bool create) const;
  Opened open_complete(int subfolder, const std::string& name, uint64_t size_bytes) const;
  Opened create_object(int subfolder, const std::string& name, uint64_t size_bytes, const std::string& about);
  int fill_new(int subfolder, const std::string& name, const Opened& object, const std::string& about);
  // Returns 0, or errno if there may be more objects.
  int for_each_object(const std::function<void(int subfolder, const std::string& name)>& visit) const;
  bool evict_if_unused(const std::string& name, int64_t last_use_ns);
  bool find_candidates();
  void recount();
  int repair(int subfolder, const std::string& name, uint64_t& used_bytes) const;

  const std::string path_;
  const Descriptor folder_;
  Descriptor objects_;
  const int claims_;
  const uint32_t boot_;
  std::atomic<uint64_t> most_bytes_{UINT64_MAX};
  CacheTotals totals_;
  std::mutex evicting_;                 // guards the next two
  std::vector<Candidate> candidates_;   // the one used longest ago is the last
  std::chrono::steady_clock::time_point nothing_before_{};  // there was nothing to evict
  std::atomic<bool> has_unused_{false};                     // since then; not noted there yet
};

}  // namespace gdsdata
