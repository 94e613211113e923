// Anonymous memory for buffers: huge pages where it is long enough, and nothing behind it that
// outlives it.
#pragma once

#include <cstddef>

namespace gdsdata {

class AnonymousMemory {
 public:
  // Page-aligned. From one huge page on it is aligned to huge pages and asks for them: a batch of
  // tens of megabytes then costs tens of page faults at its first use, not thousands. Throws
  // Failure (kDevice).
  explicit AnonymousMemory(size_t bytes);
  ~AnonymousMemory();
  AnonymousMemory(const AnonymousMemory&) = delete;
  AnonymousMemory& operator=(const AnonymousMemory&) = delete;

  std::byte* data() { return data_; }
  size_t size_bytes() const { return size_bytes_; }
  size_t mapped_bytes() const { return mapped_bytes_; }  // whole pages

  void prefer_node(int numa_node);  // before it is touched; a wish, not a demand
  void populate();                  // touches all of it now

 private:
  size_t size_bytes_;
  size_t mapped_bytes_ = 0;
  std::byte* data_ = nullptr;
};

// Whether these whole pages are there now; what is in them stays.
bool populate_pages(std::byte* memory, size_t bytes);

// Of anybody's memory that is about to be written for the first time: the huge pages that lie in it
// as a whole, where the system has them to give (docs/design-decisions.md).
void prefer_huge_pages(std::byte* memory, size_t bytes);

}  // namespace gdsdata
