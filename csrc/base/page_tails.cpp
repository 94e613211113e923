#include "base/page_tails.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "base/mapping.h"

namespace gdsdata {

// The system hands out memory of zeros when it is touched, so pages that are never learned cost
// nothing.
PageTails::PageTails(const std::byte* data, uint64_t size_bytes)
    : data_(data),
      size_bytes_(size_bytes),
      learned_(static_cast<std::atomic<uint16_t>*>(
          std::calloc((size_bytes + page_bytes() - 1) / page_bytes(), sizeof(std::atomic<uint16_t>)))) {}

void PageTails::Free::operator()(std::atomic<uint16_t>* memory) const { std::free(memory); }

uint64_t PageTails::end_of(uint64_t page) const { return std::min((page + 1) * page_bytes(), size_bytes_); }

uint64_t PageTails::zeros_of(uint64_t page) const {
  const std::byte* begin = data_ + page * page_bytes();
  const std::byte* end = data_ + end_of(page);
  const std::byte* at = end;
  std::atomic_thread_fence(std::memory_order_acquire);  // what is read below is as it is now
  for (uint64_t word = 0; at - begin >= static_cast<ptrdiff_t>(sizeof(word)); at -= sizeof(word)) {
    std::memcpy(&word, at - sizeof(word), sizeof(word));
    if (word != 0) break;
  }
  while (at > begin && *static_cast<const volatile std::byte*>(at - 1) == std::byte{0}) --at;
  return static_cast<uint64_t>(end - at);
}

bool PageTails::show_whole(uint64_t last) const {
  const uint64_t page = last / page_bytes();
  const uint64_t zeros = zeros_of(page);
  if (end_of(page) - zeros > last) return true;
  return learned_ != nullptr && learned_[page].load(std::memory_order_relaxed) == zeros + 1;
}

void PageTails::see(uint64_t first, uint64_t last, std::vector<Tail>& seen) const {
  for (uint64_t page = first / page_bytes(); page <= last / page_bytes(); ++page) {
    seen.push_back({page, zeros_of(page)});
  }
}

void PageTails::learn(std::span<const Tail> seen, uint64_t size_bytes) {
  if (learned_ == nullptr) return;
  for (const Tail& tail : seen) {
    // A page of 64 KiB may have more zeros than are noted.
    if (end_of(tail.page) > size_bytes || tail.zeros >= UINT16_MAX) continue;
    learned_[tail.page].store(static_cast<uint16_t>(tail.zeros + 1), std::memory_order_relaxed);
  }
}

}  // namespace gdsdata
