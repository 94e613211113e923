// Files of another user, whose pages in the page cache Linux does not show.
#include <sys/resource.h>
#include <unistd.h>

#include <cstring>
#include <optional>
#include <vector>

#include "backend/page_cache.h"
#include "base/page_residency.h"
#include "testing.h"

namespace gdsdata::testing {
namespace {

constexpr uid_t kNobody = 65534;
constexpr uint64_t kPage = 4096, kRegion = Mapping::kRegionBytes;

// Reads as nobody what belongs to root.
class HiddenPages : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can be another user";
    path = folder.write("a", content);
    drop_from_page_cache(path);
    file = File::open_for_reading(path);
    ASSERT_EQ(::seteuid(kNobody), 0);
  }
  void TearDown() override {
    if (::getuid() != 0) return;
    ASSERT_EQ(::seteuid(0), 0);
  }
  void warm() const {
    Bytes all(content.size());
    for (size_t done = 0; done < all.size();) {
      const ssize_t moved = ::pread(file->buffered(), all.data(), all.size() - done, static_cast<off_t>(done));
      ASSERT_GT(moved, 0);
      done += static_cast<size_t>(moved);
    }
  }

  // Returns the bytes that the page cache served. The rest is left.
  uint64_t served(uint64_t offset, uint64_t length, Conversion conversion = Conversion::kNone) {
    memory.assign(result_bytes(conversion, length), std::byte{1});
    const Transfer transfer{0, offset, length, memory.data()};
    File* files[] = {file.get()};
    std::vector<Transfer> left;
    RouteBytes bytes;
    EXPECT_FALSE(cache.serve({&transfer, 1}, files, conversion, false, left, bytes));
    uint64_t left_bytes = 0;
    for (const Transfer& one : left) left_bytes += one.length;
    EXPECT_EQ(bytes.total() + left_bytes, length);
    EXPECT_EQ(bytes[Route::kPageCache], bytes.total());
    return bytes.total();
  }
  bool serves_right(uint64_t offset, uint64_t length) {
    return served(offset, length) == length && std::memcmp(memory.data(), content.data() + offset, length) == 0;
  }
  bool is_shown() const { return pages_seen_by(file->buffered()) < PagesSeenBy::kReading; }
  static long major_faults() {
    rusage usage{};
    ::getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_majflt;
  }

  const TemporaryFolder folder;
  const Bytes content = random_bytes(16 << 20, 1);
  std::string path;
  std::shared_ptr<File> file;
  PageCache cache{PageCache::Into::kResult};
  Bytes memory;
};

TEST_F(HiddenPages, ThatAreNotInMemoryAreLeftToTheBackendAndNoPageFaultReadsThem) {
  const long before = major_faults();
  for (uint64_t offset = 0; offset < content.size(); offset += 2 * kRegion) {
    EXPECT_EQ(served(offset, kPage), 0) << offset;
  }
  for (uint64_t offset = kRegion; offset < content.size(); offset += 4 << 20) {
    EXPECT_EQ(served(offset, 2 << 20), 0) << offset;
  }
  EXPECT_EQ(served(3 * kRegion, 2 << 20, Conversion::kU16ToI64), 0);
  EXPECT_TRUE(file->hides_pages());
  EXPECT_EQ(major_faults(), before);
}

TEST_F(HiddenPages, ThatAreInMemoryAreCopied) {
  warm();
  for (const uint64_t length : {uint64_t{1}, kPage, kRegion, kRegion + 1, uint64_t{1} << 20, uint64_t{5} << 20}) {
    EXPECT_TRUE(serves_right(12'345, length)) << length;
  }
  EXPECT_TRUE(file->hides_pages());
  EXPECT_TRUE(file->mapping()->region_known_resident(0)) << "later short copies need no system call";
  EXPECT_TRUE(file->mapping()->region_known_resident(1));
  EXPECT_FALSE(file->mapping()->region_known_resident(200)) << "nobody has read it";
}

TEST_F(HiddenPages, ThatComeIntoMemoryAreFoundSoon) {
  for (uint64_t offset = 0; offset < content.size(); offset += kRegion) served(offset, kPage);
  warm();
  int misses = 0;
  for (uint64_t offset = 0; offset < content.size(); offset += kRegion) misses += serves_right(offset, kPage) ? 0 : 1;
  EXPECT_LE(misses, 8);
}

// To look reads a page each time, which a cold epoch should not pay for.
TEST_F(HiddenPages, ThatWereNotInMemoryAreNotLookedForEachTime) {
  for (uint64_t offset = 0; offset < content.size(); offset += kRegion) EXPECT_EQ(served(offset, kPage), 0);
  ASSERT_EQ(::seteuid(0), 0);
  EXPECT_LE(cached_pages(file->buffered(), PageRange(0, content.size())), content.size() / kRegion / 4);
}

TEST_F(HiddenPages, AreThoseOfFilesThatThisUserNeitherOwnsNorMayWrite) {
  EXPECT_FALSE(is_shown());
  ASSERT_EQ(::seteuid(0), 0);
  EXPECT_TRUE(is_shown());
  ASSERT_EQ(::chown(path.c_str(), kNobody, kNobody), 0);
  ASSERT_EQ(::seteuid(kNobody), 0);
  EXPECT_TRUE(is_shown());
}

}  // namespace
}  // namespace gdsdata::testing
