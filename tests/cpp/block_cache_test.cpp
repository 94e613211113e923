// The cache of blocks: what it holds is right, whatever happens to its processes.
#include "base/block_cache.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <set>
#include <thread>

#include "base/fallbacks.h"
#include "base/file_lock.h"
#include "base/sha256.h"
#include "testing.h"

namespace gdsdata::testing {
namespace {

using Claim = CachedObject::Claim;
constexpr uint64_t kBlock = BlockCache::kLeastBlockBytes;
constexpr uint64_t kPlenty = 1 << 30;
constexpr uint64_t kOverhead = 3 * 4096;  // of an object with few blocks
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
  EXPECT_LE(disk_bytes(path_), cache->statistics().used_bytes);
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

// --- any order of operations ---------------------------------------------------------------------

struct ModelObject {
  std::string key;
  Bytes content;
  std::shared_ptr<CachedObject> opened;
  std::set<size_t> held, claimed;
};

class RandomOperations : public BlockCacheTest, public ::testing::WithParamInterface<uint64_t> {
 protected:
  void reopen(ModelObject& object) {
    object.opened = BlockCacheTest::object(*cache_, object.key, object.content);
    if (object.opened == nullptr) return;
    // It was evicted as a whole, or not at all.
    if (!object.held.empty() && !holds_block(*object.opened, object.content, *object.held.begin())) object.held.clear();
  }
  void claim(ModelObject& object, size_t block) {
    switch (object.opened->claim(block)) {
      case Claim::kPresent:
        EXPECT_TRUE(object.held.contains(block));
        break;
      case Claim::kClaimed:
        EXPECT_FALSE(object.held.contains(block) || object.claimed.contains(block));
        object.claimed.insert(block);
        break;
      case Claim::kElsewhere:
        EXPECT_TRUE(object.claimed.contains(block));
        break;
      case Claim::kNoRoom:
        EXPECT_GT(cache_->statistics().used_bytes + kBlock, kMost);
        break;
    }
  }
  void end_claim(ModelObject& object, bool fills) {
    if (object.claimed.empty()) return;
    const size_t block = *object.claimed.begin();
    object.claimed.erase(block);
    if (!fills) return object.opened->release(block);
    EXPECT_TRUE(object.opened->fill(block, block_of(object.content, block)));
    object.held.insert(block);
  }
  void close(ModelObject& object) {
    object.opened = nullptr;
    object.claimed.clear();
  }
  void check(const ModelObject& object) const {
    for (size_t block = 0; object.opened != nullptr && block < object.opened->block_count(); ++block) {
      EXPECT_EQ(holds_block(*object.opened, object.content, block), object.held.contains(block));
    }
  }

  static constexpr uint64_t kMost = 20 * kBlock;
  std::shared_ptr<BlockCache> cache_;
};

TEST_P(RandomOperations, AgreeWithAModel) {
  std::mt19937_64 random(GetParam());
  cache_ = open(kMost);
  std::vector<ModelObject> objects(6);
  for (size_t i = 0; i < objects.size(); ++i) {
    // All together have no room, whatever the seed. One is shorter than a block.
    const size_t size = i == 0 ? 1 + random() % kBlock : 4 * kBlock + 1 + random() % (3 * kBlock);
    objects[i] = {std::to_string(i), random_bytes(size, random()), nullptr, {}, {}};
  }
  for (int step = 0; step < 1500; ++step) {
    ModelObject& object = objects[random() % objects.size()];
    const uint64_t choice = random() % 20;
    if (object.opened == nullptr) {
      reopen(object);
    } else if (choice < 10) {
      claim(object, random() % object.opened->block_count());
    } else if (choice < 17) {
      end_claim(object, choice < 15);
    } else {
      close(object);
    }
    check(object);
    EXPECT_LE(disk_bytes(path_), cache_->statistics().used_bytes);
    EXPECT_LE(cache_->statistics().used_bytes, kMost);
    if (HasFailure()) FAIL() << "step " << step;
  }
  EXPECT_GT(cache_->statistics().evicted_objects, 0U);
  for (ModelObject& object : objects) {
    if (object.opened != nullptr) check_held(*object.opened, object.content);
    close(object);
  }
  // Each byte is free again once everything is evicted.
  for (const auto& summary : cache_->list()) EXPECT_TRUE(cache_->evict(summary.name));
  EXPECT_EQ(cache_->statistics().used_bytes, 0U);
  EXPECT_EQ(disk_bytes(path_), 0U);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomOperations, ::testing::Range<uint64_t>(0, 4));

// --- other boots of the machine ------------------------------------------------------------------

TEST_F(BlockCacheTest, BlocksOfAnotherBootAreComparedWithTheirChecksums) {
  const Bytes content = random_bytes(4 * kBlock + 10, 5);
  keep_all(*object(*open(), "a", content), content);
  const auto cache = open(kPlenty, kBoot + 1);
  const auto cached = object(*cache, "a", content);
  const uint64_t used = cache->statistics().used_bytes;
  EXPECT_EQ(check_held(*cached, content), 0U);
  const std::byte wrong{0};
  ASSERT_EQ(::pwrite(cached->descriptor(), &wrong, 1, static_cast<off_t>(kBlock + 7)), 1);
  ASSERT_EQ(::pwrite(cached->descriptor(), &wrong, 1, static_cast<off_t>(4 * kBlock)), 1);
  EXPECT_EQ(cached->claim(0), Claim::kPresent);
  EXPECT_TRUE(cached->holds(0, kBlock));
  EXPECT_EQ(cached->claim(1), Claim::kClaimed);
  EXPECT_FALSE(cached->holds(kBlock, 1));
  EXPECT_EQ(cache->statistics().used_bytes, used);
  EXPECT_TRUE(cached->fill(1, block_of(content, 1)));
  EXPECT_EQ(cached->claim(4), Claim::kClaimed);
  cached->release(4);
  EXPECT_EQ(cache->statistics().used_bytes, used - 4096);
  EXPECT_EQ(cached->claim(2), Claim::kPresent);
  EXPECT_EQ(cache->statistics().damaged_blocks, 2U);
  EXPECT_EQ(check_held(*cached, content), 3U);
}

TEST_F(BlockCacheTest, AfterACrashOfTheMachineTheSpaceIsCountedAgain) {
  const Bytes content = random_bytes(4 * kBlock, 6), other = random_bytes(kBlock, 7);
  std::string data, map;
  {
    const auto cache = open();
    keep_all(*object(*cache, "a", content), content);
    const auto second = object(*cache, "b", other);
    keep_all(*second, other);
    data = second->data_path();
    map = data.substr(0, data.size() - 5) + ".map";
  }
  std::filesystem::resize_file(map, 0);  // the content was lost
  const auto cache = open(kPlenty, kBoot + 1);
  EXPECT_EQ(cache->statistics().used_bytes, 4 * kBlock + kOverhead);
  EXPECT_FALSE(std::filesystem::exists(data));
  const auto second = object(*cache, "b", other);
  EXPECT_EQ(keep_all(*second, other), 1U);
  EXPECT_EQ(check_held(*second, other), 1U);
}

TEST_F(BlockCacheTest, WithTooFewDescriptorsTheSpaceIsNotCountedWrong) {
  const Bytes content = random_bytes(4 * kBlock, 6), other = random_bytes(kBlock, 7);
  {
    const auto cache = open();
    keep_all(*object(*cache, "a", content), content);
    keep_all(*object(*cache, "b", other), other);
  }
  size_t refused = 0;
  for (uint32_t left = 0; left < 16; ++left) {
    std::shared_ptr<BlockCache> cache;
    try {
      const DescriptorLimit limit(count_descriptors() + left);
      cache = open(kPlenty, kBoot + 1 + left);  // each boot counts again
    } catch (const Failure& failure) {
      EXPECT_EQ(failure.error().system_errno, EMFILE) << failure.error().message;
      ++refused;
      continue;
    }
    EXPECT_EQ(cache->statistics().used_bytes, 5 * kBlock + 2 * kOverhead) << "with " << left << " descriptors";
  }
  EXPECT_GT(refused, 0U);
  EXPECT_LT(refused, 8U);
}

TEST_F(BlockCacheTest, AWrongBlockIsFoundByAVerification) {
  const Bytes content = random_bytes(3 * kBlock, 8);
  const auto cache = open();
  const auto cached = object(*cache, "a", content);
  keep_all(*cached, content);
  const std::byte wrong{0};
  ASSERT_EQ(::pwrite(cached->descriptor(), &wrong, 1, static_cast<off_t>(2 * kBlock + 7)), 1);
  const auto verified = cache->object_named(cache->list().at(0).name)->verify();
  EXPECT_EQ(verified.right, 2U);
  EXPECT_EQ(verified.wrong, 1U);
  EXPECT_EQ(check_held(*cached, content), 2U);
  EXPECT_LE(disk_bytes(path_), cache->statistics().used_bytes);
}

// --- several processes ---------------------------------------------------------------------------

// Memory that forked children share.
template <typename T>
T* shared_array(size_t count) {
  return static_cast<T*>(::mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
}

void wait_for_children() {
  int status = 0;
  while (::waitpid(-1, &status, 0) > 0) EXPECT_EQ(status, 0);
}

TEST_F(BlockCacheTest, EachBlockIsFetchedOnceByRacingProcesses) {
  constexpr size_t kBlocks = 200;
  const Bytes content = random_bytes(kBlocks * kBlock, 9);
  auto* const fetched = shared_array<std::atomic<int>>(kBlocks);
  for (uint64_t child = 0; child < 4; ++child) {
    if (::fork() != 0) continue;
    const auto cached = object(*open(), "a", content);
    std::vector<size_t> order(kBlocks);
    for (size_t i = 0; i < kBlocks; ++i) order[i] = i;
    if (child % 2 == 0) std::shuffle(order.begin(), order.end(), std::mt19937_64(child));
    for (const size_t block : order) {
      Claim claim{};
      while ((claim = cached->claim(block)) == Claim::kElsewhere) std::this_thread::yield();
      if (claim != Claim::kClaimed) continue;
      ++fetched[block];
      EXPECT_TRUE(cached->fill(block, block_of(content, block)));
    }
    EXPECT_EQ(check_held(*cached, content), kBlocks);
    ::_exit(HasFailure() ? 1 : 0);
  }
  wait_for_children();
  EXPECT_EQ(std::count(fetched, fetched + kBlocks, 1), static_cast<ptrdiff_t>(kBlocks));
}

TEST_F(BlockCacheTest, EachBlockIsFetchedOnceByRacingThreads) {
  constexpr size_t kBlocks = 100;
  const Bytes content = random_bytes(kBlocks * kBlock, 10);
  const auto cache = open();
  std::array<std::atomic<int>, kBlocks> fetched{};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      const auto cached = object(*cache, "a", content);
      for (size_t block = 0; block < kBlocks; ++block) {
        Claim claim{};
        while ((claim = cached->claim(block)) == Claim::kElsewhere) std::this_thread::yield();
        if (claim != Claim::kClaimed) continue;
        ++fetched[block];
        EXPECT_TRUE(cached->fill(block, block_of(content, block)));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::count(fetched.begin(), fetched.end(), 1), static_cast<ptrdiff_t>(kBlocks));
  EXPECT_EQ(check_held(*object(*cache, "a", content), content), kBlocks);
}

TEST_F(BlockCacheTest, AKillAtAnyMomentLeavesNoWrongBlock) {
  constexpr size_t kBlocks = 40;
  const std::array contents = {random_bytes(kBlocks * kBlock, 11), random_bytes(kBlocks * kBlock - 9, 12)};
  std::mt19937_64 random(13);
  size_t most_held = 0, counted_again = 0;
  for (int kill = 0; kill < 50; ++kill) {
    const uint64_t seed = random();
    const pid_t child = ::fork();
    if (child == 0) {
      std::mt19937_64 own(seed);
      const auto cache = open(70 * kBlock);
      while (true) {
        const size_t which = own() % 2;
        const auto cached = object(*cache, std::to_string(which), contents[which]);
        for (int i = 0; cached != nullptr && i < 20; ++i) keep(*cached, contents[which], own() % kBlocks);
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(500 + random() % 5000));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    const auto cache = open();
    uint64_t used = 0;
    for (size_t which = 0; which < 2; ++which) {
      const auto cached = object(*cache, std::to_string(which), contents[which]);
      const size_t held = check_held(*cached, contents[which]);
      most_held = std::max(most_held, held);
      used += held * kBlock + kOverhead;
      if (held < kBlocks) {
        size_t missing = 0;
        while (holds_block(*cached, contents[which], missing)) ++missing;
        EXPECT_EQ(cached->claim(missing), Claim::kClaimed);  // the kernel released it
      }
      if (random() % 8 == 0) cache->evict(cache->list().at(0).name);
    }
    counted_again += cache->statistics().used_bytes <= used + kBlock ? 1 : 0;
    // The file system may need one more page for the extents of each file.
    EXPECT_LE(disk_bytes(path_), cache->statistics().used_bytes + 2 * 4096);
  }
  EXPECT_GT(most_held, 5U);
  EXPECT_EQ(counted_again, 50U);
}

TEST_F(BlockCacheTest, SeveralProcessesKeepTheBound) {
  constexpr uint64_t kMost = 50 * kBlock;
  constexpr size_t kBlocks = 10;
  const Bytes content = random_bytes(kBlocks * kBlock, 14);
  for (uint64_t child = 0; child < 4; ++child) {
    if (::fork() != 0) continue;
    std::mt19937_64 random(child);
    const auto cache = open(kMost);
    for (int step = 0; step < 60; ++step) {
      const auto cached = object(*cache, std::to_string(random() % 12), content);
      if (cached == nullptr) continue;
      for (int i = 0; i < 8; ++i) keep(*cached, content, random() % kBlocks);
      EXPECT_LE(cache->statistics().used_bytes, kMost);
      check_held(*cached, content);
    }
    ::_exit(HasFailure() ? 1 : 0);
  }
  wait_for_children();
  const auto cache = open(kMost);
  uint64_t used = 0;
  for (const auto& summary : cache->list()) used += summary.held_bytes + kOverhead;
  EXPECT_EQ(cache->statistics().used_bytes, used);
  EXPECT_GT(used, kMost / 2);
  EXPECT_LE(disk_bytes(path_), used);
}

TEST_F(BlockCacheTest, AForkedChildReadsAndClaimsThroughAnObjectOfItsOwn) {
  const Bytes content = random_bytes(4 * kBlock, 15);
  const auto cache = open();
  const auto cached = object(*cache, "a", content);
  EXPECT_TRUE(keep(*cached, content, 0));
  EXPECT_EQ(cached->claim(1), Claim::kClaimed);
  EXPECT_EQ(in_child([&] {
              EXPECT_EQ(check_held(*cached, content), 1U);
              EXPECT_EQ(cached->claim(0), Claim::kPresent);
              EXPECT_EQ(cached->claim(2), Claim::kNoRoom);
              EXPECT_FALSE(cached->fill(1, block_of(content, 1)));
              cached->release(1);
              const auto own = object(*cache, "a", content);
              ASSERT_NE(own, nullptr);
              EXPECT_NE(own, cached);
              EXPECT_EQ(own->claim(1), Claim::kElsewhere);
              EXPECT_TRUE(keep(*own, content, 2));
            }),
            0);
  EXPECT_EQ(check_held(*cached, content), 2U);
  EXPECT_TRUE(cached->fill(1, block_of(content, 1)));
}

TEST_F(BlockCacheTest, AClaimEndsWithItsProcessEvenIfAForkedChildLivesOn) {
  const Bytes content = random_bytes(2 * kBlock, 16);
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe(pipe.data()), 0);
  in_child([&] {
    const auto cached = object(*open(), "a", content);
    EXPECT_EQ(cached->claim(0), Claim::kClaimed);
    if (::fork() != 0) ::_exit(0);
    ::close(pipe[1]);
    char end = 0;
    (void)!::read(pipe[0], &end, 1);  // until the test ends
    ::_exit(0);
  });
  const auto cache = open();
  EXPECT_TRUE(keep(*object(*cache, "a", content), content, 0));
  EXPECT_FALSE(cache->evict(cache->list().at(0).name));  // the child may still read it
  ::close(pipe[0]);
  ::close(pipe[1]);
}

// --- room ----------------------------------------------------------------------------------------

TEST_F(BlockCacheTest, ObjectsThatWereUsedLongestAgoAreEvictedFirst) {
  const Bytes content = random_bytes(4 * kBlock, 17);
  const auto cache = open(13 * kBlock);
  std::vector<std::string> paths;
  for (const char* key : {"a", "b", "c"}) {
    const auto cached = object(*cache, key, content);
    keep_all(*cached, content);
    paths.push_back(cached->data_path());
  }
  object(*cache, "a", content);  // used again
  const auto fourth = object(*cache, "d", content);
  EXPECT_EQ(keep_all(*fourth, content), 4U);
  EXPECT_TRUE(std::filesystem::exists(paths[0]));
  EXPECT_FALSE(std::filesystem::exists(paths[1]));
  EXPECT_TRUE(std::filesystem::exists(paths[2]));
  EXPECT_EQ(cache->statistics().evicted_objects, 1U);
}

TEST_F(BlockCacheTest, AnObjectThatIsSlowToOpenHoldsUpFewOthers) {
  const Bytes content = random_bytes(kBlock, 19);
  const auto cache = open();
  const Descriptor locked(::open(object(*cache, "slow", content)->data_path().c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(lock_description(locked.get(), F_WRLCK, kFirstLockByte), Lock::kTaken);  // as if it were being evicted
  std::atomic<int> opened{0};
  std::atomic<bool> is_waiting{true};
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    EXPECT_NE(object(*cache, "slow", content), nullptr);
    is_waiting = false;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      EXPECT_NE(object(*cache, std::to_string(i), content), nullptr);
      ++opened;
    });
  }
  for (int i = 0; i < 100 && opened < 8; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_TRUE(is_waiting);
  EXPECT_GE(opened, 5);  // names share locks
  ASSERT_EQ(lock_description(locked.get(), F_UNLCK, kFirstLockByte), Lock::kTaken);
  for (std::thread& thread : threads) thread.join();
}

TEST_F(BlockCacheTest, AProcessHasOneObjectOfAName) {
  const Bytes content = random_bytes(kBlock, 20);
  const auto cache = open();
  for (int round = 0; round < 50; ++round) {
    std::array<std::shared_ptr<CachedObject>, 4> found;
    std::vector<std::thread> threads;
    for (auto& one : found) threads.emplace_back([&] { one = object(*cache, std::to_string(round), content); });
    for (std::thread& thread : threads) thread.join();
    EXPECT_TRUE(std::ranges::all_of(found, [&](const auto& one) { return one != nullptr && one == found[0]; }));
  }
}

TEST_F(BlockCacheTest, ObjectsInUseAreNeverEvicted) {
  const Bytes content = random_bytes(4 * kBlock, 18);
  const auto cache = open(9 * kBlock);
  const auto first = object(*cache, "a", content), second = object(*cache, "b", content);
  EXPECT_EQ(keep_all(*first, content), 4U);
  EXPECT_EQ(keep_all(*second, content), 4U);
  const auto third = object(*cache, "c", content);
  EXPECT_EQ(keep_all(*third, content), 0U);
  EXPECT_EQ(third->claim(0), Claim::kNoRoom);
  EXPECT_EQ(cache->object("s3://bucket/d", 1, 4000 * kBlock, ""), nullptr);  // its map alone is too large
  EXPECT_EQ(check_held(*first, content) + check_held(*second, content), 8U);
  // Not if another process uses it either.
  EXPECT_EQ(in_child([&] { EXPECT_EQ(keep_all(*object(*open(9 * kBlock), "e", content), content), 0U); }), 0);
  EXPECT_EQ(check_held(*first, content) + check_held(*second, content), 8U);
}

// For a moment after a look in vain there is no other one, unless objects are no longer used.
TEST_F(BlockCacheTest, AsManyObjectsAreEvictedAsNeededOnceTheyAreNoLongerUsed) {
  const Bytes small = random_bytes(kBlock, 21), large = random_bytes(4 * kBlock, 22);
  const auto cache = open(8 * (kBlock + kOverhead) + kOverhead);
  std::vector<std::shared_ptr<CachedObject>> used;
  for (int i = 0; i < 8; ++i) {
    used.push_back(object(*cache, std::to_string(i), small));
    ASSERT_EQ(keep_all(*used.back(), small), 1U);
  }
  const auto wanted = object(*cache, "large", large);
  ASSERT_NE(wanted, nullptr);
  ASSERT_EQ(wanted->claim(0), Claim::kNoRoom);
  used.clear();
  EXPECT_EQ(keep_all(*wanted, large), 4U);
}

TEST_F(BlockCacheTest, ASmallerBoundEvictsAtOnce) {
  const Bytes content = random_bytes(4 * kBlock, 19);
  const auto cache = open();
  for (const char* key : {"a", "b", "c", "d"}) keep_all(*object(*cache, key, content), content);
  EXPECT_EQ(open(9 * kBlock), cache);
  EXPECT_EQ(cache->list().size(), 2U);
  EXPECT_LE(cache->statistics().used_bytes, 9 * kBlock);
}

TEST_F(BlockCacheTest, OnlyItsOwnFilesAreRemoved) {
  const Bytes content = random_bytes(kBlock, 20);
  const auto cache = open();
  std::string data;
  {
    const auto cached = object(*cache, "a", content);
    keep_all(*cached, content);
    data = cached->data_path();
  }
  const std::string subfolder = data.substr(0, data.rfind('/'));
  const std::string target = folder_.write("precious", content);
  const std::string link = subfolder + "/" + subfolder.substr(subfolder.size() - 2) + std::string(30, '0') + ".data";
  ASSERT_EQ(::symlink(target.c_str(), link.c_str()), 0);
  ASSERT_EQ(::symlink(folder_.file("elsewhere").c_str(), (path_ + "/objects/zz").c_str()), 0);
  const std::string other =
      folder_.write("cache/objects/" + subfolder.substr(subfolder.size() - 2) + "/x.data", content);
  for (const auto& summary : cache->list()) EXPECT_TRUE(cache->evict(summary.name));
  EXPECT_FALSE(cache->evict("../../precious"));
  EXPECT_FALSE(std::filesystem::exists(data));
  EXPECT_TRUE(std::filesystem::exists(target));
  EXPECT_TRUE(std::filesystem::exists(other));
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_EQ(cache->statistics().used_bytes, 0U);
}

TEST_F(BlockCacheTest, ALinkInTheFolderIsNotFollowed) {
  const Bytes content = random_bytes(kBlock, 21);
  std::string data;
  const auto cache = open();
  data = object(*cache, "a", content)->data_path();
  ASSERT_TRUE(cache->evict(cache->list().at(0).name));
  const std::string target = folder_.write("precious", content);
  ASSERT_EQ(::symlink(target.c_str(), data.c_str()), 0);
  EXPECT_EQ(object(*cache, "a", random_bytes(kBlock, 22)), nullptr);
  EXPECT_EQ(read_file(target), content);
}

TEST_F(BlockCacheTest, NoFileSaysASecret) {
  const auto cache = open();
  const std::string location = "https://user:word@host/../../x\"\n?X-Amz-Signature=5ecret#part";
  ASSERT_NE(cache->object(location, 1, kBlock, "\"a\\b\""), nullptr);
  EXPECT_EQ(
      cache->list().at(0).about,
      "{\"location\": \"https://host/../../x\\\"\\u000a\", \"tag\": \"\\\"a\\\\b\\\"\", \"size_bytes\": 65536}\n");
}

TEST_F(BlockCacheTest, AnImpossibleSizeIsNotCached) {
  const auto cache = open();
  const Bytes content = random_bytes(kBlock, 23);
  EXPECT_TRUE(keep(*object(*cache, "a", content), content, 0));
  for (const uint64_t size : {uint64_t{1} << 50, uint64_t{1} << 62, UINT64_MAX}) {
    EXPECT_EQ(cache->object("s3://bucket/large", 1, size, ""), nullptr);
  }
  EXPECT_EQ(cache->list().size(), 1U);
  EXPECT_EQ(cache->object("s3://bucket/empty", 1, 0, "")->block_count(), 0U);
  EXPECT_TRUE(cache->object("s3://bucket/empty", 1, 0, "")->holds(0, 0));
}

TEST_F(BlockCacheTest, AFullDiskIsNoError) {
  const std::string small = folder_.file("small");
  std::filesystem::create_directory(small);
  if (::mount("none", small.c_str(), "tmpfs", 0, "size=1m") != 0) GTEST_SKIP() << "only root may mount";
  {
    const auto cache = BlockCache::open(small, kPlenty, kBlock, kBoot);
    const Bytes content = random_bytes(20 * kBlock, 24);
    const auto cached = object(*cache, "a", content);
    const size_t kept = keep_all(*cached, content);
    EXPECT_GE(kept, 12U);
    EXPECT_LT(kept, 16U);
    EXPECT_EQ(check_held(*cached, content), kept);
    EXPECT_EQ(cache->statistics().used_bytes, kept * kBlock + kOverhead);
    const auto notes = noted_fallbacks();
    EXPECT_EQ(
        std::ranges::count_if(notes, [&](const std::string& note) { return note.find(small) != std::string::npos; }),
        1);
    const Bytes filling = random_bytes(kBlock, 25);
    std::ofstream(small + "/other").write(reinterpret_cast<const char*>(filling.data()), kBlock);
    EXPECT_EQ(object(*cache, "b", content), nullptr);
    EXPECT_EQ(cache->list().size(), 1U);
    EXPECT_EQ(check_held(*cached, content), kept);
  }
  ::umount2(small.c_str(), MNT_DETACH);
}

}  // namespace
}  // namespace gdsdata::testing
