#include "device/anonymous_memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "base/error.h"
#include "base/extent_math.h"
#include "base/file.h"
#include "base/mapping.h"
#include "tuning.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older C libraries do not define it
#endif

namespace gdsdata {

namespace {
constexpr size_t kPageBytes = 4096;
constexpr size_t kHugePageBytes = 2 << 20;
}  // namespace

AnonymousMemory::AnonymousMemory(size_t bytes) : size_bytes_(bytes) {
  const bool huge = bytes >= kHugePageBytes;
  const size_t alignment = huge ? kHugePageBytes : kPageBytes;
  mapped_bytes_ = align_up(std::max<size_t>(bytes, 1), alignment);
  const size_t reserved_bytes = mapped_bytes_ + (huge ? kHugePageBytes : 0);
  void* reserved = ::mmap(nullptr, reserved_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (reserved == MAP_FAILED) {
    throw Failure({ErrorCode::kDevice, "no memory for a buffer of " + std::to_string(bytes) +
                                           " bytes; use a smaller batch_size, prefetch or bounce_bytes"});
  }
  auto* begin = static_cast<std::byte*>(reserved);
  const auto address = reinterpret_cast<uintptr_t>(begin);
  data_ = begin + (align_up(address, alignment) - address);
  if (data_ != begin) ::munmap(begin, data_ - begin);
  std::byte* end = begin + reserved_bytes;
  if (data_ + mapped_bytes_ != end) ::munmap(data_ + mapped_bytes_, end - (data_ + mapped_bytes_));
  if (huge) ::madvise(data_, mapped_bytes_, MADV_HUGEPAGE);
}

AnonymousMemory::~AnonymousMemory() {
  if (hidden_by_ != 0 && hidden_by_ != process_id()) return;  // a child may have others at this address
  ::munmap(data_, mapped_bytes_);
}

void AnonymousMemory::prefer_node(int numa_node) {
  constexpr int kPreferred = 1;  // MPOL_PREFERRED of mbind(2)
  constexpr int kMaskBits = 64;
  if (numa_node < 0 || numa_node >= kMaskBits - 1) return;
  const unsigned long mask = 1UL << numa_node;
  ::syscall(SYS_mbind, data_, mapped_bytes_, kPreferred, &mask, kMaskBits, 0);
}

void AnonymousMemory::hide_from_children() {
  if (::madvise(data_, mapped_bytes_, MADV_DONTFORK) == 0) hidden_by_ = process_id();
}

bool populate_pages(std::byte* memory, size_t bytes) { return ::madvise(memory, bytes, MADV_POPULATE_WRITE) == 0; }

// Piece by piece, because no other thread can map memory until the call for a piece ends
// (docs/design-decisions.md). The fault of its first byte allocates a huge page, if the system has
// one, and others can map memory meanwhile.
void AnonymousMemory::populate() {
  for (size_t at = 0; at < mapped_bytes_; at += kHugePageBytes) {
    const size_t end = std::min(at + kHugePageBytes, mapped_bytes_);
    const_cast<volatile std::byte*>(data_)[at] = std::byte{0};
    if (populate_pages(data_ + at, end - at)) continue;
    for (size_t i = at; i < end; i += kPageBytes) const_cast<volatile std::byte*>(data_)[i] = std::byte{0};
  }
}

void touch(std::byte* memory, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t end = align_down(address + bytes, page_bytes());
  for (uintptr_t at = align_up(address, page_bytes()); at < end;) {
    const size_t count = std::min<size_t>(end - at, tuning::kTouchedAtOnceBytes);
    if (!populate_pages(reinterpret_cast<std::byte*>(at), count)) return;
    at += count;
  }
}

void prefer_huge_pages(std::byte* memory, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t begin = align_up(address, kHugePageBytes), end = align_down(address + bytes, kHugePageBytes);
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // if refused, single pages
}

}  // namespace gdsdata
