// Zeros at the ends of pages, and truncations that they show.
#include "base/page_tails.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/mapping.h"
#include "testing.h"

namespace gdsdata::testing {
namespace {

// Three pages, the last of which is short. Each byte is 7, except for what a test zeroes.
class Tails : public ::testing::Test {
 protected:
  void zero(uint64_t begin, uint64_t end) {
    std::fill(content.begin() + static_cast<ptrdiff_t>(begin), content.begin() + static_cast<ptrdiff_t>(end),
              std::byte{0});
  }
  // As the kernel does to the page in which a file ends.
  void truncate(uint64_t end) { zero(end, std::min(align_up(end), size_bytes)); }
  void learn(uint64_t first, uint64_t last, uint64_t size_now) {
    std::vector<PageTails::Tail> seen;
    tails.see(first, last, seen);
    tails.learn(seen, size_now);
  }
  static uint64_t align_up(uint64_t offset) { return (offset + page_bytes() - 1) / page_bytes() * page_bytes(); }

  const uint64_t page = page_bytes();
  const uint64_t size_bytes = 2 * page + 100;
  Bytes content = Bytes(size_bytes, std::byte{7});
  PageTails tails{content.data(), size_bytes};
};

TEST_F(Tails, OtherBytesBehindZerosShowThatTheseWereNotCutOff) {
  zero(page - 20, page - 10);
  EXPECT_TRUE(tails.show_whole(page - 11));
  EXPECT_TRUE(tails.show_whole(page - 20));
  truncate(page - 15);
  EXPECT_FALSE(tails.show_whole(page - 11));
}

TEST_F(Tails, ZerosAtTheEndOfAPageShowNothingBeforeTheyAreLearned) {
  for (const uint64_t zeros : {uint64_t{1}, uint64_t{9}, uint64_t{1000}, page}) {
    zero(page - zeros, page);
    EXPECT_FALSE(tails.show_whole(page - 1)) << zeros;
    learn(0, page - 1, size_bytes);
    EXPECT_TRUE(tails.show_whole(page - 1)) << zeros;
  }
  EXPECT_FALSE((zero(2 * page - 1, 2 * page), tails.show_whole(2 * page - 1))) << "this page was not learned";
}

TEST_F(Tails, ATruncationShowsIfItTookAnotherByteThanZero) {
  zero(page - 10, page);
  learn(0, page - 1, size_bytes);
  truncate(page - 4);
  EXPECT_TRUE(tails.show_whole(page - 1)) << "it took zeros only";
  truncate(page - 11);
  EXPECT_FALSE(tails.show_whole(page - 1));
  EXPECT_FALSE(tails.show_whole(page - 11));
}

TEST_F(Tails, OfPagesBeyondTheEndAreNotLearned) {
  zero(page - 10, page);
  learn(0, page - 1, page - 1);
  EXPECT_FALSE(tails.show_whole(page - 1));
  learn(0, page - 1, page);
  EXPECT_TRUE(tails.show_whole(page - 1));
}

TEST_F(Tails, OfTheLastPageEndWithTheFile) {
  zero(size_bytes - 3, size_bytes);
  learn(2 * page, size_bytes - 1, size_bytes);
  EXPECT_TRUE(tails.show_whole(size_bytes - 1));
  truncate(size_bytes - 4);
  EXPECT_FALSE(tails.show_whole(size_bytes - 1));
}

}  // namespace
}  // namespace gdsdata::testing
