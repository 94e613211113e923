// Files that keep their mapping when their descriptors are closed.
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <thread>

#include "base/file_table.h"
#include "testing.h"

namespace gdsdata::testing {
namespace {

// Limits belong to the process, so each test runs in its own.
class RestingFiles : public ::testing::Test {
 protected:
  static constexpr size_t kFiles = 200, kFileBytes = 10'000, kRecordBytes = 2'000;

  void SetUp() override {
    ::testing::FLAGS_gtest_death_test_style = "threadsafe";
    for (size_t i = 0; i < kFiles; ++i) {
      contents_.push_back(random_bytes(kFileBytes, i));
      paths_.push_back(folder_.write(std::to_string(i), contents_.back()));
    }
  }
  static void in_own_process(const std::function<void()>& test) {
    EXPECT_EXIT(
        {
          rlimit limit{};
          ::getrlimit(RLIMIT_NOFILE, &limit);
          limit.rlim_cur = 100;
          ::setrlimit(RLIMIT_NOFILE, &limit);
          test();
          std::fflush(stdout);
          std::_Exit(HasFailure() ? 1 : 0);
        },
        ::testing::ExitedWithCode(0), "");
  }
  std::shared_ptr<FileTable> table() const {
    std::vector<FileIdentity> identities;
    for (const std::string& path : paths_) {
      struct stat status{};
      ::stat(path.c_str(), &status);
      identities.push_back({kFileBytes, status.st_mtim.tv_sec * 1'000'000'000LL + status.st_mtim.tv_nsec});
    }
    return std::make_shared<FileTable>(paths_, std::move(identities));
  }
  // Reads a record of each file. Returns the first error.
  std::optional<Error> read_all(const std::shared_ptr<FileTable>& files, size_t place) {
    Bytes memory(kFiles * kRecordBytes);
    const auto group = std::make_shared<Group>();
    group->edit().files = files;
    for (uint32_t i = 0; i < kFiles; ++i) {
      group->edit().transfers.push_back({i, place * kRecordBytes, kRecordBytes, &memory[i * kRecordBytes]});
    }
    std::promise<void> done;
    group->edit().on_done = [&] { done.set_value(); };
    engine().submit(group);  // not run(): a guest leaves files to storage rather than wait for room
    done.get_future().wait();
    if (group->result().error) return copy_of(*group->result().error);
    EXPECT_EQ(group->result().bytes[Route::kPageCache], kFiles * kRecordBytes);
    for (size_t i = 0; i < kFiles; ++i) {
      EXPECT_EQ(std::memcmp(&memory[i * kRecordBytes], &contents_[i][place * kRecordBytes], kRecordBytes), 0) << i;
    }
    return std::nullopt;
  }
  // Reads until no file is closed. After a page fault of the test program itself, the engine may
  // ask again which pages are in the page cache. A file closes if its answer is not known.
  void open_all(const std::shared_ptr<FileTable>& files) {
    bool all_open = false;
    for (int pass = 0; pass < 20 && !all_open; ++pass) {
      ASSERT_FALSE(read_all(files, 0));
      all_open = true;
      for (uint32_t i = 0; i < kFiles; ++i) all_open = files->touch(i) && all_open;
    }
    ASSERT_TRUE(all_open);
  }
  Engine& engine() {
    if (engine_ == nullptr) {
      EngineOptions options;
      options.backend = "posix";
      options.workers = 3;
      engine_ = std::make_unique<Engine>(options, host_device());
    }
    return *engine_;
  }
  static size_t count_resting(FileTable& files) {
    size_t count = 0;
    for (uint32_t i = 0; i < kFiles; ++i) count += files.get(i)->rests() ? 1 : 0;
    return count;
  }
  static size_t count_descriptors() {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {})) - 1;
  }

  const TemporaryFolder folder_;
  std::vector<Bytes> contents_;
  std::vector<std::string> paths_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(RestingFiles, AreReadWithoutBeingOpenedAgain) {
  in_own_process([&] {
    const auto files = table();
    open_all(files);
    EXPECT_GE(count_resting(*files), kFiles - 50);
    for (const std::string& path : paths_) std::filesystem::remove(path);
    for (size_t place = 1; place < kFileBytes / kRecordBytes; ++place) ASSERT_FALSE(read_all(files, place));
  });
}

TEST_F(RestingFiles, AreOpenedAgainForAllThatNeedsADescriptorAndAreClosedForOthersAgain) {
  in_own_process([&] {
    const auto files = table();
    open_all(files);
    for (uint32_t i = 0; i < kFiles; ++i) {
      const auto file = files->get(i);
      ASSERT_GE(file->buffered(), 0) << i;
      EXPECT_FALSE(file->rests());
      Bytes memory(kFileBytes);
      ASSERT_EQ(::pread(file->buffered(), memory.data(), kFileBytes, 0), static_cast<ssize_t>(kFileBytes));
      EXPECT_EQ(memory, contents_[i]);
    }
    EXPECT_LT(count_descriptors(), 70u);
    EXPECT_FALSE(read_all(files, 1));
  });
}

TEST_F(RestingFiles, StayMappedWhenNoMoreFilesMayBe) {
  if (!can_take_mappings()) GTEST_SKIP() << "this system allows too many mappings";
  in_own_process([&] {
    constexpr size_t kMapped = 101;
    const auto files = table();
    auto taken = take_mappings(paths_[0]);
    taken.resize(taken.size() - kMapped);
    std::vector<const Mapping*> mappings(kFiles);
    for (int pass = 0; pass < 3; ++pass) {
      size_t same = 0;
      for (uint32_t i = 0; i < kFiles; ++i) {
        const auto file = files->get(i, WhenTaken::kWait, kFileBytes);
        const bool is_mapped = file->rests() || file->had_short_read();
        const Mapping* mapping = is_mapped ? file->mapping() : nullptr;  // as a reader does
        same += mapping != nullptr && mapping == mappings[i] ? 1 : 0;
        mappings[i] = mapping;
      }
      if (pass > 0) {
        EXPECT_GE(same, kMapped - 1) << pass;
      }
    }
  });
}

TEST_F(RestingFiles, ThatWereTruncatedAreAnError) {
  in_own_process([&] {
    const auto files = table();
    open_all(files);
    for (const std::string& path : paths_) ASSERT_EQ(::truncate(path.c_str(), 3 * kRecordBytes), 0);
    EXPECT_FALSE(read_all(files, 1)) << "these bytes are still there";
    const auto error = read_all(files, 4);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, ErrorCode::kCorrupt) << error->message;
  });
}

// No page is lost, so no signal says it.
TEST_F(RestingFiles, ThatLostTheirLastByteAreAnError) {
  in_own_process([&] {
    const auto files = table();
    open_all(files);
    for (uint32_t i = 0; i < kFiles; ++i) {
      if (!files->get(i)->rests()) continue;
      ASSERT_EQ(::truncate(paths_[i].c_str(), kFileBytes - 1), 0);
    }
    const auto error = read_all(files, 4);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, ErrorCode::kCorrupt) << error->message;
  });
}

TEST_F(RestingFiles, ThatWereChangedInPlaceAreEvictedAndOpenedAnew) {
  in_own_process([&] {
    const auto files = table();
    open_all(files);
    std::vector<uint32_t> resting;
    for (uint32_t i = 0; i < kFiles; ++i) {
      if (files->get(i)->rests()) resting.push_back(i);
    }
    const uint32_t changed = resting.front(), replaced = resting.back();
    folder_.write(std::to_string(changed), random_bytes(kFileBytes + 1, 9));
    std::filesystem::rename(folder_.write("new", random_bytes(10, 9)), paths_[replaced]);
    files->evict_changed(std::chrono::minutes(1));
    for (const uint32_t i : resting) EXPECT_EQ(files->touch(i), i != changed) << i;
    const auto error = read_all(files, 1);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->path, paths_[changed]);
  });
}

TEST_F(RestingFiles, WhoseNameWasGivenToAnotherAreStillTheIndexedOnes) {
  in_own_process([&] {
    const auto files = table();
    open_all(files);
    const size_t resting = count_resting(*files);
    for (const std::string& path : paths_) {
      folder_.write("new", random_bytes(10, 9));
      std::filesystem::rename(folder_.file("new"), path);
    }
    EXPECT_FALSE(read_all(files, 1));
    size_t refused = 0;
    for (uint32_t i = 0; i < kFiles; ++i) refused += files->get(i)->buffered() < 0 ? 1 : 0;
    EXPECT_GE(refused, resting) << "no descriptor of another file is taken for theirs";
  });
}

TEST_F(RestingFiles, ThatCannotBeOpenedAgainSayWhy) {
  in_own_process([&] {
    const auto files = table();
    open_all(files);
    uint32_t resting = 0;
    while (!files->get(resting)->rests()) ++resting;
    const auto file = files->get(resting);
    std::filesystem::rename(folder_.write("new", random_bytes(10, 9)), paths_[resting]);
    for (const DirectMode direct : {DirectMode::kAuto, DirectMode::kAlways, DirectMode::kNever}) {
      BackendOptions options;
      options.direct = direct;
      const auto backend = make_posix_backend(options);
      Bytes memory(kRecordBytes);
      const Piece piece{0, kRecordBytes, memory.data()};
      Request request;
      request.file = file.get();
      request.length = kRecordBytes;
      request.pieces = {&piece, 1};
      ASSERT_EQ(backend->submit({&request, 1}), 1u);
      Completion completion;
      ASSERT_EQ(backend->reap({&completion, 1}, 1, std::chrono::seconds(1)), 1u);
      ASSERT_TRUE(completion.error);
      EXPECT_EQ(completion.error->code, ErrorCode::kCorrupt);
      EXPECT_EQ(completion.error->path, paths_[resting]);
      EXPECT_NE(completion.error->message.find("replaced"), std::string::npos) << completion.error->message;
    }
  });
}

TEST_F(RestingFiles, AreOnlyThoseWhoseMappingIsInThePageCache) {
  const auto file = File::open_for_reading(paths_[0]);
  EXPECT_EQ(file->rest(), nullptr) << "it has no mapping";
  drop_from_page_cache(paths_[1]);
  const auto cold = File::open_for_reading(paths_[1]);
  ASSERT_NE(cold->mapping(), nullptr);
  EXPECT_EQ(cold->rest(), nullptr);
  EXPECT_FALSE(cold->rests());
  ASSERT_NE(file->mapping(), nullptr);
  EXPECT_NE(file->rest(), nullptr);
  EXPECT_TRUE(file->rests());
}

// The handle that a library made of a descriptor must not outlive it. A table may evict a file in
// the moment in which another thread begins to use it.
TEST_F(RestingFiles, KeepTheirDescriptorsWhileACompanionIsMadeOfThem) {
  const auto file = File::open_for_reading(paths_[0]);
  ASSERT_NE(file->mapping(), nullptr);
  std::shared_ptr<void> closing;
  const auto make = [&] {
    std::thread([&] { closing = file->rest(); }).join();
    return std::make_shared<int>(1);
  };
  const auto companion = file->companion(file->buffered(), make);
  ASSERT_NE(companion, nullptr);
  EXPECT_EQ(closing, nullptr) << "its descriptors close, and the companion stays";
  EXPECT_FALSE(file->rests());
}

TEST_F(RestingFiles, HaveNoCompanionOfADescriptorThatCloses) {
  const auto file = File::open_for_reading(paths_[0]);
  ASSERT_NE(file->mapping(), nullptr);
  const int fd = file->buffered();
  const auto make = [] { return std::make_shared<int>(1); };
  const auto closing = file->rest();
  ASSERT_NE(closing, nullptr);
  EXPECT_EQ(file->companion(fd, make), nullptr) << "it rests";
  ASSERT_NE(file->buffered(), fd);
  EXPECT_EQ(file->companion(fd, make), nullptr) << "it is open again, by another descriptor";
  EXPECT_NE(file->companion(file->buffered(), make), nullptr);
}

TEST_F(RestingFiles, AreOpenedWithODirectEvenIfTheyBeginToRestAgain) {
  const auto file = File::open_for_reading(paths_[0]);
  ASSERT_NE(file->mapping(), nullptr);
  if (file->direct() < 0) GTEST_SKIP() << file->why_not_direct().message;
  std::atomic<int> rests{0};
  std::thread evicting([&] {
    while (rests < 3'000) rests += file->rest() != nullptr ? 1 : 0;
  });
  size_t refused = 0;
  while (rests < 3'000) refused += file->direct() < 0 ? 1 : 0;
  evicting.join();
  EXPECT_EQ(refused, 0u);
}

TEST_F(RestingFiles, OfATableWithoutIdentitiesAreNotKept) {
  in_own_process([&] {
    const auto files = std::make_shared<FileTable>(paths_, std::vector<FileIdentity>());
    ASSERT_FALSE(read_all(files, 0));
    EXPECT_EQ(count_resting(*files), 0u);
  });
}

}  // namespace
}  // namespace gdsdata::testing
