// Batches that one thread adds while another takes them.
#include "engine/planned_batches.h"

#include <atomic>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "base/error.h"
#include "testing.h"

namespace gdsdata::testing {
namespace {

constexpr size_t kMostSamples = 50, kFiles = 7;

// Samples are numbered: the file and the offset of each follow from its number.
void add(PlannedBatches& planned, int64_t first, const std::vector<int64_t>& sizes) {
  std::vector<int64_t> offsets(static_cast<size_t>(std::accumulate(sizes.begin(), sizes.end(), int64_t{0})));
  std::iota(offsets.begin(), offsets.end(), first);
  std::vector<int32_t> files;
  for (const int64_t offset : offsets) files.push_back(static_cast<int32_t>(offset % int64_t{kFiles}));
  planned.add(files, offsets, sizes, kMostSamples, kFiles);
}

void expect_next(PlannedBatches& planned, int64_t first, int64_t size) {
  const auto [files, offsets] = planned.take();
  ASSERT_EQ(files.size(), static_cast<size_t>(size));
  ASSERT_EQ(offsets.size(), static_cast<size_t>(size));
  for (size_t i = 0; i < offsets.size(); ++i) {
    ASSERT_EQ(offsets[i], first + static_cast<int64_t>(i));
    ASSERT_EQ(files[i], static_cast<int32_t>(offsets[i] % int64_t{kFiles}));
  }
}

TEST(PlannedBatches, ComeInOrderWhileAnotherThreadAddsSome) {
  std::mt19937_64 random(1);
  std::vector<int64_t> sizes(20000);
  for (int64_t& size : sizes) size = 1 + static_cast<int64_t>(random() % kMostSamples);
  PlannedBatches planned;
  std::atomic<size_t> added{0};
  std::thread adds([&] {
    int64_t first = 0;
    for (size_t batch = 0; batch < sizes.size();) {
      const size_t count = std::min<size_t>(1 + random() % 8, sizes.size() - batch);
      const std::vector<int64_t> some(sizes.begin() + static_cast<ptrdiff_t>(batch),
                                      sizes.begin() + static_cast<ptrdiff_t>(batch + count));
      add(planned, first, some);
      first = std::accumulate(some.begin(), some.end(), first);
      added.store(batch += count, std::memory_order_release);
    }
  });
  int64_t first = 0;
  for (size_t batch = 0; batch < sizes.size(); ++batch) {
    while (added.load(std::memory_order_acquire) <= batch) std::this_thread::yield();
    expect_next(planned, first, sizes[batch]);
    first += sizes[batch];
  }
  adds.join();
}

TEST(PlannedBatches, OfWhichOneIsBadAreNotAdded) {
  PlannedBatches planned;
  add(planned, 0, {3});
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{2, 0}, {2, int64_t{kMostSamples} + 1}, {2, -1}}) {
    EXPECT_EQ(error_of([&] {
                planned.add(std::vector<int32_t>(2), std::vector<int64_t>(2), sizes, kMostSamples, kFiles);
              }).code,
              ErrorCode::kInvalidArgument);
  }
  for (const int32_t file : {-1, int32_t{kFiles}}) {
    const std::vector<int32_t> files = {0, file};
    EXPECT_EQ(error_of([&] {
                planned.add(files, std::vector<int64_t>(2), std::vector<int64_t>{1, 1}, kMostSamples, kFiles);
              }).code,
              ErrorCode::kInvalidArgument);
  }
  add(planned, 3, {4});
  expect_next(planned, 0, 3);
  expect_next(planned, 3, 4);
}

}  // namespace
}  // namespace gdsdata::testing
