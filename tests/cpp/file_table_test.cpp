// Open files in a process that has few descriptors.
#include "base/file_table.h"

#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <thread>

#include "engine/round_files.h"
#include "engine/round_reader.h"
#include "testing.h"
#include "tuning.h"

namespace gdsdata::testing {
namespace {

void limit_descriptors(size_t limit) {
  rlimit now{};
  ::getrlimit(RLIMIT_NOFILE, &now);
  now.rlim_cur = limit;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &now), 0);
}

// For how many descriptors the system has place without enlarging this process's table.
size_t place_for_descriptors() {
  std::ifstream status("/proc/self/status");
  for (std::string name; status >> name;) {
    size_t size = 0;
    if (name == "FDSize:" && status >> size) return size;
  }
  return 0;
}

TEST(Descriptors, ThatAreExpectedHavePlaceBeforeTheyAreOpened) {
  constexpr size_t kMany = 12'000;
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const auto wanted = std::min<rlim_t>(kMany, limit.rlim_cur - 1);
  const size_t open_before = count_descriptors();
  expect_descriptors(kMany);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (place_for_descriptors() < wanted || count_descriptors() > open_before) {
    ASSERT_LT(std::chrono::steady_clock::now(), until) << place_for_descriptors() << " of " << wanted;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Takes all descriptors, as another part of the program may.
std::vector<Descriptor> take_descriptors() {
  limit_descriptors(100);
  std::vector<Descriptor> taken;
  // A thread of a new table has some open for a moment (expect_descriptors), so this looks again.
  for (int looks = 0; looks < 5;) {
    Descriptor one(::open("/dev/null", O_RDONLY));
    if (one.get() >= 0) {
      taken.push_back(std::move(one));
      looks = 0;
    } else {
      ++looks;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  return taken;
}

// Limits belong to the process, so each test runs in its own.
class FewDescriptors : public ::testing::Test {
 protected:
  static constexpr size_t kFiles = 200;

  void SetUp() override { ::testing::FLAGS_gtest_death_test_style = "threadsafe"; }
  static void in_own_process(const std::function<void()>& test) {
    EXPECT_EXIT(
        {
          test();
          std::_Exit(HasFailure() ? 1 : 0);
        },
        ::testing::ExitedWithCode(0), "");
  }
  std::vector<std::string> write_files() const {
    std::vector<std::string> paths;
    for (size_t i = 0; i < kFiles; ++i) paths.push_back(folder_.write(std::to_string(i), random_bytes(10, i)));
    return paths;
  }

  static void read_with_workers(const std::shared_ptr<FileTable>& table);
  static std::shared_ptr<FileTable> identified_table_of(const std::vector<std::string>& paths) {
    return std::make_shared<FileTable>(paths, std::vector(paths.size(), FileIdentity{10, FileIdentity::kAnyTime}));
  }

  const TemporaryFolder folder_;
};

// A program's output would go into the file of a descriptor that has a standard stream's number.
TEST(Descriptors, AreNeverThoseOfStandardStreamsThatTheProgramClosed) {
  const TemporaryFolder folder;
  const std::string path = folder.write("a", random_bytes(8192, 1));
  const Descriptor input(::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 10));
  ASSERT_GE(input.get(), 10);
  ::close(STDIN_FILENO);
  const size_t before = count_descriptors();
  {
    const auto read = File::open_for_reading(path), written = File::open_for_writing(path, /*create=*/false);
    for (const int fd : {read->buffered(), read->direct(), written->buffered(), written->direct()}) {
      EXPECT_TRUE(fd == -1 || fd > STDERR_FILENO) << fd;
    }
    EXPECT_EQ(::fcntl(STDIN_FILENO, F_GETFD), -1);
  }
  EXPECT_EQ(count_descriptors(), before);
  ::dup2(input.get(), STDIN_FILENO);
}

TEST_F(FewDescriptors, OneThatLacksForDirectReadsIsNoRefusalOfTheFileSystem) {
  in_own_process([&] {
    const auto file = File::open_for_reading(folder_.write("a", random_bytes(10, 1)));
    if (File::open_for_reading(file->path())->direct() < 0) return;  // this file system refuses O_DIRECT
    auto taken = take_descriptors();
    EXPECT_EQ(file->direct(), -1);
    EXPECT_TRUE(file->may_be_direct_later());
    EXPECT_EQ(file->why_not_direct().system_errno, EMFILE);
    EXPECT_TRUE(direct_refusals().empty());
    taken.pop_back();
    EXPECT_GE(file->direct(), 0);
  });
}

TEST_F(FewDescriptors, AllTablesTogetherKeepHalfOfThemWhetherFilesHaveOneOrTwo) {
  for (const bool direct : {false, true}) {
    in_own_process([&] {
      limit_descriptors(100);
      const auto paths = write_files();
      const auto one = table_of(paths), other = table_of(paths);
      const size_t before = count_descriptors();
      for (uint32_t i = 0; i < kFiles; ++i) {
        const auto file = one->get(i);
        ASSERT_EQ(file->path(), paths[i]);
        if (direct) file->direct();
        ASSERT_EQ(other->get(kFiles - 1 - i)->path(), paths[kFiles - 1 - i]);
      }
      EXPECT_GE(count_descriptors() - before, 49u);
      EXPECT_LE(count_descriptors() - before, 51u) << "the last one may have become direct";
    });
  }
}

// A data set that is no longer read must not slow the next one down.
TEST_F(FewDescriptors, ATableThatOpensFilesClosesThoseOfTheOneThatOpenedNoneForLongest) {
  in_own_process([this] {
    limit_descriptors(100);
    const std::vector<std::string> paths = write_files();
    const auto some = [&](size_t first) { return table_of({paths.begin() + first, paths.begin() + first + 24}); };
    const auto oldest = some(0), older = some(24), newest = some(48);
    for (const auto& table : {oldest, older, newest}) {
      for (uint32_t i = 0; i < table->size(); ++i) table->get(i);
    }
    EXPECT_TRUE(oldest->has_closed_files());
    EXPECT_FALSE(older->has_closed_files());
    EXPECT_FALSE(newest->has_closed_files());
    for (uint32_t i = 0; i < oldest->size(); ++i) oldest->get(i);
    EXPECT_FALSE(oldest->has_closed_files());
    EXPECT_TRUE(older->has_closed_files());
    EXPECT_FALSE(newest->has_closed_files());
  });
}

TEST_F(FewDescriptors, FilesThatAreReadWholeAndCannotBeMappedAreKeptUpToAQuarterOfThem) {
  if (!can_take_mappings()) GTEST_SKIP() << "this system allows too many mappings";
  in_own_process([&] {
    limit_descriptors(100);
    const auto paths = write_files();
    const auto table = identified_table_of(paths);
    const size_t before = count_descriptors();
    {
      const auto taken = take_mappings(paths[0]);
      for (uint32_t i = 0; i < kFiles; ++i) ASSERT_EQ(table->get(i, WhenTaken::kWait, 10)->path(), paths[i]);
      EXPECT_EQ(count_descriptors() - before, 25u);
      EXPECT_EQ(table->get(0), table->get(0));
      EXPECT_NE(table->get(kFiles - 1, WhenTaken::kWait, 10), table->get(kFiles - 1, WhenTaken::kWait, 10));
      EXPECT_EQ(table->get(kFiles - 1, WhenTaken::kWait, 4), table->get(kFiles - 1, WhenTaken::kWait, 4))
          << "it is not read whole";
    }
    for (uint32_t i = 0; i < kFiles; ++i) table->get(i, WhenTaken::kWait, 10);
    EXPECT_EQ(count_descriptors() - before, 50u) << "mappings are left again";
  });
}

TEST_F(FewDescriptors, FilesInUseStayOpenAndACallerThatWouldGiveUpGetsNone) {
  in_own_process([&] {
    limit_descriptors(100);
    const auto table = table_of(write_files());
    std::vector<std::shared_ptr<File>> held;
    for (uint32_t i = 0; i < 50; ++i) {
      held.push_back(table->get(i, WhenTaken::kGiveUp));
      ASSERT_NE(held.back(), nullptr);
    }
    EXPECT_EQ(table->get(60, WhenTaken::kGiveUp), nullptr);
    EXPECT_EQ(table->get(3, WhenTaken::kGiveUp), held[3]) << "it is open already";
    EXPECT_NE(table->get(61, WhenTaken::kWait), nullptr) << "a caller that holds none always gets one";
    held.pop_back();
    EXPECT_NE(table->get(60, WhenTaken::kGiveUp), nullptr);
  });
}

TEST_F(FewDescriptors, ACallerThatHoldsNoFileWaitsUntilOthersCloseOne) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "UBSan needs descriptors to look at objects";
#endif
  in_own_process([&] {
    const auto paths = write_files();
    const auto table = table_of(paths), other = table_of(paths);
    auto held = table->get(0);
    const auto open_already = other->get(2);
    const auto taken = take_descriptors();
    EXPECT_EQ(other->get(1, WhenTaken::kGiveUp), nullptr);
    std::shared_ptr<File> waited_for;
    std::atomic<bool> is_waiting{false};
    std::thread waits([&] {
      is_waiting = true;
      waited_for = other->get(1);
    });
    while (!is_waiting) std::this_thread::yield();
    EXPECT_EQ(other->get(2).get(), open_already.get()) << "a wait for a descriptor keeps the table's lock";
    held.reset();
    waits.join();
    ASSERT_NE(waited_for, nullptr);
    EXPECT_EQ(waited_for->path(), paths[1]);
  });
}

TEST_F(FewDescriptors, NoneAtAllIsAnErrorAtOnce) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "UBSan needs descriptors to look at objects";
#endif
  in_own_process([&] {
    const auto table = table_of(write_files());
    auto taken = take_descriptors();
    const Error error = error_of([&] { table->get(0); });
    taken.clear();
    EXPECT_EQ(error.system_errno, EMFILE);
    EXPECT_NE(error.message.find("ulimit -n"), std::string::npos) << error.message;
  });
}

TEST_F(FewDescriptors, AFileThatIsReadStaysOpenWhileOthersComeAndGo) {
  in_own_process([&] {
    limit_descriptors(100);
    const auto table = table_of(write_files());
    const std::weak_ptr<File> read = table->get(0);
    for (int round = 0; round < 3; ++round) {
      for (uint32_t i = 1; i < kFiles; ++i) {
        ASSERT_TRUE(table->touch(0)) << i;
        table->get(i);
      }
    }
    EXPECT_FALSE(read.expired());
    for (uint32_t i = 1; i < kFiles; ++i) table->get(i);
    EXPECT_TRUE(read.expired());
  });
}

TEST_F(FewDescriptors, APinDelaysTheCloseOfWhatItFoundAndOthersGoOn) {
  in_own_process([&] {
    limit_descriptors(100);
    const auto paths = write_files();
    const auto pinned = table_of(paths), other = table_of(paths);
    const size_t before = count_descriptors();
    const std::weak_ptr<File> watched = pinned->get(0);
    PinSlot slot;
    {
      const Pin pin = pinned->pin(slot);
      const File* found = pinned->find(0, pin);
      ASSERT_NE(found, nullptr);
      for (uint32_t i = 0; i < kFiles; ++i) ASSERT_EQ(other->get(i)->path(), paths[i]);
      EXPECT_EQ(pinned->find(0, pin), nullptr) << "it was not evicted";
      std::byte byte{};
      EXPECT_EQ(::pread(found->buffered(), &byte, 1, 0), 1) << "it was closed";
      EXPECT_LE(count_descriptors() - before, 52u);
      for (uint32_t i = 0; i < 20; ++i) ASSERT_EQ(pinned->get(i)->path(), paths[i]);
    }
    for (uint32_t i = 20; i < 40; ++i) pinned->get(i);
    EXPECT_TRUE(watched.expired());
    EXPECT_LE(count_descriptors() - before, 51u);
  });
}

TEST_F(FewDescriptors, ACallerWithoutAPinWaitsForThePinsOfOthers) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "UBSan needs descriptors to look at objects";
#endif
  in_own_process([&] {
    const auto paths = write_files();
    const auto table = table_of(paths), other = table_of(paths);
    table->get(0);
    PinSlot slot;
    std::unique_ptr<Pin> pin(new Pin(table->pin(slot)));
    const auto taken = take_descriptors();
    EXPECT_EQ(other->get(1, WhenTaken::kGiveUp), nullptr);
    std::shared_ptr<File> waited_for;
    std::atomic<bool> is_waiting{false};
    std::thread waits([&] {
      is_waiting = true;
      waited_for = other->get(1);
    });
    while (!is_waiting) std::this_thread::yield();
    pin.reset();
    waits.join();
    ASSERT_NE(waited_for, nullptr);
    EXPECT_EQ(waited_for->path(), paths[1]);
  });
}

TEST_F(FewDescriptors, ThreadsThatReadWithoutALockGetEveryByteWhileFilesAreEvicted) {
  in_own_process([&] {
    limit_descriptors(100);
    constexpr size_t kReaders = 3, kRounds = 300, kParts = 12;
    const auto table = table_of(write_files());
    std::vector<Bytes> contents;
    for (size_t i = 0; i < kFiles; ++i) contents.push_back(random_bytes(10, i));
    std::atomic<size_t> found_open{0}, wrong{0};
    std::vector<std::thread> readers;
    for (size_t reader = 0; reader < kReaders; ++reader) {
      readers.emplace_back([&, reader] {
        std::mt19937 random(static_cast<uint32_t>(reader));
        PinSlot slot;
        for (size_t round = 0; round < kRounds; ++round) {
          std::array<uint32_t, kParts> indices{};
          for (uint32_t& index : indices) index = random() % kFiles;
          const auto opened = table->get(indices[0]);
          const Pin pin = table->pin(slot);
          for (const uint32_t index : indices) {
            table->touch(index);
            File* file = table->find(index, pin);
            if (file == nullptr) continue;
            ++found_open;
            std::this_thread::yield();
            Bytes bytes(10);
            const bool read = ::pread(file->buffered(), bytes.data(), bytes.size(), 0) == 10;
            const Mapping* mapping = file->mapping();
            if (!read || bytes != contents[index] || std::memcmp(mapping->data(), bytes.data(), 10) != 0) ++wrong;
          }
        }
      });
    }
    for (std::thread& reader : readers) reader.join();
    EXPECT_EQ(wrong, 0u);
    EXPECT_GT(found_open, kReaders * kRounds);
    EXPECT_LT(count_descriptors(), 85u);
  });
}

void FewDescriptors::read_with_workers(const std::shared_ptr<FileTable>& table) {
  constexpr size_t kCallers = 2, kGroups = 30, kParts = 300;
  std::vector<Bytes> contents;
  for (size_t i = 0; i < kFiles; ++i) contents.push_back(random_bytes(10, i));
  limit_descriptors(100);
  EngineOptions options;
  options.backend = "posix";
  options.workers = 3;
  Engine engine(options, host_device());
  std::vector<std::thread> callers;
  for (size_t caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&, caller] {
      std::mt19937 random(static_cast<uint32_t>(caller));
      for (size_t i = 0; i < kGroups; ++i) {
        const auto group = std::make_shared<Group>();
        group->edit().files = table;
        Bytes memory(kParts * 10);
        for (size_t part = 0; part < kParts; ++part) {
          group->edit().transfers.push_back({static_cast<uint32_t>(random() % kFiles), 0, 10, &memory[part * 10]});
        }
        engine.run(group);
        EXPECT_FALSE(group->result().error) << group->result().error->message;
        for (size_t part = 0; part < kParts; ++part) {
          const Bytes& content = contents[group->request().transfers[part].file];
          ASSERT_EQ(std::memcmp(&memory[part * 10], content.data(), 10), 0) << part;
        }
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_LT(count_descriptors(), 95u);
}

TEST_F(FewDescriptors, WorkersReadEveryByteOfMoreFilesThanTheyMayOpen) {
  in_own_process([&] { read_with_workers(table_of(write_files())); });
}

TEST_F(FewDescriptors, WorkersReadEveryByteOfMoreFilesThanTheyMayOpenOrMap) {
  if (!can_take_mappings()) GTEST_SKIP() << "this system allows too many mappings";
  in_own_process([&] {
    const auto paths = write_files();
    const auto taken = take_mappings(paths[0]);
    read_with_workers(identified_table_of(paths));
  });
}

TEST_F(FewDescriptors, ARoundReadsSeveralFilesThatTheTableDoesNotKeep) {
  if (!can_take_mappings()) GTEST_SKIP() << "this system allows too many mappings";
  in_own_process([&] {
    limit_descriptors(100);
    const auto paths = write_files();
    const auto table = identified_table_of(paths);
    const auto taken = take_mappings(paths[0]);
    for (uint32_t i = 0; i < 25; ++i) table->get(i);
    EngineOptions options;
    options.workers = 3;
    SpanLog spans;
    RoundReader reader(options, *host_device(), spans);
    ActiveSegment active;
    active.segment.group = std::make_shared<Group>();
    active.group().edit().files = table;
    Bytes memory(40);
    const std::vector<Transfer> parts{{100, 0, 6, &memory[0]},
                                      {0, 0, 10, &memory[10]},
                                      {101, 0, 5, &memory[20]},
                                      {101, 5, 5, &memory[25]},
                                      {102, 0, 10, &memory[30]}};
    std::vector<Transfer> left;
    EXPECT_EQ(reader.read(active, parts, parts.size(), WhenTaken::kWait, left), parts.size());
    EXPECT_TRUE(left.empty());
    for (const Transfer& part : parts) {
      EXPECT_EQ(std::memcmp(part.memory, &random_bytes(10, part.file)[part.offset], part.length), 0) << part.file;
    }
    PinSlot slot;
    const Pin pin = table->pin(slot);
    for (const uint32_t file : {100, 101, 102}) EXPECT_EQ(table->find(file, pin), nullptr) << file;
  });
}

TEST_F(FewDescriptors, AForkedChildHasCachesOfItsOwn) {
  in_own_process([&] {
    limit_descriptors(100);
    const auto paths = write_files();
    auto of_parent = table_of(paths);
    of_parent->get(0);
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(10);
      of_parent.reset();
      const auto table = table_of(paths);
      for (uint32_t i = 0; i < kFiles; ++i) table->get(i);
      std::_Exit(count_descriptors() < 85 ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  });
}

TEST(FileTable, ThreadsThatOpenAFileAtOnceShareOneDescriptor) {
  constexpr size_t kThreads = 8, kRounds = 300;
  const TemporaryFolder folder;
  const std::string path = folder.write("a", random_bytes(10, 1));
  const size_t before = count_descriptors();
  for (size_t round = 0; round < kRounds; ++round) {
    const auto table = table_of({path});
    std::barrier begin(kThreads);
    std::vector<std::shared_ptr<File>> got(kThreads);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        begin.arrive_and_wait();
        got[i] = table->get(0);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& file : got) ASSERT_EQ(file, got.front());
    ASSERT_EQ(count_descriptors(), before + 1) << "in round " << round;
  }
}

TEST(PathList, HasThePathsThatWereJoined) {
  const std::vector<std::string> paths{"/a", "", "/bc", ""};
  const std::string joined("/a\0\0/bc\0", 8);
  for (const PathList& list : {PathList(paths), PathList(joined, 4)}) {
    ASSERT_EQ(list.size(), paths.size());
    for (size_t i = 0; i < paths.size(); ++i) EXPECT_EQ(list[i], paths[i]);
  }
  EXPECT_EQ(PathList("", 1)[0], "");
  EXPECT_EQ(PathList("", 0).size(), 0u);
  EXPECT_EQ(PathList(std::vector<std::string>()).size(), 0u);
  for (const size_t count : {3, 5}) {
    EXPECT_EQ(error_of([&] { PathList(joined, count); }).code, ErrorCode::kInvalidArgument);
  }
}

TEST(FileTable, SaysWhetherSomeOfSeveralFilesAreClosed) {
  const TemporaryFolder folder;
  const std::string a = folder.write("a", random_bytes(10, 1)), b = folder.write("b", random_bytes(10, 2));
  EXPECT_FALSE(table_of({a})->has_closed_files());
  const auto table = table_of({a, b});
  EXPECT_TRUE(table->has_closed_files());
  table->get(1);
  table->get(1);
  EXPECT_TRUE(table->has_closed_files());
  table->get(0);
  EXPECT_FALSE(table->has_closed_files());
}

std::shared_ptr<FileTable> table_of_new_files(const TemporaryFolder& folder, size_t count) {
  std::vector<std::string> paths;
  for (size_t i = 0; i < count; ++i) paths.push_back(folder.write(std::to_string(i), random_bytes(10, i)));
  const auto table = table_of(paths);
  for (uint32_t i = 0; i < count; ++i) table->get(i);
  return table;
}

// The next look at the clock may find the same time, so the file gets a later one.
void rewrite(const std::string& path, size_t bytes = 10) {
  const auto before = std::filesystem::last_write_time(path);
  std::ofstream(path, std::ios::binary) << std::string(bytes, 'x');
  std::filesystem::last_write_time(path, before + std::chrono::seconds(1));
}

constexpr std::chrono::minutes kLong{1};

TEST(ChangedFiles, AreEvictedAndOthersStayOpen) {
  const TemporaryFolder folder;
  const auto table = table_of_new_files(folder, 5);
  rewrite(table->path(0));
  rewrite(table->path(1), 20);
  folder.write("new", random_bytes(20, 9));
  std::filesystem::rename(folder.file("new"), table->path(2));
  std::filesystem::remove(table->path(3));
  EXPECT_FALSE(table->had_changed_files());
  table->evict_changed(kLong);
  EXPECT_TRUE(table->had_changed_files());
  for (uint32_t i = 0; i < 5; ++i) EXPECT_EQ(table->touch(i), i > 1) << i;
  EXPECT_EQ(table->get(1)->size_bytes(), 20u);
}

TEST(ChangedFiles, ThatTheCallerKeepsOpenStay) {
  const TemporaryFolder folder;
  const std::string path = folder.write("given", random_bytes(10, 1));
  const auto given = File::open_for_reading(path);
  FileTable table({path, folder.write("named", random_bytes(10, 2))}, {}, {given, nullptr});
  for (const uint32_t i : {0, 1}) {
    table.get(i);
    rewrite(table.path(i));
  }
  table.evict_changed(kLong);
  EXPECT_EQ(table.get(0), given);
  EXPECT_FALSE(table.touch(1));
}

TEST(ChangedFiles, OfManyAreFoundInTurn) {
  constexpr size_t kFiles = tuning::kCheckedAtOnce + 10;
  const TemporaryFolder folder;
  const DescriptorLimit limit(4 * kFiles);
  const auto table = table_of_new_files(folder, kFiles);
  constexpr uint32_t kEarly = 1015, kLate = kFiles - 1;
  rewrite(table->path(kLate));
  table->evict_changed(kLong);
  EXPECT_TRUE(table->touch(kLate));
  rewrite(table->path(0));
  rewrite(table->path(kEarly));
  table->evict_changed(kLong);
  EXPECT_FALSE(table->touch(kLate));
  EXPECT_FALSE(table->touch(0));
  EXPECT_TRUE(table->touch(kEarly));
  table->evict_changed(kLong);
  EXPECT_FALSE(table->touch(kEarly));
}

TEST(ChangedFiles, OfASlowFileSystemAreFoundInTurn) {
  const TemporaryFolder folder;
  const auto table = table_of_new_files(folder, 3);
  for (uint32_t i = 0; i < 3; ++i) rewrite(table->path(i));
  for (uint32_t checked = 0; checked < 3; ++checked) {
    EXPECT_TRUE(table->touch(checked));
    table->evict_changed(std::chrono::nanoseconds(0));
    EXPECT_FALSE(table->touch(checked));
  }
}

TEST(ChangedFiles, AreReadUnderAPinUntilItEnds) {
  const TemporaryFolder folder;
  const auto table = table_of_new_files(folder, 1);
  PinSlot slot;
  {
    const Pin pin = table->pin(slot);
    File* file = table->find(0, pin);
    rewrite(table->path(0), 5);
    table->evict_changed(kLong);
    EXPECT_EQ(table->find(0, pin), nullptr);
    EXPECT_EQ(file->current_size_bytes(), 5u) << "it is still open";
  }
  const size_t before = count_descriptors();
  table->get(0);
  rewrite(table->path(0), 6);
  table->evict_changed(kLong);
  EXPECT_EQ(count_descriptors(), before - 1) << "both are closed";
}

TEST(ChangedFiles, AreEvictedWhileThreadsReadThem) {
  constexpr size_t kReaders = 2, kRounds = 200;
  const TemporaryFolder folder;
  const auto table = table_of_new_files(folder, 8);
  std::atomic<bool> ends{false};
  std::atomic<size_t> wrong{0};
  std::vector<std::thread> readers;
  for (size_t reader = 0; reader < kReaders; ++reader) {
    readers.emplace_back([&] {
      PinSlot slot;
      while (!ends) {
        for (uint32_t i = 0; i < table->size(); ++i) {
          const auto held = table->get(i);
          const Pin pin = table->pin(slot);
          File* file = table->find(i, pin);
          for (File* open : {held.get(), file}) {
            if (open != nullptr && (open->path() != table->path(i) || ::fcntl(open->buffered(), F_GETFD) < 0)) ++wrong;
          }
        }
      }
    });
  }
  for (size_t round = 0; round < kRounds; ++round) {
    rewrite(table->path(static_cast<uint32_t>(round % table->size())));
    table->evict_changed(kLong);
  }
  ends = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_TRUE(table->had_changed_files());
}

TEST(RoundFiles, KeepEachFileOnceAndFindItByItsIndex) {
  const TemporaryFolder folder;
  std::vector<std::string> paths;
  for (size_t i = 0; i < 200; ++i) paths.push_back(folder.write(std::to_string(i), random_bytes(10, i)));
  FileTable table(paths, {});
  std::mt19937 random(7);
  RoundFiles files;
  for (int round = 0; round < 20; ++round) {
    std::vector<bool> added(paths.size());
    for (size_t i = 0; i < 100; ++i) {
      const uint32_t index = random() % paths.size();
      files.add(index, table.get(index));
      added[index] = true;
    }
    EXPECT_EQ(files.size(), static_cast<size_t>(std::count(added.begin(), added.end(), true)));
    for (uint32_t i = 0; i < paths.size(); ++i) {
      const File* file = files.find(i);
      ASSERT_EQ(file != nullptr, added[i]);
      if (file != nullptr) {
        EXPECT_EQ(file->path(), paths[i]);
      }
      ASSERT_EQ(table.get(i).use_count(), added[i] ? 3 : 2);
    }
    files.clear();
    ASSERT_EQ(table.get(0).use_count(), 2);
  }
}

}  // namespace
}  // namespace gdsdata::testing
