// What is served from the page cache, by whatever thread.
#include "backend/page_cache.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <thread>

#include "testing.h"

namespace gdsdata::testing {
namespace {

long major_faults() {
  rusage usage{};
  ::getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_majflt;
}

// Touches pages that are on the disk only; false where the file's system is memory.
bool fault_in(const std::string& path, long faults) {
  drop_from_page_cache(path);
  const auto file = File::open_for_reading(path);
  const Mapping& mapping = *file->mapping();
  const long before = major_faults();
  for (uint64_t at = 0; at < mapping.size_bytes() && major_faults() - before < faults; at += 1 << 16) {
    static_cast<void>(*const_cast<const volatile std::byte*>(mapping.data() + at));
  }
  return major_faults() - before >= faults;
}

// As the guest is, which serves on the thread of whoever waits.
TEST(PageCache, CountsThePageFaultsOfItsOwnCopiesWhicheverThreadServes) {
  constexpr uint64_t kBytes = 4 << 20, kLength = 4096;
  const TemporaryFolder folder;
  const Bytes content = random_bytes(kBytes, 1);
  const auto file = File::open_for_reading(folder.write("a", content));
  const std::string other = folder.write("b", random_bytes(kBytes, 2));
  PageCache cache;
  Bytes memory(kLength);
  const auto serve = [&] {
    const Transfer transfer{0, 0, kLength, memory.data()};
    File* files[] = {file.get()};
    std::vector<Transfer> left;
    RouteBytes bytes;
    EXPECT_FALSE(cache.serve({&transfer, 1}, files, Conversion::kNone, false, left, bytes));
    EXPECT_TRUE(left.empty());
    EXPECT_EQ(std::memcmp(memory.data(), content.data(), kLength), 0);
  };
  serve();
  ASSERT_TRUE(file->mapping()->region_known_resident(0));
  const long of_this_thread = major_faults();
  bool has_faulted = false;
  std::thread([&] {
    has_faulted = fault_in(other, of_this_thread + 1);
    if (has_faulted) serve();
  }).join();
  if (!has_faulted) GTEST_SKIP() << "nothing leaves the page cache of " << other;
  EXPECT_TRUE(file->mapping()->region_known_resident(0)) << "faults of other work were taken for this one's";
}

}  // namespace
}  // namespace gdsdata::testing
