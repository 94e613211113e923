// The cache of blocks: what it holds is right, whatever happens to its processes.
#include "base/block_cache.h"

#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <thread>

#include "base/fallbacks.h"
#include "base/sha256.h"
#include "testing.h"

namespace gdsdata::testing {
namespace {

using Claim = CachedObject::Claim;
constexpr uint64_t kBlock = BlockCache::kLeastBlockBytes;
constexpr uint64_t kPlenty = 1 << 30;
constexpr uint64_t kOverhead = 8192;  // of an object with few blocks
constexpr uint32_t kBoot = 1000;

std::span<const std::byte> block_of(const Bytes& content, size_t block) {
  const size_t begin = block * kBlock;
  return std::span(content).subspan(begin, std::min<size_t>(kBlock, content.size() - begin));
}

Bytes read_range(const CachedObject& object, uint64_t offset, size_t length) {
  Bytes bytes(length);
  EXPECT_EQ(::pread(object.descriptor(), bytes.data(), length, static_cast<off_t>(offset)),
            static_cast<ssize_t>(length));
  return bytes;
}

bool holds_block(const CachedObject& object, const Bytes& content, size_t block) {
  return object.holds(block * kBlock, block_of(content, block).size());
}

// Every block that it holds has the bytes of `content`. Returns how many it holds.
size_t check_held(const CachedObject& object, const Bytes& content) {
  size_t held = 0;
  for (size_t block = 0; block < object.block_count(); ++block) {
    if (!holds_block(object, content, block)) continue;
    const auto expected = block_of(content, block);
    EXPECT_TRUE(std::ranges::equal(read_range(object, block * kBlock, expected.size()), expected)) << block;
    ++held;
  }
  return held;
}

bool keep(CachedObject& object, const Bytes& content, size_t block) {
  return object.claim(block) == Claim::kClaimed && object.fill(block, block_of(content, block));
}

size_t keep_all(CachedObject& object, const Bytes& content) {
  size_t kept = 0;
  for (size_t block = 0; block < object.block_count(); ++block) kept += keep(object, content, block) ? 1 : 0;
  return kept;
}

// Runs in a forked child. Returns its exit status, or -1 if a signal ended it.
int in_child(const std::function<void()>& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    work();
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

uint64_t disk_bytes(const std::string& folder) {
  uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder + "/objects")) {
    struct stat status{};
    if (entry.is_regular_file() && ::lstat(entry.path().c_str(), &status) == 0) {
      bytes += static_cast<uint64_t>(status.st_blocks) * 512;
    }
  }
  return bytes;
}

class BlockCacheTest : public ::testing::Test {
 protected:
  std::shared_ptr<BlockCache> open(uint64_t most_bytes = kPlenty, uint32_t boot = kBoot) const {
    return BlockCache::open(path_, most_bytes, kBlock, boot);
  }
  static std::shared_ptr<CachedObject> object(BlockCache& cache, const std::string& key, const Bytes& content) {
    return cache.object("s3://bucket/" + key, 1, content.size(), "\"tag\"");
  }

  const TemporaryFolder folder_;
  const std::string path_ = folder_.file("cache");
};

TEST(Sha256, HasTheDigestsOfTheStandard) {
  EXPECT_EQ(sha256_hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256_hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256_hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha256_hex(std::string(1000000, 'a'), 8), "cdc76e5c");
}

TEST_F(BlockCacheTest, ABlockIsThereOnceItWasFilled) {
  const Bytes content = random_bytes(3 * kBlock + 100, 1);
  const auto cache = open();
  const auto cached = object(*cache, "a", content);
  ASSERT_NE(cached, nullptr);
  EXPECT_EQ(cached->block_count(), 4U);
  EXPECT_EQ(read_file(cached->data_path()).size(), content.size());
  EXPECT_FALSE(cached->holds(0, 1));
  EXPECT_EQ(cached->claim(3), Claim::kClaimed);
  EXPECT_EQ(cached->claim(3), Claim::kElsewhere);
  EXPECT_FALSE(cached->holds(3 * kBlock, 100));
  EXPECT_TRUE(cached->fill(3, block_of(content, 3)));
  EXPECT_EQ(cached->claim(3), Claim::kPresent);
  EXPECT_TRUE(cached->holds(3 * kBlock, 100));
  EXPECT_FALSE(cached->holds(3 * kBlock, 101));
  EXPECT_FALSE(cached->holds(3 * kBlock - 1, 2));
  EXPECT_FALSE(cached->holds(UINT64_MAX, 2));
  EXPECT_TRUE(cached->holds(content.size(), 0));
  EXPECT_EQ(keep_all(*cached, content), 3U);
  EXPECT_TRUE(cached->holds(0, content.size()));
  EXPECT_EQ(read_file(cached->data_path()), content);
  EXPECT_EQ(cache->statistics().filled_bytes, content.size());
  EXPECT_EQ(cache->statistics().used_bytes, 3 * kBlock + 4096 + kOverhead);
  EXPECT_EQ(disk_bytes(path_), cache->statistics().used_bytes);
}

TEST_F(BlockCacheTest, AReleasedBlockCanBeClaimedAgain) {
  const Bytes content = random_bytes(2 * kBlock, 2);
  const auto cache = open();
  const auto cached = object(*cache, "a", content);
  EXPECT_EQ(cached->claim(1), Claim::kClaimed);
  cached->release(1);
  cached->release(1);
  EXPECT_FALSE(cached->fill(1, block_of(content, 1)));
  EXPECT_EQ(cache->statistics().used_bytes, kOverhead);
  EXPECT_EQ(cached->claim(1), Claim::kClaimed);
  EXPECT_FALSE(cached->fill(1, block_of(content, 1).first(10)));
  EXPECT_EQ(cached->claim(2), Claim::kNoRoom);
  EXPECT_TRUE(keep(*cached, content, 1));
}

TEST_F(BlockCacheTest, AnObjectOfAnotherVersionIsAnotherOne) {
  const Bytes content = random_bytes(kBlock, 3);
  const auto cache = open();
  const auto first = cache->object("s3://bucket/a", 1, kBlock, "");
  EXPECT_TRUE(keep(*first, content, 0));
  EXPECT_FALSE(cache->object("s3://bucket/a", 2, kBlock, "")->holds(0, kBlock));
  EXPECT_FALSE(cache->object("s3://bucket/a", 1, kBlock + 1, "")->holds(0, kBlock));
  EXPECT_FALSE(cache->object("s3://bucket/b", 1, kBlock, "")->holds(0, kBlock));
  EXPECT_EQ(cache->object("s3://bucket/a", 1, kBlock, ""), first);
}

TEST_F(BlockCacheTest, AnotherProcessFindsTheBlocks) {
  const Bytes content = random_bytes(2 * kBlock + 5, 4);
  EXPECT_EQ(in_child([&] { EXPECT_EQ(keep_all(*object(*open(), "a", content), content), 3U); }), 0);
  const auto cached = object(*open(), "a", content);
  EXPECT_EQ(check_held(*cached, content), 3U);
}

TEST_F(BlockCacheTest, AFolderKeepsItsBlockSize) {
  {
    const auto cache = open();
  }
  const auto cache = BlockCache::open(path_, kPlenty, 4 * kBlock);
  EXPECT_EQ(cache->statistics().block_bytes, kBlock);
}

TEST_F(BlockCacheTest, AFolderThatCannotBeUsedIsAnError) {
  EXPECT_EQ(error_of([&] { BlockCache::open(path_, kPlenty, 3 * kBlock); }).code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(error_of([&] { BlockCache::open(path_, kPlenty, kBlock / 2); }).code, ErrorCode::kInvalidArgument);
  folder_.write("file", random_bytes(10, 1));
  EXPECT_EQ(error_of([&] { BlockCache::open(folder_.file("file"), kPlenty, kBlock); }).code, ErrorCode::kIo);
  std::filesystem::create_directories(path_);
  folder_.write("cache/cache.state", random_bytes(8192, 1));
  EXPECT_EQ(error_of([&] { open(); }).code, ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace gdsdata::testing
