// Segments of random groups have every byte once, in order, within the limits.
#include "engine/segmentation.h"

#include <algorithm>
#include <array>
#include <random>

#include "base/extent_math.h"
#include "testing.h"

namespace gdsdata::testing {
namespace {

constexpr uint64_t kMiB = 1 << 20;

// A group with transfers of many lengths. Its memory is never accessed.
struct RandomGroup {
  explicit RandomGroup(uint64_t seed) : random(seed) {
    direction = random() % 2 == 0 ? Direction::kRead : Direction::kWrite;
    if (direction == Direction::kRead) {
      conversion = std::array{Conversion::kNone, Conversion::kU16ToI64, Conversion::kSwap8}[random() % 3];
    }
    const uint64_t element_bytes = stored_element_bytes(conversion);
    const uint64_t longest_bytes = uint64_t{1} << (random() % 28);
    const size_t count = random() % 3 == 0 ? random() % 5000 : random() % 40;
    uint64_t offset = 0;
    auto* memory = reinterpret_cast<std::byte*>(uintptr_t{4096});
    for (size_t i = 0; i < count; ++i) {
      const uint64_t length = random() % (longest_bytes + 1) / element_bytes * element_bytes;
      if (random() % 4 != 0) offset += random() % 10'000;  // else it follows the previous one
      transfers.push_back({static_cast<uint32_t>(random() % 3), offset, length, memory});
      offset += length;
      memory += result_bytes(conversion, length);
    }
    limits.read_bytes = 4096u << (random() % 12);
    limits.write_bytes = limits.read_bytes << (random() % 3);
    limits.request_bytes = 65536u << (random() % 5);
    limits.workers = 1 + random() % 16;
    if (random() % 2 == 0) limits.least_read_bytes = 4096u << (random() % 9);
    if (random() % 2 == 0) limits.least_moved_bytes = 4096u << (random() % 9);
    if (random() % 4 == 0) limits.parts = 1 + random() % 30;
  }

  std::mt19937_64 random;
  Direction direction = Direction::kRead;
  Conversion conversion = Conversion::kNone;
  std::vector<Transfer> transfers;
  SegmentLimits limits;
};

constexpr uint64_t kGroups = 600;

TEST(Segmentation, PartsCoverEveryByteOfTheTransfersOnceAndInOrder) {
  Segmentation result;
  for (uint64_t seed = 0; seed < kGroups; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const RandomGroup group(seed);
    segment(group.transfers, group.direction, group.conversion, group.limits, result);
    auto part = result.parts.begin();
    uint64_t bytes = 0;
    for (const Transfer& transfer : group.transfers) {
      for (uint64_t done = 0; done < transfer.length; ++part) {
        ASSERT_NE(part, result.parts.end());
        ASSERT_GT(part->length, 0u);
        ASSERT_EQ(part->file, transfer.file);
        ASSERT_EQ(part->offset, transfer.offset + done);
        ASSERT_EQ(part->memory, transfer.memory + result_bytes(group.conversion, done));
        ASSERT_EQ(part->length % stored_element_bytes(group.conversion), 0u);
        done += part->length;
        ASSERT_LE(done, transfer.length);
      }
      bytes += transfer.length;
    }
    ASSERT_EQ(part, result.parts.end());
    ASSERT_EQ(result.bytes, bytes);
  }
}

TEST(Segmentation, SegmentsCoverEveryPartOnceAndInOrder) {
  Segmentation result;
  for (uint64_t seed = 0; seed < kGroups; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const RandomGroup group(seed);
    segment(group.transfers, group.direction, group.conversion, group.limits, result);
    size_t next = 0;
    for (const PartRange& range : result.segments) {
      ASSERT_EQ(range.first, next);
      ASSERT_TRUE(range.count > 0 || result.parts.empty());
      next += range.count;
    }
    ASSERT_EQ(next, result.parts.size());
  }
}

TEST(Segmentation, SegmentsKeepTheirLimitsOfBytesAndParts) {
  Segmentation result;
  for (uint64_t seed = 0; seed < kGroups; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const RandomGroup group(seed);
    const bool is_write = group.direction == Direction::kWrite;
    segment(group.transfers, group.direction, group.conversion, group.limits, result);
    const uint64_t limit_bytes = is_write ? group.limits.write_bytes : group.limits.read_bytes;
    const uint64_t part_bytes = longest_part_bytes(limit_bytes, group.limits.request_bytes) + kCutBytes;
    const uint64_t segment_bytes = is_write ? part_bytes : limit_bytes;
    for (const PartRange& range : result.segments) {
      ASSERT_LE(range.count, group.limits.parts);
      uint64_t bytes = 0;
      for (size_t i = range.first; i < range.first + range.count; ++i) {
        ASSERT_LE(result.parts[i].length, part_bytes);
        bytes += result.parts[i].length;
      }
      if (range.count > 1) {
        ASSERT_LE(bytes, segment_bytes);
      }
    }
  }
}

// Smaller segments would wake more workers than their bytes are worth.
TEST(Segmentation, ASegmentEndsOnlyIfTheNextPartWouldExceedALimit) {
  Segmentation result;
  for (uint64_t seed = 0; seed < kGroups; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const RandomGroup group(seed);
    segment(group.transfers, group.direction, group.conversion, group.limits, result);
    const bool is_write = group.direction == Direction::kWrite;
    const uint64_t limit_bytes = is_write ? group.limits.write_bytes : group.limits.read_bytes;
    const uint64_t share_bytes = align_up(result.bytes / group.limits.workers, kCutBytes);
    const uint64_t stored = stored_element_bytes(group.conversion),
                   moved = stored + result_element_bytes(group.conversion);
    const uint64_t least_bytes =
        std::max(group.limits.least_read_bytes, group.limits.least_moved_bytes * stored / moved);
    const uint64_t full_bytes = std::min(limit_bytes, std::max(is_write ? kMiB : least_bytes, share_bytes));
    for (size_t i = 0; i + 1 < result.segments.size(); ++i) {
      const PartRange& range = result.segments[i];
      uint64_t bytes = 0;
      for (size_t part = range.first; part <= range.first + range.count; ++part) bytes += result.parts[part].length;
      ASSERT_TRUE(bytes > full_bytes || range.count == group.limits.parts);
    }
  }
}

TEST(Segmentation, WorkersShareAGroupEvenly) {
  Segmentation result;
  std::vector<Transfer> transfers;
  for (uint64_t i = 0; i < 2048; ++i) transfers.push_back({0, i * 4096, 4096, nullptr});
  segment(transfers, Direction::kRead, Conversion::kNone, {16 * kMiB, 16 * kMiB, kMiB, 4}, result);
  ASSERT_EQ(result.segments.size(), 4u);
  for (const PartRange& range : result.segments) EXPECT_EQ(range.count, 512u);
}

TEST(Segmentation, SegmentsOfASharedGroupHaveAtLeastOneMebibyte) {
  Segmentation result;
  std::vector<Transfer> transfers;
  for (uint64_t i = 0; i < 512; ++i) transfers.push_back({0, i * 4096, 4096, nullptr});
  segment(transfers, Direction::kRead, Conversion::kNone, {16 * kMiB, 16 * kMiB, kMiB, 64}, result);
  ASSERT_EQ(result.segments.size(), 2u);
  for (const PartRange& range : result.segments) EXPECT_EQ(range.count, 256u);
}

TEST(Segmentation, AGroupOfNothingHasOneEmptySegment) {
  Segmentation result;
  const SegmentLimits limits{kMiB, kMiB, kMiB, 2};
  segment({}, Direction::kRead, Conversion::kNone, limits, result);
  ASSERT_EQ(result.segments.size(), 1u);
  EXPECT_EQ(result.segments[0].count, 0u);
  const std::vector<Transfer> of_no_bytes(3);
  segment(of_no_bytes, Direction::kRead, Conversion::kNone, limits, result);
  ASSERT_EQ(result.segments.size(), 1u);
  EXPECT_EQ(result.segments[0].count, 0u);
}

TEST(Segmentation, FullSegmentsOfAWriteAreOneRangeOfTheFile) {
  Segmentation result;
  std::vector<Transfer> transfers;
  std::mt19937_64 random(5);
  for (uint64_t offset = 0; offset < 40 * kMiB;) {
    const uint64_t length = 4096 * (1 + random() % 400);
    transfers.push_back({0, offset, length, nullptr});
    offset += length;
  }
  const SegmentLimits limits{8 * kMiB, 8 * kMiB, kMiB, 2};
  segment(transfers, Direction::kWrite, Conversion::kNone, limits, result);
  for (size_t i = 0; i + 1 < result.segments.size(); ++i) {  // the last one has the rest
    const PartRange& range = result.segments[i];
    const Transfer &first = result.parts[range.first], &last = result.parts[range.first + range.count - 1];
    EXPECT_EQ(last.offset + last.length - first.offset, 8 * kMiB) << "segment " << i << " is not full";
  }
}

}  // namespace
}  // namespace gdsdata::testing
