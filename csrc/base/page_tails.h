// Knows how many zero bytes the pages of a mapped file end with.
//
// If a file is truncated while it is copied from its mapping, the kernel zeroes the rest of the
// page in which the file now ends, and unmaps all later pages. So a copy that does not end in a
// zero byte has lost nothing. If it does, its last page decides:
//   - A byte other than zero behind the copy's end shows that the page is whole up to there.
//   - A page that ends with as many zeros as when it was learned has lost zeros at most. The copy
//     has zeros there too, so it is right.
// Otherwise fstat says how long the file is. Most tokens of 16 bits end in zero, and with records
// of many files each one needs a call: an H200 had 50 GB/s of them without these calls, and 28 to
// 34 with them (1024 files).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace gdsdata {

class PageTails {
 public:
  struct Tail {
    uint64_t page;   // its number
    uint64_t zeros;  // at its end, or at the end of the file
  };

  // The mapping has `size_bytes` at `data`.
  PageTails(const std::byte* data, uint64_t size_bytes);

  // Returns true if the page of the byte at `last` shows that it has lost nothing up to that byte.
  // It says nothing about a mapping that has lost pages.
  bool show_whole(uint64_t last) const;
  // Appends the tails of the pages with the bytes from `first` to `last`.
  void see(uint64_t first, uint64_t last, std::vector<Tail>& seen) const;
  // Learns tails that were seen before the file had `size_bytes`.
  void learn(std::span<const Tail> seen, uint64_t size_bytes);

 private:
  struct Free {
    void operator()(std::atomic<uint16_t>* memory) const;
  };
  uint64_t end_of(uint64_t page) const;
  uint64_t zeros_of(uint64_t page) const;

  const std::byte* data_;
  uint64_t size_bytes_;
  // For each page, the zeros at its end and one, or 0. Null if there was no memory.
  std::unique_ptr<std::atomic<uint16_t>[], Free> learned_;
};

}  // namespace gdsdata
