#include "base/block_map.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>
#include <span>

#include "base/crc32.h"
#include "base/descriptors.h"
#include "base/file_range.h"

namespace gdsdata {

namespace {

static_assert(std::atomic<uint64_t>::is_always_lock_free, "other processes see the same entries");

constexpr uint64_t kPage = 4096;
// The file system notes where a range of a sparse file is. Size of struct ext4_extent.
constexpr uint64_t kExtentBytes = 12;
constexpr int kOpenFlags = O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;

uint64_t whole_pages(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Allocates a new file. On file systems without fallocate, writing the zeros does.
int allocate(int fd, uint64_t bytes) {
  if (const int error = allocate_range(fd, 0, bytes); error != 0) return error;
  struct stat status{};
  if (::fstat(fd, &status) != 0) return errno;
  const std::array<std::byte, kPage> zeros{};
  for (uint64_t at = static_cast<uint64_t>(status.st_size); at < bytes; at += zeros.size()) {
    const size_t length = std::min<uint64_t>(zeros.size(), bytes - at);
    if (const int error = write_range(fd, at, std::span(zeros).first(length)); error != 0) return error;
  }
  return 0;
}

// Opens a file of `bytes`. If it is no regular file of this size, errno is ENOENT.
Descriptor open_complete(int folder, const std::string& name, int access, uint64_t bytes) {
  Descriptor file(
      open_descriptor([&] { return ::openat(folder, name.c_str(), access | kOpenFlags); }, WhenTaken::kGiveUp));
  struct stat status{};
  if (file.get() < 0 || ::fstat(file.get(), &status) != 0) return {};
  if (S_ISREG(status.st_mode) && static_cast<uint64_t>(status.st_size) == bytes) return file;
  errno = ENOENT;
  return {};
}

}  // namespace

uint32_t this_boot() {
  static const uint32_t tag = [] {
    std::string id;
    std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), id);
    uint32_t found = crc32c(reinterpret_cast<const std::byte*>(id.data()), id.size());
    // Without an id, no process trusts the blocks of another one before it has compared them.
    if (id.empty() && ::getrandom(&found, sizeof found, 0) != sizeof found) found = static_cast<uint32_t>(::getpid());
    return std::max(found, uint32_t{1});
  }();
  return tag;
}

uint64_t BlockGeometry::length(size_t block) const { return std::min(block_bytes(), size_bytes - begin(block)); }

uint64_t BlockGeometry::bytes_of(HeldBlocks held) const {
  if (held.count == 0) return 0;
  return held.count * block_bytes() - (held.has_last ? block_bytes() - length(count() - 1) : 0);
}

uint64_t BlockGeometry::disk_bytes_of(size_t block) const { return whole_pages(length(block)); }

uint64_t BlockGeometry::disk_bytes_of(HeldBlocks held) const { return whole_pages(bytes_of(held)); }

uint64_t BlockGeometry::overhead_bytes() const {
  const uint64_t blocks = std::max<uint64_t>(count(), 1);
  return whole_pages(blocks * 8) + whole_pages(blocks * kExtentBytes) + kPage;
}

uint64_t BlockMap::file_bytes(size_t blocks) { return std::max<uint64_t>(blocks, 1) * sizeof(uint64_t); }

int BlockMap::create(int folder, const std::string& name, size_t blocks) {
  if (::unlinkat(folder, name.c_str(), 0) != 0 && errno != ENOENT) return errno;
  const auto open = [&] { return ::openat(folder, name.c_str(), O_RDWR | O_CREAT | O_EXCL | kOpenFlags, 0666); };
  const Descriptor file(open_descriptor(open, WhenTaken::kGiveUp));
  return file.get() < 0 ? errno : allocate(file.get(), file_bytes(blocks));
}

std::unique_ptr<BlockMap> BlockMap::open(int folder, const std::string& name, size_t blocks, int& error) {
  const uint64_t bytes = file_bytes(blocks);
  const Descriptor file = open_complete(folder, name, O_RDWR, bytes);
  void* const mapped =
      file.get() < 0 ? MAP_FAILED : ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (mapped == MAP_FAILED) {
    error = errno;
    return nullptr;
  }
  return std::unique_ptr<BlockMap>(new BlockMap(static_cast<std::atomic<uint64_t>*>(mapped), bytes));
}

BlockMap::~BlockMap() { ::munmap(entries_, bytes_); }

int BlockMap::count_held(int folder, const std::string& name, size_t blocks, HeldBlocks& held) {
  held = {};
  const Descriptor file = open_complete(folder, name, O_RDONLY, file_bytes(blocks));
  if (file.get() < 0) return errno;
  std::array<uint64_t, 1024> some{};
  for (size_t block = 0; block < blocks;) {
    const size_t wanted = std::min(some.size(), blocks - block);
    const ssize_t got =
        ::pread(file.get(), some.data(), wanted * sizeof(uint64_t), static_cast<off_t>(block * sizeof(uint64_t)));
    if (got < 0 && errno == EINTR) continue;
    if (got != static_cast<ssize_t>(wanted * sizeof(uint64_t))) return got < 0 ? errno : ENOENT;
    const auto missing = std::count(some.begin(), some.begin() + static_cast<ptrdiff_t>(wanted), 0U);
    held.count += wanted - static_cast<size_t>(missing);
    block += wanted;
    if (block == blocks) held.has_last = some[wanted - 1] != 0;
  }
  return 0;
}

}  // namespace gdsdata
