#include "base/extents.h"

#include <cstring>
#include <limits>
#include <vector>

#include "testing.h"

namespace gdsdata::testing {
namespace {

// Rows of a tar's samples: begin in units of 512 and length of the second field, then the length of
// the first one, which lies behind it.
struct Tar {
  std::vector<std::byte> rows;
  std::vector<int64_t> widths{3, 2, 0, 1}, least{1, 10, 1, -1}, order{1, 0};

  explicit Tar(size_t samples) : rows(samples * 6) {
    for (size_t i = 0; i < samples; ++i) {
      const uint64_t begin = 70'000 + i, length = 700, other = i % 3;
      std::memcpy(&rows[i * 6], &begin, 3);
      std::memcpy(&rows[i * 6 + 3], &length, 2);
      std::memcpy(&rows[i * 6 + 5], &other, 1);
    }
  }
};

TEST(Extents, OfSamplesNearTheEndReadNoByteBehindTheRows) {
  for (size_t samples : {1u, 2u, 100u}) {
    const Tar tar(samples);
    const std::vector<int64_t> asked{0, static_cast<int64_t>(samples) - 1, std::numeric_limits<int64_t>::max(),
                                     std::numeric_limits<int64_t>::min()};
    std::vector<int64_t> begins(8), lengths(8);
    unpack_extents({tar.rows, samples, tar.widths, tar.least, tar.order, 512}, asked, begins, lengths);
    for (size_t i = 0; i < asked.size(); ++i) {
      const int64_t row = i == 1 || i == 2 ? static_cast<int64_t>(samples) - 1 : 0;
      EXPECT_EQ(begins[2 * i + 1], (70'001 + row) * 512);
      EXPECT_EQ(lengths[2 * i + 1], 710);
      EXPECT_EQ(begins[2 * i], (70'001 + row) * 512 + 1024 + 512);
      EXPECT_EQ(lengths[2 * i], row % 3 - 1);
    }
  }
}

TEST(Extents, ThatAreAllAlikeHaveNoRows) {
  const std::vector<int64_t> widths{0, 0}, least{7, 9}, order{0}, asked{5, 0, 99};
  std::vector<int64_t> begins(3), lengths(3);
  unpack_extents({{}, 100, widths, least, order, 1}, asked, begins, lengths);
  EXPECT_EQ(begins, (std::vector<int64_t>{7, 7, 7}));
  EXPECT_EQ(lengths, (std::vector<int64_t>{9, 9, 9}));
}

}  // namespace
}  // namespace gdsdata::testing
