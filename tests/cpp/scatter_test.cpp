// Bytes that arrive in any order land where the pieces of a request want them.
#include "backend/scatter.h"

#include <algorithm>
#include <random>

#include "testing.h"

namespace gdsdata::testing {
namespace {

// A request of random pieces over the bytes of an object, and where its pieces should have them.
struct Scattered {
  Scattered(std::mt19937_64& random, Conversion chosen) : conversion(chosen) {
    const uint64_t element = stored_element_bytes(conversion);
    begin = element * (random() % 1000);
    const uint64_t elements = 1 + random() % 5000;
    object = random_bytes(begin + elements * element, random());
    const size_t count = 1 + random() % 20;
    std::vector<std::pair<uint64_t, uint64_t>> ranges;
    for (size_t i = 0; i < count; ++i) {
      const uint64_t first = random() % elements, length = 1 + random() % std::min<uint64_t>(elements - first, 700);
      ranges.emplace_back(begin + first * element, length * element);
    }
    std::sort(ranges.begin(), ranges.end());
    memory.resize(count);
    for (size_t i = 0; i < count; ++i) {
      memory[i].resize(result_bytes(conversion, ranges[i].second));
      pieces.push_back({.offset = ranges[i].first, .length = ranges[i].second, .memory = memory[i].data()});
      wanted += ranges[i].second;
    }
  }
  Request request() const {
    return {.conversion = conversion, .offset = begin, .length = object.size() - begin, .pieces = pieces};
  }
  void check() const {
    for (size_t i = 0; i < pieces.size(); ++i) {
      Bytes expected(memory[i].size());
      convert(conversion, expected.data(), object.data() + pieces[i].offset, pieces[i].length);
      ASSERT_EQ(memory[i], expected) << i;
    }
  }

  const Conversion conversion;
  uint64_t begin = 0, wanted = 0;
  Bytes object;
  std::vector<Bytes> memory;
  std::vector<Piece> pieces;
};

class ScatterOf : public ::testing::TestWithParam<Conversion> {};

TEST_P(ScatterOf, ChunksInAnyOrderFillEachPiece) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 300; ++round) {
    Scattered model(random, GetParam());
    std::vector<std::pair<uint64_t, uint64_t>> chunks;
    for (uint64_t at = model.begin; at < model.object.size();) {
      const uint64_t length = std::min<uint64_t>(model.object.size() - at, 1 + random() % 900);
      chunks.emplace_back(at, length);
      at += length;
    }
    if (round % 2 == 1) std::shuffle(chunks.begin(), chunks.end(), random);
    Scatter scatter(model.request());
    uint64_t taken = 0;
    for (const auto& [offset, length] : chunks) {
      // A copy of just the chunk, so that a sanitizer sees reads beyond it.
      const Bytes chunk(model.object.begin() + static_cast<ptrdiff_t>(offset),
                        model.object.begin() + static_cast<ptrdiff_t>(offset + length));
      taken += scatter.take(offset, chunk);
    }
    scatter.finish();
    EXPECT_EQ(taken, model.wanted);
    model.check();
    if (HasFatalFailure()) return;
  }
}

TEST_P(ScatterOf, BytesThatWereReceivedInTheirPlaceFillEachPiece) {
  std::mt19937_64 random(8);
  size_t in_place = 0;
  for (int round = 0; round < 300; ++round) {
    Scattered model(random, GetParam());
    Scatter scatter(model.request());
    uint64_t taken = 0;
    for (uint64_t at = model.begin; at < model.object.size();) {
      const uint64_t most = std::min<uint64_t>(model.object.size() - at, 1 + random() % 900);
      std::span<std::byte> place = scatter.memory_at(at);
      Bytes elsewhere(most);
      if (place.empty()) place = elsewhere;
      place = place.first(std::min<size_t>(place.size(), most));
      if (place.data() != elsewhere.data()) ++in_place;
      std::copy_n(model.object.begin() + static_cast<ptrdiff_t>(at), place.size(), place.begin());
      taken += scatter.take(at, place);
      at += place.size();
    }
    scatter.finish();
    EXPECT_EQ(taken, model.wanted);
    model.check();
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(in_place, 300U);
}

INSTANTIATE_TEST_SUITE_P(Conversions, ScatterOf,
                         ::testing::Values(Conversion::kNone, Conversion::kU8ToI64, Conversion::kU16ToI64,
                                           Conversion::kI32ToI64, Conversion::kSwap2, Conversion::kSwap8));

TEST(Scatter, GapsBetweenPiecesAreDropped) {
  const Bytes object = random_bytes(100, 1);
  Bytes memory(20);
  const std::vector<Piece> pieces = {{.offset = 10, .length = 10, .memory = memory.data()},
                                     {.offset = 80, .length = 10, .memory = memory.data() + 10}};
  Scatter scatter({.offset = 10, .length = 80, .pieces = pieces});
  EXPECT_EQ(scatter.take(10, std::span(object).subspan(10, 5)), 5U);
  EXPECT_EQ(scatter.take(15, std::span(object).subspan(15, 40)), 5U);
  EXPECT_EQ(scatter.take(55, std::span(object).subspan(55, 20)), 0U);
  EXPECT_EQ(scatter.take(75, std::span(object).subspan(75, 15)), 10U);
  EXPECT_TRUE(std::equal(memory.begin(), memory.begin() + 10, object.begin() + 10));
  EXPECT_TRUE(std::equal(memory.begin() + 10, memory.end(), object.begin() + 80));
}

}  // namespace
}  // namespace gdsdata::testing
