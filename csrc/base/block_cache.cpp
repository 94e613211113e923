#include "base/block_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <system_error>
#include <utility>

#include "base/crc32.h"
#include "base/error.h"
#include "base/fallbacks.h"
#include "base/file_range.h"
#include "base/per_process.h"
#include "base/sha256.h"
#include "base/url.h"
#include "tuning.h"

namespace gdsdata {

namespace {

constexpr const char* kClaims = "cache.claims";
constexpr size_t kNameDigits = 32;
constexpr size_t kMostLocationBytes = 4096, kMostTagBytes = 256;

using FileKey = std::pair<dev_t, ino_t>;  // of cache.claims

// The folders of this process.
struct Folders {
  std::mutex mutex;  // guards all
  // They stay open: closing any descriptor of the file would release all claims of the process.
  std::map<FileKey, Descriptor> claims;
  std::map<FileKey, std::weak_ptr<BlockCache>> caches;
};

Folders& folders() { return of_this_process<Folders>(); }

// Finds or creates cache.claims without opening it twice. The lock of `all` is held.
FileKey open_claims(Folders& all, int folder, const std::string& path) {
  while (true) {
    struct stat status{};
    const bool exists = ::fstatat(folder, kClaims, &status, AT_SYMLINK_NOFOLLOW) == 0;
    const FileKey key(status.st_dev, status.st_ino);
    if (exists && all.claims.contains(key)) return key;
    const int flags = O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | (exists ? 0 : O_CREAT | O_EXCL);
    Descriptor opened(open_descriptor([&] { return ::openat(folder, kClaims, flags, 0666); }));
    if (opened.get() < 0 && (errno == EEXIST || (exists && errno == ENOENT))) continue;
    if (opened.get() < 0 || ::fstat(opened.get(), &status) != 0) {
      throw Failure(system_error("open the cache's file", path + "/" + kClaims, errno));
    }
    return all.claims.emplace(FileKey(status.st_dev, status.st_ino), std::move(opened)).first->first;
  }
}

std::string in_json(std::string_view text) {
  std::string escaped = "\"";
  for (const char character : text) {
    const auto code = static_cast<unsigned char>(character);
    if (character == '"' || character == '\\') escaped += '\\';
    if (code >= 0x20 && code != 0x7f) {
      escaped += character;
      continue;
    }
    constexpr std::string_view kDigits = "0123456789abcdef";
    escaped += std::string("\\u00") + kDigits[code >> 4] + kDigits[code & 15];
  }
  return escaped + "\"";
}

std::string about(const std::string& location, const std::string& tag, uint64_t size_bytes) {
  return "{\"location\": " + in_json(shown_url(location).substr(0, kMostLocationBytes)) +
         ", \"tag\": " + in_json(tag.substr(0, kMostTagBytes)) + ", \"size_bytes\": " + std::to_string(size_bytes) +
         "}\n";
}

int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

std::string reason(int error) {
  if (error == CacheFolder::kNoRoom) return "its bound is reached, and every object is in use";
  if (error == EFBIG) return "an object is too large for it";
  return std::strerror(error);
}

}  // namespace

// --- BlockCache ----------------------------------------------------------------------------------

std::shared_ptr<BlockCache> BlockCache::open(const std::string& folder, uint64_t most_bytes, uint64_t block_bytes,
                                             uint32_t boot) {
  if (!std::has_single_bit(block_bytes) || block_bytes < kLeastBlockBytes || block_bytes > kMostBlockBytes) {
    throw Failure(
        {ErrorCode::kInvalidArgument, "a cache's blocks have a power of two of bytes, from 64 KiB to 64 MiB, and not " +
                                          std::to_string(block_bytes)});
  }
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw Failure(system_error("create the cache folder", folder, error.value()));
  const std::string path = std::filesystem::absolute(folder).lexically_normal().string();
  Descriptor opened(open_descriptor([&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
  if (opened.get() < 0) throw Failure(system_error("open the cache folder", path, errno));
  Folders& all = folders();
  std::lock_guard lock(all.mutex);
  const FileKey key = open_claims(all, opened.get(), path);
  std::shared_ptr<BlockCache> cache = all.caches[key].lock();
  if (cache == nullptr) {
    const auto shift = static_cast<unsigned>(std::countr_zero(block_bytes));
    cache.reset(new BlockCache(path, std::move(opened), all.claims.at(key).get(), shift, boot));
    all.caches[key] = cache;
  }
  if (most_bytes != UINT64_MAX) cache->files_.set_most_bytes(most_bytes);
  return cache;
}

std::shared_ptr<CachedObject> BlockCache::object(const std::string& location, int64_t version, uint64_t size_bytes,
                                                 const std::string& tag) {
  int error = 0;
  auto opened = try_object(location, version, size_bytes, tag, error);
  if (opened == nullptr) note_refusal(error);
  return opened;
}

void BlockCache::note_refusal(int error) const {
  note_fallback("the cache '" + folder() + "' did not take every object: " + reason(error));
}

std::shared_ptr<CachedObject> BlockCache::try_object(const std::string& location, int64_t version, uint64_t size_bytes,
                                                     const std::string& tag, int& error) {
  if (process_ != process_id()) {  // a forked child
    return open(folder(), files_.most_bytes(), uint64_t{1} << files_.shift(), files_.boot())
        ->try_object(location, version, size_bytes, tag, error);
  }
  std::string identity = unsigned_url(location);  // newly signed, it is the same object
  identity += '\0' + std::to_string(version) + '\0' + std::to_string(size_bytes);
  const std::string name = sha256_hex(identity, kNameDigits);
  std::lock_guard lock(opening(name));
  if (auto found = find(name)) return found;
  CacheFolder::Opened opened = files_.open_object(name, size_bytes, about(location, tag, size_bytes));
  if (opened.map != nullptr) return keep(name, std::move(opened));
  error = opened.error;
  return nullptr;
}

std::shared_ptr<CachedObject> BlockCache::object_named(const std::string& name) {
  std::lock_guard lock(opening(name));
  if (auto found = find(name)) return found;
  CacheFolder::Opened opened = files_.open_existing(name);
  return opened.map == nullptr ? nullptr : keep(name, std::move(opened));
}

std::mutex& BlockCache::opening(const std::string& name) {
  return opening_[std::hash<std::string>{}(name) % opening_.size()];
}

// Returns the object if this process uses it. The name's `opening` is held.
std::shared_ptr<CachedObject> BlockCache::find(const std::string& name) const {
  std::lock_guard lock(mutex_);
  const auto found = objects_.find(name);
  return found == objects_.end() ? nullptr : found->second.lock();
}

std::shared_ptr<CachedObject> BlockCache::keep(const std::string& name, CacheFolder::Opened files) {
  std::shared_ptr<CachedObject> object(new CachedObject(shared_from_this(), name, std::move(files)));
  std::lock_guard lock(mutex_);
  if (objects_.size() >= tuning::kCacheEntriesSwept && std::has_single_bit(objects_.size())) {
    std::erase_if(objects_, [](const auto& entry) { return entry.second.expired(); });
  }
  objects_[name] = object;
  return object;
}

BlockCacheStatistics BlockCache::statistics() const {
  return {files_.totals().used_bytes(),
          files_.totals().most_bytes(),
          uint64_t{1} << files_.shift(),
          filled_blocks_,
          filled_bytes_,
          files_.evicted_objects,
          files_.evicted_bytes,
          damaged_blocks_,
          refused_blocks_};
}

bool BlockCache::is_full() const { return full_until_ns_ != 0 && now_ns() < full_until_ns_; }

void BlockCache::note_full(int error) noexcept {
  full_until_ns_ = now_ns() + std::chrono::nanoseconds(tuning::kCacheLooksAgain).count();
  try {
    note_fallback("the cache '" + folder() + "' could not keep every block: " + reason(error));
  } catch (...) {  // no memory for the note
  }
}

// --- CachedObject --------------------------------------------------------------------------------

CachedObject::CachedObject(std::shared_ptr<BlockCache> cache, const std::string& name, CacheFolder::Opened files)
    : cache_(std::move(cache)),
      data_path_(cache_->files_.data_path(name)),
      claims_from_(std::stoull(name.substr(0, 16), nullptr, 16)),
      data_(std::move(files.data)),
      map_(std::move(files.map)),
      geometry_(files.geometry),
      boot_(cache_->files_.boot()),
      process_(process_id()) {}

CachedObject::~CachedObject() {
  if (!is_own()) return;
  const std::unordered_set<size_t> claimed = claimed_;
  for (const size_t block : claimed) release(block);
  cache_->files_.note_unused();
}

bool CachedObject::is_own() const { return process_ == process_id(); }

// Two blocks with the same byte would only wait for each other, and there are 2^61 bytes.
uint64_t CachedObject::claim_byte(size_t block) const {
  return (claims_from_ + block * 0x9E3779B97F4A7C15) % (kFirstLockByte - 1);
}

bool CachedObject::has_claim(size_t block) const {
  std::lock_guard lock(mutex_);
  return claimed_.contains(block);
}

// Claims a block that may be there. If another thread or process has it, says so in `otherwise`.
bool CachedObject::begin_claim(size_t block, Claim& otherwise) {
  otherwise = Claim::kElsewhere;
  {
    std::lock_guard lock(mutex_);
    if (!claimed_.insert(block).second) return false;
  }
  const Lock lock = cache_->files_.claim(claim_byte(block));
  if (lock == Lock::kTaken) return true;
  if (lock == Lock::kUnsupported) otherwise = Claim::kNoRoom;
  std::lock_guard guard(mutex_);
  claimed_.erase(block);
  return false;
}

void CachedObject::end_claim(size_t block) noexcept {
  cache_->files_.release_claim(claim_byte(block));  // first: then no thread has claimed it again
  std::lock_guard lock(mutex_);
  claimed_.erase(block);
}

bool CachedObject::is_right(size_t block, BlockMap::Entry entry) const {
  uint32_t checksum = 0;
  return checksum_range(data_.get(), geometry_.begin(block), geometry_.length(block), checksum) == 0 &&
         checksum == entry.checksum;
}

// A claimed block is missing from now on. Its space stays reserved, for the claim.
void CachedObject::drop_wrong(size_t block) {
  cache_->files_.totals().unsettle();
  map_->set(block, {});
  ++cache_->damaged_blocks_;
}

CachedObject::Claim CachedObject::claim(size_t block) {
  if (block >= block_count()) return Claim::kNoRoom;
  if (map_->is_of_boot(block, boot_)) return Claim::kPresent;
  Claim otherwise{};
  if (!is_own()) return Claim::kNoRoom;
  if (!begin_claim(block, otherwise)) return otherwise;
  try {
    const BlockMap::Entry entry = map_->entry(block);  // it may have been filled meanwhile
    if (entry.boot == boot_ || (entry.boot != 0 && is_right(block, entry))) {
      map_->set(block, {entry.checksum, boot_});
      end_claim(block);
      return Claim::kPresent;
    }
    if (entry.boot != 0) {
      drop_wrong(block);
      return Claim::kClaimed;
    }
    if (!cache_->is_full() && cache_->files_.reserve(geometry_.disk_bytes_of(block))) return Claim::kClaimed;
  } catch (...) {  // no memory for a buffer or a listing
  }
  ++cache_->refused_blocks_;
  end_claim(block);
  return Claim::kNoRoom;
}

int CachedObject::write(size_t block, std::span<const std::byte> bytes) {
  const uint64_t offset = geometry_.begin(block);
  int error = allocate_range(data_.get(), offset, bytes.size());
  if (error == ENOSPC && cache_->files_.evict_oldest()) error = allocate_range(data_.get(), offset, bytes.size());
  return error != 0 ? error : write_range(data_.get(), offset, bytes);
}

bool CachedObject::fill(size_t block, std::span<const std::byte> bytes) noexcept {
  if (!is_own() || !has_claim(block)) return false;
  if (bytes.size() != geometry_.length(block)) {
    release(block);
    return false;
  }
  int error = ENOMEM;
  try {
    error = write(block, bytes);
  } catch (...) {  // no memory for a listing
  }
  if (error != 0) {
    cache_->note_full(error);
    release(block);
    return false;
  }
  map_->set(block, {crc32c(bytes.data(), bytes.size()), boot_});
  cache_->files_.totals().settle();
  ++cache_->filled_blocks_;
  cache_->filled_bytes_ += bytes.size();
  end_claim(block);
  return true;
}

void CachedObject::release(size_t block) noexcept {
  if (!is_own() || !has_claim(block)) return;
  // It may have been written in part, or be a wrong one.
  free_range(data_.get(), geometry_.begin(block), geometry_.begin(block) + geometry_.length(block));
  cache_->files_.totals().subtract(geometry_.disk_bytes_of(block));
  cache_->files_.totals().settle();
  end_claim(block);
}

CachedObject::Verified CachedObject::verify() {
  Verified verified;
  Claim otherwise{};
  for (size_t block = 0; block < block_count(); ++block) {
    if (map_->entry(block).boot == 0 || !is_own() || !begin_claim(block, otherwise)) continue;
    const BlockMap::Entry entry = map_->entry(block);
    bool right = false;
    try {
      right = entry.boot != 0 && is_right(block, entry);
    } catch (...) {
      end_claim(block);
      throw;
    }
    if (entry.boot != 0 && !right) {
      ++verified.wrong;
      drop_wrong(block);
      release(block);
      continue;
    }
    if (right) {
      ++verified.right;
      map_->set(block, {entry.checksum, boot_});
    }
    end_claim(block);
  }
  return verified;
}

namespace {

struct Active {
  std::mutex mutex;  // guards the next one
  std::shared_ptr<BlockCache> cache;
};

}  // namespace

std::shared_ptr<BlockCache> active_cache() {
  Active& active = of_this_process<Active>();
  std::lock_guard lock(active.mutex);
  return active.cache;
}

void use_cache(std::shared_ptr<BlockCache> cache) {
  Active& active = of_this_process<Active>();
  std::lock_guard lock(active.mutex);
  active.cache = std::move(cache);
}

}  // namespace gdsdata
