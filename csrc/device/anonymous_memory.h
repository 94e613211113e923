// Anonymous memory for buffers. It uses huge pages if it is long enough.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gdsdata {

class AnonymousMemory {
 public:
  // Page-aligned. If it has at least the size of a huge page, it is aligned to huge pages and
  // requests them. The first use of tens of megabytes then costs tens of page faults, not
  // thousands. Throws Failure (kDevice).
  explicit AnonymousMemory(size_t bytes);
  ~AnonymousMemory();
  AnonymousMemory(const AnonymousMemory&) = delete;
  AnonymousMemory& operator=(const AnonymousMemory&) = delete;

  std::byte* data() { return data_; }
  size_t size_bytes() const { return size_bytes_; }
  size_t mapped_bytes() const { return mapped_bytes_; }  // whole pages

  void prefer_node(int numa_node);  // call it before the memory is touched; only a hint
  void populate();                  // touches all pages now
  // A forked child does not get it. The kernel copies pinned pages during the fork, and gigabytes
  // of them would take seconds.
  void hide_from_children();

 private:
  size_t size_bytes_;
  size_t mapped_bytes_ = 0;
  std::byte* data_ = nullptr;
  int64_t hidden_by_ = 0;  // the process that has it, if its children do not
};

// Allocates these whole pages and keeps their contents. Returns true on success.
bool populate_pages(std::byte* memory, size_t bytes);

// The same for the whole pages of any memory, piece by piece. If the kernel has no such call, pages
// are allocated when they are first used.
void touch(std::byte* memory, size_t bytes);

// Requests huge pages for the part of `memory` that whole ones cover. Call it for any memory that
// is about to be written for the first time (docs/design-decisions.md).
void prefer_huge_pages(std::byte* memory, size_t bytes);

}  // namespace gdsdata
