// Files of an overlay: those of a container that lie in no volume.
#include <sys/mount.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <vector>

#include "backend/page_cache.h"
#include "testing.h"

namespace gdsdata::testing {
namespace {

class Overlay : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"lower", "upper", "work", "merged"}) std::filesystem::create_directory(folder.file(name));
    const std::string layers =
        "lowerdir=" + folder.file("lower") + ",upperdir=" + folder.file("upper") + ",workdir=" + folder.file("work");
    is_mounted = ::mount("overlay", folder.file("merged").c_str(), "overlay", 0, layers.c_str()) == 0;
    if (!is_mounted) GTEST_SKIP() << "no overlay can be mounted: " << std::strerror(errno);
    path = folder.write("merged/a", content);
    file = File::open_for_reading(path);
  }
  void TearDown() override {
    file.reset();
    if (!is_mounted) return;
    EXPECT_EQ(::seteuid(0), 0);
    EXPECT_EQ(::umount2(folder.file("merged").c_str(), MNT_DETACH), 0) << std::strerror(errno);
  }
  void be_nobody() { ASSERT_EQ(::seteuid(65534), 0); }
  uint64_t served(uint64_t offset, uint64_t length) {
    Bytes memory(length, std::byte{1});
    const Transfer transfer{0, offset, length, memory.data()};
    File* files[] = {file.get()};
    std::vector<Transfer> left;
    RouteBytes bytes;
    EXPECT_FALSE(cache.serve({&transfer, 1}, files, Conversion::kNone, false, left, bytes));
    const uint64_t copied = bytes[Route::kPageCache];
    EXPECT_EQ(std::memcmp(memory.data(), content.data() + offset, copied), 0);
    return copied;
  }

  const TemporaryFolder folder;
  const Bytes content = random_bytes(16 << 20, 1);
  std::string path;
  std::shared_ptr<File> file;
  PageCache cache{PageCache::Into::kResult};
  bool is_mounted = false;
};

TEST_F(Overlay, ThatHasAFileInMemoryServesItFromThere) {
  read_file(path);
  for (const uint64_t length : {uint64_t{1}, uint64_t{4096}, uint64_t{65'536}, uint64_t{3} << 20}) {
    EXPECT_EQ(served(12'345, length), length);
  }
}

TEST_F(Overlay, ThatHasAFileOnDiskLeavesItToTheBackend) {
  drop_from_page_cache(path);
  if (file->residency(0, content.size()) != File::Residency::kNone) GTEST_SKIP() << "it stays in memory";
  for (const uint64_t length : {uint64_t{1}, uint64_t{4096}, uint64_t{65'536}, uint64_t{3} << 20}) {
    EXPECT_EQ(served(12'345, length), 0);
  }
}

// Linux does not show their pages, and an overlay has no RWF_NOWAIT.
TEST_F(Overlay, ThatHasAFileOfAnotherUserServesWhatIsInMemory) {
  read_file(path);
  be_nobody();
  for (const uint64_t length : {uint64_t{1}, uint64_t{4096}, uint64_t{65'536}, uint64_t{200'000}, uint64_t{3} << 20}) {
    EXPECT_EQ(served(12'345, length), length);
  }
  EXPECT_TRUE(file->mapping()->region_known_resident(0));
  EXPECT_EQ(file->residency(content.size() + (1 << 30), 1), File::Residency::kNone) << "it ends before";
}

TEST_F(Overlay, ThatHasAFileOfAnotherUserOnDiskLeavesItToTheBackend) {
  drop_from_page_cache(path);
  if (file->residency(0, content.size()) != File::Residency::kNone) GTEST_SKIP() << "it stays in memory";
  file = File::open_for_reading(path);
  be_nobody();
  const long before = count_major_faults();
  constexpr int kTransfers = 160;
  uint64_t from_memory = 0;
  for (int i = 0; i < kTransfers; ++i) from_memory += served(static_cast<uint64_t>(i) * 100'000, 4096);
  EXPECT_EQ(from_memory, 0);
  EXPECT_EQ(served(5 << 20, 3 << 20), 0);
  EXPECT_EQ(served(9 << 20, 200'000), 0);
  EXPECT_LE(count_major_faults() - before, kTransfers / 8 + 3) << "each one waits for storage";
}

}  // namespace
}  // namespace gdsdata::testing
