#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "base/convert.h"
#include "base/copy.h"
#include "base/crc32.h"
#include "base/durable.h"
#include "base/extent_math.h"
#include "base/heads.h"
#include "base/mapping.h"
#include "base/permutation.h"
#include "base/pickle.h"
#include "base/processor.h"
#include "testing.h"

namespace {
int interrupted_syncs = 0;
}

// Interrupted as often as a test asks for, as by a signal on a network file system.
extern "C" int fsync(int fd) {
  static const auto real = reinterpret_cast<decltype(&fsync)>(::dlsym(RTLD_NEXT, "fsync"));
  if (interrupted_syncs == 0) return real(fd);
  --interrupted_syncs;
  errno = EINTR;
  return -1;
}

namespace gdsdata::testing {
namespace {

TEST(Align, RoundsToMultiplesAndKeepsThem) {
  for (uint64_t alignment : {1, 512, 4096, 65536}) {
    for (uint64_t value : {0, 1, 511, 512, 513, 4095, 4096, 4097, 1 << 20}) {
      EXPECT_EQ(align_down(value, alignment) % alignment, 0u);
      EXPECT_EQ(align_up(value, alignment) % alignment, 0u);
      EXPECT_LE(align_down(value, alignment), value);
      EXPECT_GE(align_up(value, alignment), value);
      EXPECT_LT(align_up(value, alignment) - align_down(value, alignment), alignment + 1);
    }
  }
}

TEST(Split, PartsCoverExactlyTheTransferAndCutNoElement) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 2000; ++round) {
    const auto conversion =
        std::array{Conversion::kNone, Conversion::kU16ToI64, Conversion::kSwap8, Conversion::kF32ToBf16}[random() % 4];
    const uint64_t element = stored_element_bytes(conversion);
    const uint64_t limit = 65536u << (random() % 3);
    Bytes memory(1);
    const Transfer whole{3, random() % 100000, random() % 1000000 / element * element, memory.data()};
    std::vector<Transfer> parts;
    split(whole, limit, conversion, parts);
    uint64_t done = 0;
    for (const Transfer& part : parts) {
      ASSERT_EQ(part.file, 3u);
      ASSERT_EQ(part.offset, whole.offset + done);
      ASSERT_EQ(part.memory, whole.memory + result_bytes(conversion, done));
      ASSERT_GT(part.length, 0u);
      ASSERT_LE(part.length, limit + kCutBytes);
      ASSERT_EQ(part.length % element, 0u);
      done += part.length;
    }
    ASSERT_EQ(done, whole.length) << "round " << round;
  }
}

TEST(Split, TransfersThatAreJoinedAreCutWhereTheyFillTheLimit) {
  std::mt19937_64 random(3);
  constexpr uint64_t kLimit = 65536;
  for (int round = 0; round < 500; ++round) {
    const uint64_t unit = round % 2 == 0 ? 4096 : 1;  // whole pages, or any bytes
    Bytes memory(1);
    std::vector<Transfer> parts;
    const uint64_t begin = unit * (random() % 100);
    uint64_t end = begin, before = 0;
    for (size_t i = 0; i < 40; ++i) {
      const uint64_t length = unit * (1 + random() % (200000 / unit));
      before = split({3, end, length, memory.data()}, kLimit, Conversion::kNone, parts, before);
      end += length;
    }
    uint64_t done = begin, joined = 0;
    for (const Transfer& part : parts) {
      ASSERT_EQ(part.offset, done);
      ASSERT_GT(part.length, 0u);
      if (joined + part.length > kLimit + kCutBytes) {
        ASSERT_GE(joined, kLimit - 2 * kCutBytes) << "cut before it was full";
        joined = 0;
      }
      joined += part.length;
      ASSERT_LE(joined, kLimit + kCutBytes);
      done += part.length;
    }
    ASSERT_EQ(done, end);
  }
}

TEST(Coalesce, RangesCoverEveryPieceJoinOnlyNeighborsAndKeepTheLimit) {
  std::mt19937_64 random(2);
  constexpr uint64_t kGap = 1000, kLimit = 20000;
  for (int round = 0; round < 500; ++round) {
    Bytes memory(1);
    std::vector<Transfer> transfers(random() % 100);
    for (Transfer& transfer : transfers) {
      transfer = {static_cast<uint32_t>(random() % 3), random() % 100000, 1 + random() % 30000, memory.data()};
    }
    std::multiset<std::tuple<uint32_t, uint64_t, uint64_t>> asked, served;
    for (const Transfer& t : transfers) asked.insert({t.file, t.offset, t.length});
    std::vector<Range> ranges;
    std::vector<Piece> pieces;
    coalesce(transfers, kGap, kLimit, Conversion::kNone, ranges, pieces);
    for (const Range& range : ranges) {
      uint64_t reached = range.offset, longest = 0;
      for (size_t i = range.first_piece; i < range.first_piece + range.piece_count; ++i) {
        served.insert({range.file, pieces[i].offset, pieces[i].length});
        ASSERT_GE(pieces[i].offset, range.offset);
        ASSERT_LE(pieces[i].offset + pieces[i].length, range.offset + range.length);
        ASSERT_LE(pieces[i].offset, reached + kGap) << "a gap too wide was bridged";
        reached = std::max(reached, pieces[i].offset + pieces[i].length);
        longest = std::max(longest, pieces[i].length);
      }
      ASSERT_LE(range.length, std::max(kLimit, longest)) << "joined beyond the limit";
      ASSERT_EQ(reached, range.offset + range.length) << "a range reads past its last piece";
    }
    ASSERT_EQ(asked, served);
  }
}

TEST(Coalesce, JoinsTheRecordsOfASequentialBatchIntoOneRange) {
  Bytes memory(1);
  std::vector<Transfer> transfers;
  for (uint64_t i = 0; i < 64; ++i) transfers.push_back({0, i * 2048, 2050, memory.data()});
  std::vector<Range> ranges;
  std::vector<Piece> pieces;
  coalesce(transfers, 0, 1 << 20, Conversion::kNone, ranges, pieces);
  ASSERT_EQ(ranges.size(), 1u);
  EXPECT_EQ(ranges[0].length, 63u * 2048 + 2050);
}

TEST(Coalesce, JoinsPiecesWhoseConvertedElementsFollowEachOtherAndNoOthers) {
  Bytes memory(4000);
  for (const Conversion conversion : {Conversion::kNone, Conversion::kF32ToBf16, Conversion::kBf16ToF32}) {
    for (const uint64_t distance : {200u, 400u, 800u}) {
      std::vector<Transfer> transfers = {{0, 1000, 400, memory.data()}, {0, 1400, 400, memory.data() + distance}};
      std::vector<Range> ranges;
      std::vector<Piece> pieces;
      coalesce(transfers, 0, 1 << 20, conversion, ranges, pieces);
      ASSERT_EQ(ranges.size(), 1u);
      const bool follows = distance == result_bytes(conversion, 400);
      EXPECT_EQ(pieces.size(), follows ? 1u : 2u) << distance << " bytes apart, " << static_cast<int>(conversion);
    }
  }
}

// This processor, and what it would be with fewer vector instructions.
std::vector<Processor> processors() {
  Processor without_avx512 = processor();
  without_avx512.avx512 = false;
  return {processor(), without_avx512, {}};
}

template <typename Stored>
void expect_widened(Conversion conversion, size_t count, const Processor& has) {
  const Bytes stored = random_bytes(count * sizeof(Stored) + 1, count);
  Bytes result(count * 8 + 1);
  convert(conversion, result.data() + 1, stored.data() + 1, count * sizeof(Stored), has);  // both misaligned
  for (size_t i = 0; i < count; ++i) {
    Stored element;
    int64_t wide;
    std::memcpy(&element, stored.data() + 1 + i * sizeof(Stored), sizeof(Stored));
    std::memcpy(&wide, result.data() + 1 + i * 8, 8);
    ASSERT_EQ(wide, static_cast<int64_t>(element)) << i;
  }
}

TEST(Convert, WidensEveryIntegerAtAnyAlignmentAndLength) {
  for (const Processor& has : processors()) {
    for (size_t count : {0, 1, 3, 7, 8, 15, 16, 17, 63, 64, 65, 1025}) {
      expect_widened<uint8_t>(Conversion::kU8ToI64, count, has);
      expect_widened<uint16_t>(Conversion::kU16ToI64, count, has);
      expect_widened<int16_t>(Conversion::kI16ToI64, count, has);
      expect_widened<int32_t>(Conversion::kI32ToI64, count, has);
      expect_widened<uint32_t>(Conversion::kU32ToI64, count, has);
    }
  }
}

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

Bytes converted(Conversion conversion, std::span<const uint32_t> floats, const Processor& has) {
  Bytes result(floats.size() * result_element_bytes(conversion));
  convert(conversion, result.data(), reinterpret_cast<const std::byte*>(floats.data()), floats.size_bytes(), has);
  return result;
}

TEST(Convert, RoundsAFloatToTheNearestBf16AndOfTwoToTheEvenOne) {
  std::mt19937 random(1);
  std::vector<uint32_t> floats = {0, 0x80000000, 1, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000};
  for (int i = 0; i < 100003; ++i) floats.push_back(static_cast<uint32_t>(random()));
  for (const Processor& has : processors()) {
    const Bytes result = converted(Conversion::kF32ToBf16, floats, has);
    for (size_t i = 0; i < floats.size(); ++i) {
      uint16_t found;
      std::memcpy(&found, result.data() + 2 * i, 2);
      const float exact = float_of(floats[i]), nearest = float_of(static_cast<uint32_t>(found) << 16);
      if (std::isnan(exact)) {
        ASSERT_TRUE(std::isnan(nearest)) << std::hex << floats[i];
        continue;
      }
      const uint32_t towards_zero = floats[i] >> 16;
      const double below = float_of(towards_zero << 16);
      // One that is too large follows the largest number. Half the way there rounds to infinity.
      const bool is_largest = (towards_zero & 0x7FFF) == 0x7F7F;
      const double above = is_largest ? std::copysign(std::ldexp(1.0, 128), exact) : float_of((towards_zero + 1) << 16);
      const double to_below = std::abs(exact - below), to_above = std::abs(above - exact);
      const bool takes_below =
          std::isinf(exact) || to_below < to_above || (to_below == to_above && towards_zero % 2 == 0);
      ASSERT_EQ(found, takes_below ? towards_zero : towards_zero + 1) << std::hex << floats[i];
    }
  }
}

TEST(Convert, KeepsANanWhoseUpperHalfIsThatOfInfinity) {
  const std::vector<uint32_t> floats = {0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF};
  for (const Processor& has : processors()) {
    const Bytes result = converted(Conversion::kF32ToBf16, floats, has);
    for (size_t i = 0; i < floats.size(); ++i) {
      uint16_t found;
      std::memcpy(&found, result.data() + 2 * i, 2);
      EXPECT_TRUE(std::isnan(float_of(static_cast<uint32_t>(found) << 16))) << i;
      EXPECT_EQ(found >> 15, floats[i] >> 31) << i;
    }
  }
}

void expect_round_trips(Conversion there, Conversion back, uint16_t infinity, uint16_t quiet_nan) {
  std::vector<uint16_t> all(1 << 16);
  std::iota(all.begin(), all.end(), uint16_t{0});
  for (const Processor& has : processors()) {
    std::vector<uint32_t> floats(all.size());
    convert(there, reinterpret_cast<std::byte*>(floats.data()), reinterpret_cast<const std::byte*>(all.data()),
            all.size() * 2, has);
    const Bytes result = converted(back, floats, has);
    for (size_t i = 0; i < all.size(); ++i) {
      uint16_t found;
      std::memcpy(&found, result.data() + 2 * i, 2);
      if ((all[i] & 0x7FFF) > infinity) {
        ASSERT_EQ(found & quiet_nan, quiet_nan) << i;
        ASSERT_EQ(found >> 15, all[i] >> 15) << i;
      } else {
        ASSERT_EQ(found, all[i]);
      }
    }
  }
}

TEST(Convert, ReturnsFromEveryShorterNumberToItself) {
  expect_round_trips(Conversion::kBf16ToF32, Conversion::kF32ToBf16, 0x7F80, 0x7FC0);
  expect_round_trips(Conversion::kF16ToF32, Conversion::kF32ToF16, 0x7C00, 0x7E00);
}

TEST(Convert, GivesTheSameNumbersWithAndWithoutVectorInstructions) {
  const Bytes stored = random_bytes(400004, 7);
  for (const Conversion conversion : {Conversion::kF32ToF16, Conversion::kF32ToBf16, Conversion::kF16ToF32,
                                      Conversion::kF16ToBf16, Conversion::kBf16ToF32, Conversion::kBf16ToF16}) {
    Bytes first(result_bytes(conversion, stored.size()));
    convert(conversion, first.data(), stored.data(), stored.size(), {});
    for (const Processor& has : processors()) {
      Bytes result(first.size());
      convert(conversion, result.data(), stored.data(), stored.size(), has);
      EXPECT_EQ(result, first) << static_cast<int>(conversion);
    }
  }
}

TEST(Permutation, IsTheSameWithAndWithoutVectorInstructions) {
  std::mt19937_64 random(1);
  for (size_t turn = 0; turn < 2000; ++turn) {
    const uint64_t n = 1 + (random() >> (2 + random() % 60));
    auto a = static_cast<uint64_t>(std::ceil(std::sqrt(static_cast<double>(n))));
    const uint64_t b = (n + a - 1) / a;
    std::vector<uint64_t> keys(8);
    std::generate(keys.begin(), keys.end(), random);
    std::vector<int64_t> positions;
    for (size_t i = 0; i < 40; ++i) {
      const uint64_t row = random() % a * b;  // its ends are where a quotient is easily wrong
      for (const uint64_t position : {row, row - 1, random()}) positions.push_back(static_cast<int64_t>(position % n));
    }
    std::vector<int64_t> first(positions.size()), images(positions.size());
    permute({n, a, b, keys}, positions, first);
    for (const Processor& has : processors()) {
      permute({n, a, b, keys}, positions, images, has);
      ASSERT_EQ(images, first) << "n=" << n;
    }
  }
}

TEST(Convert, SwapsBytesOfEachElement) {
  for (const auto& [conversion, element] :
       {std::pair{Conversion::kSwap2, 2}, {Conversion::kSwap4, 4}, {Conversion::kSwap8, 8}}) {
    const Bytes stored = random_bytes(static_cast<size_t>(element) * 33, 5);
    for (const Processor& has : processors()) {
      Bytes result(stored.size());
      convert(conversion, result.data(), stored.data(), stored.size(), has);
      for (size_t i = 0; i < stored.size(); ++i) {
        const size_t mirrored = i / element * element + (element - 1 - i % element);
        ASSERT_EQ(result[i], stored[mirrored]);
      }
    }
  }
}

TEST(Pickle, ClaimsOnlyWhatItHasAndIsReadNoFurtherThanItsEnd) {
  constexpr char kWhole[] = "\x80\x02(X\x03\0\0\0abcq\x01J\x01\0\0\0r\x02\0\0\0ccollections\nT\np3\nI7\nt.";
  for (size_t length = 0; length < sizeof(kWhole); ++length) {
    const std::vector<uint8_t> cut(kWhole, kWhole + length);  // ends where its memory ends
    EXPECT_EQ(pickle_claims_too_much(cut), length >= 4 && length < 11)
        << length;  // three bytes of text are announced, but missing
  }
}

TEST(File, RefusesAFileThatIsNotTheOneThatWasIndexed) {
  TemporaryFolder folder;
  const std::string path = folder.write("a", random_bytes(100, 1));
  const Error error = error_of([&] { File::open_for_reading(path, FileIdentity{99, 0}); });
  EXPECT_EQ(error.code, ErrorCode::kCorrupt);
  EXPECT_NE(error.message.find("99 bytes then, 100 bytes now"), std::string::npos) << error.message;
  EXPECT_EQ(error_of([&] { File::open_for_reading(path, FileIdentity{100, 0}); }).code, ErrorCode::kCorrupt);
  EXPECT_NO_THROW(File::open_for_reading(path, FileIdentity{100, FileIdentity::kAnyTime}));
}

// Calls it in a child that has no /proc. Returns nothing if /proc cannot be hidden.
std::optional<int> without_proc(const std::function<int()>& call) {
  constexpr int kMayNotHide = 255;
  const pid_t child = ::fork();
  if (child == 0) {
    const bool hidden = ::unshare(CLONE_NEWNS) == 0 &&
                        ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                        ::mount("none", "/proc", "tmpfs", 0, nullptr) == 0;
    ::_exit(hidden ? call() : kMayNotHide);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status));
  const int result = WEXITSTATUS(status);
  return result == kMayNotHide ? std::nullopt : std::optional(result);
}

TEST(File, ThatIsReplacedWhereThereIsNoProcIsNotMixedWithTheNewOne) {
  const TemporaryFolder folder;
  const std::string path = folder.write("a", random_bytes(8192, 1));
  if (File::open_for_reading(path)->direct() < 0) GTEST_SKIP() << "no O_DIRECT for " << path;
  const auto is_direct = [&](bool replaces) {
    return without_proc([&] {
      const auto file = File::open_for_reading(path);
      if (replaces) std::filesystem::rename(folder.write("b", random_bytes(8192, 2)), path);
      return file->direct() >= 0 ? 1 : 0;
    });
  };
  if (!is_direct(false)) GTEST_SKIP() << "only root can hide /proc";
  EXPECT_EQ(is_direct(false), 1);
  EXPECT_EQ(is_direct(true), 0);
}

TEST(File, NamesWhatItCouldNotOpen) {
  const Error error = error_of([] { File::open_for_reading("/nowhere/at all"); });
  EXPECT_EQ(error.code, ErrorCode::kNotFound);
  EXPECT_NE(error.message.find("/nowhere/at all"), std::string::npos);
  EXPECT_EQ(error_of([] { File::open_for_reading("/"); }).code, ErrorCode::kInvalidArgument);
}

TEST(File, ReadsEachOfManyPlacesInMemoryOrNotAndZerosBehindItsEnd) {
  TemporaryFolder folder;
  const Bytes content = random_bytes(1 << 20, 3);
  const std::string path = folder.write("a", content);
  const Descriptor file(::open(path.c_str(), O_RDONLY));
  const std::vector<int64_t> offsets{700'001, 0, (1 << 20) - 5, 4095, 0, 5 << 20};
  constexpr size_t kLength = 30;
  for (const bool in_memory : {true, false}) {
    if (!in_memory) {
      ASSERT_EQ(::fsync(file.get()), 0);
      ::posix_fadvise(file.get(), 0, 0, POSIX_FADV_DONTNEED);
    }
    Bytes found(offsets.size() * kLength, std::byte{1});
    read_each(file.get(), path, offsets, kLength, found.data());
    for (size_t i = 0; i < offsets.size(); ++i) {
      for (size_t j = 0; j < kLength; ++j) {
        const size_t at = static_cast<size_t>(offsets[i]) + j;
        ASSERT_EQ(found[i * kLength + j], at < content.size() ? content[at] : std::byte{0}) << i << " " << j;
      }
    }
  }
}

TEST(File, LeavesThePageCacheAsItWasWhenItReadsEachOfManyPlaces) {
  TemporaryFolder folder;
  const std::string path = folder.write("a", random_bytes(4 << 20, 3));
  const Descriptor descriptor(::open(path.c_str(), O_RDONLY));
  drop_from_page_cache(path);
  const auto file = File::open_for_reading(path);
  if (file->residency(0, 4 << 20) != File::Residency::kNone) GTEST_SKIP() << "the file's system is memory";
  Bytes found(3 * 30);
  ASSERT_EQ(::pread(file->buffered(), found.data(), 30, 2 << 20), 30);
  read_each(descriptor.get(), path, std::vector<int64_t>{0, 2 << 20, (3 << 20) - 10}, 30, found.data());
  EXPECT_EQ(file->residency(0, 2 << 20), File::Residency::kNone);
  EXPECT_EQ(file->residency(2 << 20, 30), File::Residency::kAll) << "it was there before";
  EXPECT_EQ(file->residency((2 << 20) + 8192, 1 << 20), File::Residency::kNone);
}

TEST(Heads, ThreadsReadThoseOfManyFiles) {
  TemporaryFolder folder;
  constexpr size_t kFiles = 200, kLength = 40;
  std::vector<Bytes> contents;
  std::vector<std::string> paths;
  for (size_t i = 0; i < kFiles; ++i) {
    contents.push_back(random_bytes(i, i));
    paths.push_back(folder.write(std::to_string(i), contents.back()));
  }
  const auto read = [&](size_t threads, std::vector<int64_t>& sizes, Bytes& bytes) {
    std::vector<int64_t> lengths(paths.size()), times(paths.size());
    sizes.resize(paths.size());
    bytes.assign(paths.size() * kLength, std::byte{1});
    const Heads heads{bytes.data(), lengths.data(), sizes.data(), times.data()};
    return read_heads(PathList(paths), kLength, threads, heads);
  };
  std::vector<int64_t> sizes;
  Bytes bytes;
  for (const size_t threads : {1, 4, 100}) {
    ASSERT_EQ(read(threads, sizes, bytes), std::nullopt);
    for (size_t i = 0; i < kFiles; ++i) {
      ASSERT_EQ(sizes[i], static_cast<int64_t>(i));
      contents[i].resize(kLength);
      ASSERT_TRUE(std::equal(contents[i].begin(), contents[i].end(), bytes.begin() + i * kLength)) << i;
      contents[i].resize(i);
    }
  }
  paths.insert(paths.begin() + 150, "nowhere");
  for (const size_t threads : {1, 4, 100}) EXPECT_EQ(read(threads, sizes, bytes), 150u);
}

TEST(File, NamesThePlaceThatCouldNotBeRead) {
  Bytes found(30);
  const std::vector<int64_t> offsets{4096};
  const Error error = error_of([&] { read_each(-1, "gone", offsets, found.size(), found.data()); });
  EXPECT_EQ(error.code, ErrorCode::kIo);
  EXPECT_EQ(error.offset, 4096u);
  EXPECT_NE(error.message.find("gone"), std::string::npos) << error.message;
}

TEST(FileTable, ServesMoreFilesThanItKeepsOpen) {
  TemporaryFolder folder;
  std::vector<std::string> paths;
  const DescriptorLimit low(1000);
  for (int i = 0; i < 2000; ++i) paths.push_back(folder.write(std::to_string(i), random_bytes(1, i)));
  const auto table = table_of(paths);
  const auto held = table->get(0);
  for (int round = 0; round < 2; ++round) {
    for (uint32_t i = 0; i < paths.size(); ++i) ASSERT_EQ(table->get(i)->path(), paths[i]);
  }
  EXPECT_LT(count_descriptors(), 600u);
  std::byte byte{};
  EXPECT_EQ(::pread(held->buffered(), &byte, 1, 0), 1) << "a file in use was closed";
}

TEST(FileTable, MapsFilesAtOnceOnlyWhileMappingsAreLeft) {
  if (!can_take_mappings()) GTEST_SKIP() << "this system allows too many mappings";
  TemporaryFolder folder;
  std::vector<std::string> paths;
  const DescriptorLimit low(200);
  for (int i = 0; i < 100; ++i) paths.push_back(folder.write(std::to_string(i), random_bytes(1, i)));
  const auto table = table_of(paths);
  EXPECT_TRUE(table->get(0)->had_short_read());
  auto mappings = take_mappings(paths[0]);
  EXPECT_FALSE(table->get(1)->had_short_read());
  mappings.clear();
  EXPECT_TRUE(table->get(2)->had_short_read());
}

TEST(FileTable, ServesGivenFilesAsTheyWereOpenedAndOthersByName) {
  TemporaryFolder folder;
  const std::string given = folder.write("given", random_bytes(10, 1)),
                    named = folder.write("named", random_bytes(20, 2));
  const auto opened = File::open_for_reading(given);
  FileTable table({given, named}, {}, {opened, nullptr});
  std::filesystem::remove(given);
  EXPECT_EQ(table.get(0), opened);
  EXPECT_EQ(table.get(1)->size_bytes(), 20u);
  EXPECT_EQ(table.get(1), table.get(1));
  const Error error = error_of([&] { FileTable({given, named}, {}, {opened}); });
  EXPECT_EQ(error.code, ErrorCode::kInvalidArgument);
}

TEST(Crc32, IsZipsOfAnyLengthAndAlignment) {
  const char* digits = "123456789";
  EXPECT_EQ(crc32(reinterpret_cast<const std::byte*>(digits), 9), 0xCBF43926u)
      << "the value that catalogues of CRCs give";
  const Bytes bytes = random_bytes(5000, 1);
  for (size_t length = 0; length < 300; ++length) {
    for (const size_t offset : {0, 1, 15}) {
      ASSERT_EQ(crc32(bytes.data() + offset, length), crc32_by_table(bytes.data() + offset, length)) << length;
    }
  }
}

TEST(Crc32, OfPartsIsThatOfTheWhole) {
  const Bytes bytes = random_bytes(100'003, 2);
  const uint32_t whole = crc32(bytes.data(), bytes.size());
  for (const size_t cut : {size_t{0}, size_t{1}, size_t{4096}, size_t{65537}, bytes.size() - 1, bytes.size()}) {
    const uint32_t first = crc32(bytes.data(), cut), second = crc32(bytes.data() + cut, bytes.size() - cut);
    EXPECT_EQ(crc32_joined(first, second, bytes.size() - cut), whole) << "cut at " << cut;
  }
}

TEST(Crc32c, IsThatOfTheRfcOfAnyLengthAndAlignment) {
  const char* digits = "123456789";
  EXPECT_EQ(crc32c(reinterpret_cast<const std::byte*>(digits), 9), 0xE3069283u) << "the value that RFC 3720 implies";
  const std::vector<std::byte> zeros(32);  // from appendix B.4
  EXPECT_EQ(crc32c(zeros.data(), zeros.size()), 0x8A9136AAu);
  const Bytes bytes = random_bytes(40'000, 1);
  for (size_t length = 0; length < 300; ++length) {
    for (const size_t offset : {0, 1, 15}) {
      ASSERT_EQ(crc32c(bytes.data() + offset, length), crc32c_by_table(bytes.data() + offset, length)) << length;
    }
  }
  for (const size_t length : {6143, 6144, 6145, 12'287, 12'288, 18'500, 39'990}) {  // 3 lanes, 6 lanes, others
    EXPECT_EQ(crc32c(bytes.data() + 3, length, 77), crc32c_by_table(bytes.data() + 3, length, 77)) << length;
  }
}

TEST(Crc32c, OfPartsIsThatOfTheWhole) {
  const Bytes bytes = random_bytes(100'003, 2);
  const uint32_t whole = crc32c(bytes.data(), bytes.size());
  for (const size_t cut : {size_t{0}, size_t{1}, size_t{4096}, size_t{65537}, bytes.size() - 1, bytes.size()}) {
    const uint32_t first = crc32c(bytes.data(), cut), second = crc32c(bytes.data() + cut, bytes.size() - cut);
    EXPECT_EQ(crc32c_joined(first, second, bytes.size() - cut), whole) << "cut at " << cut;
    EXPECT_EQ(crc32c(bytes.data() + cut, bytes.size() - cut, first), whole) << "cut at " << cut;
  }
}

TEST(Mapping, TurnsATruncatedFileIntoAMarkNotASignal) {
  TemporaryFolder folder;
  const std::string path = folder.write("a", random_bytes(1 << 20, 1));
  const auto file = File::open_for_reading(path);
  Mapping& mapping = *file->mapping();
  std::filesystem::resize_file(path, 4096);
  MappingGuard::install_handler();
  Bytes copy(1 << 20);
  {
    MappingGuard guard(mapping);
    std::memcpy(copy.data(), mapping.data(), copy.size());
  }
  EXPECT_EQ(copy.back(), std::byte{0});  // the copy is used, so no compiler leaves it out
  EXPECT_EQ(mapping.lost_from(), 4096u) << "and what lies before it is still good";
}

TEST(CopyBytes, CopiesEveryByteAndNoOtherAtAnyAlignmentAndLength) {
  constexpr size_t kMost = 600'000, kAround = 200;
  const Bytes source = random_bytes(kMost + kAround, 1);
  for (const size_t length :
       {size_t{0}, size_t{1}, size_t{4095}, size_t{262'143}, size_t{262'144}, size_t{262'207}, kMost}) {
    for (const size_t to : {0, 1, 16, 63, 64}) {
      for (const size_t from : {0, 1, 64, 100}) {
        Bytes target(kMost + kAround, std::byte{7});
        const Processor has = from == 1 ? Processor{} : processor();
        copy_bytes(target.data() + to, source.data() + from, length, has);
        ASSERT_EQ(std::memcmp(target.data() + to, source.data() + from, length), 0)
            << length << " " << to << " " << from;
        const auto untouched = [](std::byte one) { return one == std::byte{7}; };
        ASSERT_TRUE(std::all_of(target.begin(), target.begin() + to, untouched));
        ASSERT_TRUE(std::all_of(target.begin() + to + length, target.end(), untouched));
      }
    }
  }
}

TEST(Trial, IsDueNowAndThenWhereItDoesNotPayAndAlwaysWhereItDoes) {
  constexpr int kRanges = 160;
  Trial trial;
  const auto due = [&](bool pays) {
    int count = 0;
    for (int i = 0; i < kRanges; ++i) {
      if (!trial.is_due()) continue;
      ++count;
      trial.ended(pays);
    }
    return count;
  };
  EXPECT_EQ(due(true), kRanges);
  EXPECT_LE(due(false), kRanges / 8);
  EXPECT_GE(due(false), kRanges / 32);
  EXPECT_GE(due(true), kRanges * 7 / 8) << "it pays from somewhere on";
}

TEST(Sync, GoesOnAfterASignal) {
  const TemporaryFolder folder;
  const auto file = File::open_for_writing(folder.write("a", random_bytes(100, 1)), /*create=*/false);
  interrupted_syncs = 3;
  sync_file(*file);
  EXPECT_EQ(std::exchange(interrupted_syncs, 3), 0);
  sync_folder_of(file->path());
  EXPECT_EQ(interrupted_syncs, 0);
}

TEST(Mapping, IsCopiedFromAtTheLatestWhenARangeComesAgain) {
  TemporaryFolder folder;
  const auto file = File::open_for_reading(folder.write("a", random_bytes(4 << 20, 1)));
  Mapping& mapping = *file->mapping();
  constexpr int kMadvPopulateRead = 22;
  if (::madvise(const_cast<std::byte*>(mapping.data()), 4096, kMadvPopulateRead) != 0) {
    GTEST_SKIP() << "this kernel has no MADV_POPULATE_READ";
  }
  sync_file(*file);
  ::posix_fadvise(file->buffered(), 0, 0, POSIX_FADV_DONTNEED);
  for (off_t at = 0; at < 4 << 20; at += 4096) {  // page by page, so that mapping them is slow
    std::byte byte;
    ASSERT_EQ(::pread(file->buffered(), &byte, 1, at), 1);
  }
  for (uint64_t i = 0; i < 4; ++i) mapping.map_for_copying(i << 18, 1 << 18);  // the first one is tried in any case
  EXPECT_TRUE(mapping.map_for_copying(0, 1 << 20)) << "each part of it is mapped or has been there";
  EXPECT_TRUE(mapping.map_for_copying(100'000, 500'000)) << "it is mapped already";
  const bool at_once = mapping.map_for_copying(2 << 20, 1 << 20);
  if (!at_once) {
    EXPECT_FALSE(mapping.map_for_copying((3 << 20) - 1, 1 << 20)) << "its first byte alone has been there";
  }
  EXPECT_TRUE(mapping.map_for_copying(2 << 20, 1 << 20));
}

TEST(Mapping, LeavesOtherBusErrorsToTheHandlerBefore) {
  TemporaryFolder folder;
  const std::string path = folder.write("a", random_bytes(1 << 20, 1));
  const auto file = File::open_for_reading(path);
  const std::byte* data = file->mapping()->data();
  std::filesystem::resize_file(path, 4096);
  ASSERT_EXIT(
      {
        MappingGuard::install_handler();
        const auto* volatile outside_any_guard = data + 500000;
        std::exit(static_cast<int>(*outside_any_guard));
      },
      [](int status) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
        return !WIFEXITED(status) || WEXITSTATUS(status) != 0;
#else
        return WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS;
#endif
      },
      "");
}

}  // namespace
}  // namespace gdsdata::testing
