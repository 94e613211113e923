// The layout of a segment in staging memory, and its copies to the device.
#include "engine/staging.h"

#include <algorithm>
#include <deque>
#include <random>

#include "base/extent_math.h"
#include "testing.h"

namespace gdsdata::testing {
namespace {

// Transfers as groups have them, to addresses that are never accessed: runs that are contiguous in
// file and device, records that are contiguous only on the device, and scattered ones.
std::vector<Transfer> random_transfers(std::mt19937_64& random, uint64_t most_bytes, size_t most_parts) {
  std::vector<Transfer> transfers;
  std::vector<uint64_t> lengths = {1, 63, 64, 65, 4095, 4096, 4097, 65535, 65536, 65537, 1 + random() % 300000};
  auto* device = reinterpret_cast<std::byte*>(uint64_t{1} << 40);
  uint64_t total = 0;
  const uint64_t kind = random() % 4;
  while (transfers.size() < most_parts) {
    const uint64_t length = kind == 0 ? 1 + random() % 200 : lengths[random() % lengths.size()];
    if (total + length > most_bytes) break;
    total += length;
    Transfer next{static_cast<uint32_t>(random() % 3), random() % (1 << 30), length, device};
    const bool goes_on = random() % 3 != 0;
    if (!transfers.empty() && goes_on) {
      next.file = transfers.back().file;
      next.offset = transfers.back().offset + transfers.back().length;
    } else if (!transfers.empty() && random() % 2 == 0) {  // another file, congruent to the end of the previous one
      next.offset = align_down(next.offset, 4096) + (transfers.back().offset + transfers.back().length) % 4096;
    }
    if (kind == 3 ? random() % 2 == 0 : random() % 20 == 0) next.memory += 1 + random() % 5000;
    device = next.memory + length;
    transfers.push_back(next);
    if (kind == 2 && random() % 10 == 0) device += 1 << 20;
  }
  return transfers;
}

struct Span {
  const std::byte* begin;
  const std::byte* end;
  bool overlaps(const Span& other) const { return begin < other.end && other.begin < end; }
};

Span span_of(const Transfer& transfer) { return {transfer.memory, transfer.memory + transfer.length}; }

Span pages_of(const Span& span) {
  const auto begin = reinterpret_cast<uint64_t>(span.begin), end = reinterpret_cast<uint64_t>(span.end);
  return {reinterpret_cast<const std::byte*>(align_down(begin, 4096)),
          reinterpret_cast<const std::byte*>(align_up(end, 4096))};
}

bool goes_on(const Transfer& before, const Transfer& after) {
  return before.file == after.file && before.offset + before.length == after.offset &&
         before.memory + before.length == after.memory;
}

void expect_well_placed(const std::vector<Transfer>& asked, const std::vector<Transfer>& placed,
                        const Staging::Place& place, Span memory) {
  const Span room{place.memory, place.memory + place.bytes};
  ASSERT_TRUE(room.begin >= memory.begin && room.end <= memory.end) << "a place outside the staging memory";
  // Pages of runs that storage may write as a whole, and bytes of the others.
  std::vector<Span> owned;
  for (size_t first = 0; first < asked.size();) {
    size_t last = first + 1;
    while (last < asked.size() && goes_on(asked[last - 1], asked[last])) ++last;
    const uint64_t length = asked[last - 1].offset + asked[last - 1].length - asked[first].offset;
    const bool paged = length >= Staging::kPagedBytes;
    for (size_t i = first; i < last; ++i) {
      ASSERT_TRUE(span_of(placed[i]).begin >= room.begin && span_of(placed[i]).end <= room.end) << "transfer " << i;
      ASSERT_TRUE(place.holds(placed[i].memory));
      if (paged) {
        ASSERT_EQ(reinterpret_cast<uint64_t>(placed[i].memory) % 4096, asked[i].offset % 4096) << "transfer " << i;
        ASSERT_EQ(placed[i].memory - placed[first].memory,
                  static_cast<ptrdiff_t>(asked[i].offset - asked[first].offset));
      } else {
        owned.push_back(span_of(placed[i]));
      }
    }
    if (paged) {
      const Span stretch{span_of(placed[first]).begin, span_of(placed[last - 1]).end};
      owned.push_back(place.has_pages_of({asked[first].offset, length, placed[first].memory}) ? pages_of(stretch)
                                                                                              : stretch);
    }
    first = last;
  }
  std::sort(owned.begin(), owned.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < owned.size(); ++i) ASSERT_LE(owned[i - 1].end, owned[i].begin) << "two share bytes, or a page";
  // The copies move each byte from its staging place to its target, and no other byte.
  uint64_t copied = 0, transferred = 0;
  for (const Staging::Run& run : place.runs) copied += run.bytes;
  size_t at = 0;
  for (size_t i = 0; i < asked.size(); ++i) {
    transferred += asked[i].length;
    while (at < place.runs.size() && (asked[i].memory < place.runs[at].device ||
                                      asked[i].memory >= place.runs[at].device + place.runs[at].bytes)) {
      ++at;
    }
    ASSERT_LT(at, place.runs.size()) << "no copy moves transfer " << i;
    const Staging::Run& run = place.runs[at];
    ASSERT_LE(asked[i].memory + asked[i].length, run.device + run.bytes);
    ASSERT_EQ(run.host + (asked[i].memory - run.device), placed[i].memory) << "transfer " << i << " goes elsewhere";
  }
  ASSERT_EQ(copied, transferred);
}

TEST(Staging, EachTransferHasItsOwnMemoryAndCopiesToItsDestination) {
  constexpr uint64_t kRoomBytes = 2 << 20;
  const auto device = host_device();
  Staging staging(*device, kRoomBytes);
  const auto piece_of = [&](const Staging::Place& place) {
    for (const auto& memory : staging.memory()) {
      const Span piece{memory.data(), memory.data() + memory.size()};
      if (place.memory >= piece.begin && place.memory < piece.end) return piece;
    }
    return Span{};
  };
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    std::deque<Staging::Place> held;
    for (int step = 0; step < 20; ++step) {
      const std::vector<Transfer> asked = random_transfers(random, 1 + random() % 900000, 1 + random() % 1000);
      std::vector<Transfer> placed = asked;
      Staging::Place place;
      while (!staging.place(placed, place)) {
        ASSERT_FALSE(held.empty()) << "an empty arena had no room";
        for (size_t i = 0; i < asked.size(); ++i)
          ASSERT_EQ(placed[i].memory, asked[i].memory) << "changed all the same";
        std::swap(held.front(), held[random() % held.size()]);
        staging.release(held.front());
        held.pop_front();
      }
      if (asked.empty()) continue;
      ASSERT_NO_FATAL_FAILURE(expect_well_placed(asked, placed, place, piece_of(place)));
      for (const Staging::Place& other : held) {
        ASSERT_FALSE(
            (Span{other.memory, other.memory + other.bytes}.overlaps({place.memory, place.memory + place.bytes})));
      }
      held.push_back(std::move(place));
    }
    for (Staging::Place& place : held) staging.release(place);
    std::vector<Transfer> all = {{0, 4096, kRoomBytes, nullptr}}, first = {{0, 4096, Staging::kFirstBytes, nullptr}};
    Staging::Place place, place_of_first;
    ASSERT_TRUE(staging.place(all, place) && staging.place(first, place_of_first)) << "not all of it came back";
    staging.release(place);
    staging.release(place_of_first);
  }
}

TEST(Staging, SamplesOfWholePagesAreOneCopy) {
  const auto device = host_device();
  Staging staging(*device, 2 << 20);
  auto* const batch = reinterpret_cast<std::byte*>(uint64_t{1} << 40);
  const auto copies_of = [&](uint64_t header_bytes, uint64_t sample_bytes) {
    std::vector<Transfer> samples;
    for (uint32_t i = 0; i < 4; ++i) samples.push_back({i, header_bytes, sample_bytes, batch + i * sample_bytes});
    Staging::Place place;
    EXPECT_TRUE(staging.place(samples, place));
    const std::pair found(place.runs.size(), place.has_pages_of({header_bytes, sample_bytes, samples.front().memory}));
    staging.release(place);
    return found;
  };
  EXPECT_EQ(copies_of(0, 128 << 10), std::pair(size_t{1}, true)) << "and no page is shared";
  EXPECT_EQ(copies_of(128, 128 << 10), std::pair(size_t{1}, false)) << "as of .npy files, whose header is 128 bytes";
  EXPECT_EQ(copies_of(128, 100'000), std::pair(size_t{4}, true)) << "each lies on its page as in its file";
}

TEST(Staging, AnySegmentOfTheLargestSizeFits) {
  const auto device = host_device();
  auto* const base = reinterpret_cast<std::byte*>(uint64_t{1} << 40);
  for (const uint64_t segment_bytes : {uint64_t{65536} + kCutBytes, uint64_t{200000}, uint64_t{1} << 20}) {
    Staging staging(*device, Staging::most_bytes(segment_bytes));
    const auto expect_room = [&](std::vector<Transfer> transfers, const std::string& which) {
      Staging::Place place;
      EXPECT_TRUE(staging.place(transfers, place)) << which << ", of " << segment_bytes << " bytes";
      staging.release(place);
    };
    for (uint64_t seed = 0; seed < 30; ++seed) {
      std::mt19937_64 random(seed);
      expect_room(random_transfers(random, segment_bytes, 1024), "seed " + std::to_string(seed));
    }
    // The worst cases: records that waste most of a line, runs that waste most of a page twice.
    std::vector<Transfer> lines, pages;
    uint64_t left = segment_bytes;
    for (uint64_t i = 0; i < 1023; ++i, --left) lines.push_back({0, i * 1000, 1, base + i * 1000});
    lines.push_back({0, (uint64_t{1} << 30) + 4095, left, base + (1 << 30)});
    expect_room(lines, "1023 single bytes and a long stretch");
    left = segment_bytes;
    for (uint64_t i = 0; left > 65537; ++i, left -= 65537) {
      pages.push_back({0, (i << 20) + 4095, 65536, base + (i << 20)});
      pages.push_back({0, (i << 20) + (512 << 10), 1, base + (i << 20) + (512 << 10)});
    }
    while (pages.size() < 1024 && left > 0) pages.push_back({1, left-- << 20, 1, base + (left << 20)});
    expect_room(pages, "stretches of 64 KiB and single bytes by turns");
  }
}

TEST(Staging, TakesLittleMemoryUntilThatIsFullOrALongSegmentComes) {
  constexpr uint64_t kAll = 8 << 20;
  auto* const base = reinterpret_cast<std::byte*>(uint64_t{1} << 40);
  const auto sizes_after = [&](std::vector<uint64_t> segments, uint64_t bytes, size_t expect_placed) {
    const auto device = host_device();
    Staging staging(*device, bytes);
    std::deque<Staging::Place> held;
    for (const uint64_t length : segments) {
      std::vector<Transfer> transfers{{0, 0, length, base}};
      held.emplace_back();
      if (!staging.place(transfers, held.back())) held.pop_back();
    }
    EXPECT_EQ(held.size(), expect_placed);
    std::vector<uint64_t> sizes;
    for (const auto& memory : staging.memory()) sizes.push_back(memory.size());
    for (Staging::Place& place : held) staging.release(place);
    std::vector<Transfer> again{{0, 0, segments.front(), base}};
    Staging::Place place;
    EXPECT_TRUE(staging.place(again, place));
    staging.release(place);
    EXPECT_EQ(staging.memory().size(), sizes.size()) << "released memory is not used again";
    return sizes;
  };
  const uint64_t first = Staging::kFirstBytes;
  using Sizes = std::vector<uint64_t>;
  EXPECT_EQ(sizes_after({1 << 20}, kAll, 1), Sizes{first});
  EXPECT_EQ(sizes_after({1 << 20, 1 << 20}, kAll, 2), (Sizes{first, kAll}));
  EXPECT_EQ(sizes_after({1 << 20, 2 << 20}, kAll, 2), (Sizes{first, kAll}));
  EXPECT_EQ(sizes_after({2 << 20, 1 << 20}, kAll, 2), Sizes{kAll});
  EXPECT_EQ(sizes_after({4 << 20, 4 << 20, 1 << 20}, kAll, 2), Sizes{kAll});
  EXPECT_EQ(sizes_after({1 << 20, 1 << 20}, first, 1), Sizes{first});
}

}  // namespace
}  // namespace gdsdata::testing
