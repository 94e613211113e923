// Serving from the page cache, on any thread.
#include "backend/page_cache.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "testing.h"

namespace gdsdata::testing {
namespace {

long major_faults() {
  rusage usage{};
  ::getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_majflt;
}

// Touches pages that are only on the disk. Returns false if the file system is in memory.
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

// The guest serves on the thread of any waiting caller.
TEST(PageCache, CountsThePageFaultsOfItsOwnCopiesWhicheverThreadServes) {
  constexpr uint64_t kBytes = 4 << 20, kLength = 4096;
  const TemporaryFolder folder;
  const Bytes content = random_bytes(kBytes, 1);
  const auto file = File::open_for_reading(folder.write("a", content));
  const std::string other = folder.write("b", random_bytes(kBytes, 2));
  PageCache cache{PageCache::Into::kResult};
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
  long of_first = 0;
  // On a new thread, because one that ran other tests may have more faults than `other` causes.
  std::thread([&] {
    serve();
    of_first = major_faults();
  }).join();
  ASSERT_TRUE(file->mapping()->region_known_resident(0));
  bool has_faulted = false;
  std::thread([&] {
    has_faulted = fault_in(other, of_first + 1);
    if (has_faulted) serve();
  }).join();
  if (!has_faulted) GTEST_SKIP() << "nothing leaves the page cache of " << other;
  EXPECT_TRUE(file->mapping()->region_known_resident(0)) << "faults of other work were taken for this one's";
}

// A file of 64 KiB for short transfers.
class SmallFile : public ::testing::Test {
 protected:
  static constexpr uint64_t kPage = 4096, kBytes = 16 * kPage;

  void open(Bytes bytes) {
    content = std::move(bytes);
    path = folder.write("a", content);
    file = File::open_for_reading(path);
  }
  std::optional<Error> serve(uint64_t offset, uint64_t length) {
    memory.assign(length, std::byte{1});
    const Transfer transfer{0, offset, length, memory.data()};
    File* files[] = {file.get()};
    std::vector<Transfer> left;
    RouteBytes bytes;
    auto error = cache.serve({&transfer, 1}, files, Conversion::kNone, false, left, bytes);
    EXPECT_TRUE(error || left.empty());
    return error;
  }
  bool served(uint64_t offset, uint64_t length) {
    return !serve(offset, length) && std::memcmp(memory.data(), content.data() + offset, length) == 0;
  }
  bool is_mapped() const {
    std::ifstream maps("/proc/self/maps");
    const std::string all{std::istreambuf_iterator<char>(maps), {}};
    return all.find(path) != std::string::npos;
  }
  void map() {
    while (!is_mapped()) ASSERT_TRUE(served(0, 512));
  }

  const TemporaryFolder folder;
  PageCache cache{PageCache::Into::kResult};
  Bytes content, memory;
  std::string path;
  std::shared_ptr<File> file;
};

TEST_F(SmallFile, IsMappedAtItsSecondReadBecauseMappingCostsMoreThanOne) {
  open(random_bytes(kBytes, 3));
  EXPECT_TRUE(served(100, 2000));
  EXPECT_FALSE(is_mapped());
  EXPECT_TRUE(served(5000, 2000));
  EXPECT_TRUE(is_mapped());
  EXPECT_TRUE(served(kBytes - 2000, 2000));
}

TEST_F(SmallFile, TruncatedAnywhereWithinATransferIsAnErrorWhateverItsBytesAre) {
  constexpr uint64_t kOffset = 3 * kPage - 100, kLength = 2 * kPage;
  for (const std::byte value : {std::byte{0}, std::byte{7}}) {
    for (const uint64_t end : {uint64_t{0}, kOffset + 1, 3 * kPage, 4 * kPage, 4 * kPage + 1, kOffset + kLength - 1}) {
      open(Bytes(kBytes, value));
      map();
      ASSERT_TRUE(served(kOffset, kLength));
      ASSERT_EQ(::truncate(path.c_str(), static_cast<off_t>(end)), 0);
      if (value == std::byte{0} && end > 4 * kPage) {
        EXPECT_TRUE(served(kOffset, kLength)) << "zeros of the last page are missing, which the copy has";
        continue;
      }
      const auto error = serve(kOffset, kLength);
      ASSERT_TRUE(error) << "no error for bytes of value " << static_cast<int>(value) << ", truncated at " << end;
      EXPECT_EQ(error->code, ErrorCode::kCorrupt);
      EXPECT_TRUE(end == 0 || served(0, std::min(end, kOffset))) << "bytes before the end cannot be read";
    }
  }
}

TEST_F(SmallFile, WhosePagesEndInZeroIsAskedForItsSizeOnce) {
  constexpr uint64_t kZeros = 3;
  Bytes content = random_bytes(kBytes, 4);
  for (uint64_t page = kPage; page <= kBytes; page += kPage) {
    content[page - kZeros - 1] = std::byte{7};
    std::fill_n(content.begin() + static_cast<ptrdiff_t>(page - kZeros), kZeros, std::byte{0});
  }
  open(std::move(content));
  map();
  const PageTails& tails = file->mapping()->tails();
  EXPECT_FALSE(tails.show_whole(kPage - 1));
  ASSERT_TRUE(served(0, kPage));
  for (uint64_t page = kPage; page <= kBytes; page += kPage) EXPECT_TRUE(tails.show_whole(page - 1)) << page;
  ASSERT_EQ(::truncate(path.c_str(), 2 * kPage - kZeros), 0);
  EXPECT_TRUE(served(0, 2 * kPage)) << "it has lost zeros, which the copy has";
  EXPECT_TRUE(serve(kPage, 2 * kPage));
  ASSERT_EQ(::truncate(path.c_str(), 2 * kPage - kZeros - 1), 0);
  EXPECT_TRUE(serve(0, 2 * kPage));
}

TEST_F(SmallFile, ThatGrewAgainIsAnErrorWhereZerosWereReadBefore) {
  open(Bytes(kBytes, std::byte{7}));
  map();
  ASSERT_EQ(::truncate(path.c_str(), kPage), 0);
  ASSERT_TRUE(serve(kPage, kPage));
  std::ofstream(path, std::ios::binary | std::ios::in).write(reinterpret_cast<const char*>(content.data()), kBytes);
  EXPECT_TRUE(serve(kPage, 2 * kPage)) << "its first page is still the zeros of before";
}

}  // namespace
}  // namespace gdsdata::testing
