// Batches that one thread adds while another takes them.
#include "engine/planned_batches.h"

#include <atomic>
#include <limits>
#include <numeric>
#include <random>
#include <span>
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
  planned.add(files, offsets, sizes);
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
  PlannedBatches planned(kMostSamples, kFiles);
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
  PlannedBatches planned(kMostSamples, kFiles);
  add(planned, 0, {3});
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{2, 0}, {2, int64_t{kMostSamples} + 1}, {2, -1}}) {
    EXPECT_EQ(error_of([&] { planned.add(std::vector<int32_t>(2), std::vector<int64_t>(2), sizes); }).code,
              ErrorCode::kInvalidArgument);
  }
  for (const int32_t file : {-1, int32_t{kFiles}}) {
    const std::vector<int32_t> files = {0, file};
    EXPECT_EQ(error_of([&] { planned.add(files, std::vector<int64_t>(2), std::vector<int64_t>{1, 1}); }).code,
              ErrorCode::kInvalidArgument);
  }
  add(planned, 3, {4});
  expect_next(planned, 0, 3);
  expect_next(planned, 3, 4);
}

// Three files of 40, none and 60 samples, whose order is a permutation of 100.
struct Order {
  std::vector<uint64_t> keys{1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<int64_t> first{0, 40, 40, 100}, base{1000, 0, 5}, stride{10, 1, 7};

  SampleOrder get(bool shuffled) const {
    const std::span<const uint64_t> used = shuffled ? std::span<const uint64_t>(keys) : std::span<const uint64_t>();
    return {{100, 10, 10, used}, {first, base, stride}};
  }
  // The places of positions, one by one.
  void expect(const PlannedBatches::Batch& batch, const std::vector<int64_t>& positions, bool shuffled) const {
    ASSERT_EQ(batch.files.size(), positions.size());
    std::vector<int64_t> samples = positions;
    if (shuffled) permute(get(true).permutation, positions, samples);
    for (size_t i = 0; i < samples.size(); ++i) {
      const bool in_first = samples[i] < 40;
      EXPECT_EQ(batch.files[i], in_first ? 0 : 2);
      EXPECT_EQ(batch.offsets[i], in_first ? 1000 + 10 * samples[i] : 5 + 7 * (samples[i] - 40));
    }
  }
};

TEST(PlannedBatches, OfRunsHaveThePlacesOfTheirPositionsInTheOrder) {
  const Order order;
  for (const bool shuffled : {false, true}) {
    PlannedBatches planned(kMostSamples, 3);
    planned.set_order(order.get(shuffled));
    planned.add_runs(std::vector<int64_t>{0, 30, 98, 0}, std::vector<int64_t>{20, 5, 2, 1},
                     std::vector<int64_t>{20, 8});
    std::vector<int64_t> positions(20);
    std::iota(positions.begin(), positions.end(), 0);
    order.expect(planned.take(), positions, shuffled);
    planned.add_runs(std::vector<int64_t>{99}, std::vector<int64_t>{1}, std::vector<int64_t>{1});
    order.expect(planned.take(), {30, 31, 32, 33, 34, 98, 99, 0}, shuffled);
    order.expect(planned.take(), {99}, shuffled);
  }
}

TEST(PlannedBatches, OfBadRunsAreNotAdded) {
  using Numbers = std::vector<int64_t>;
  const Order order;
  PlannedBatches planned(kMostSamples, 3);
  const auto refused = [&](const Numbers& begins, const Numbers& lengths, const Numbers& sizes) {
    EXPECT_EQ(error_of([&] { planned.add_runs(begins, lengths, sizes); }).code, ErrorCode::kInvalidArgument);
  };
  refused({0}, {1}, {1});  // there is no order yet
  planned.set_order(order.get(true));
  refused({0}, {1, 1}, {2});
  refused({0, 1}, {2, 2}, {3, 1});  // a run of two batches
  refused({0}, {2}, {3});
  refused({0, 4}, {2, 2}, {2});
  refused({-1}, {2}, {2});
  refused({99}, {2}, {2});
  refused({5}, {0}, {0});
  refused({0}, {int64_t{kMostSamples} + 1}, {int64_t{kMostSamples} + 1});
  refused({1}, {std::numeric_limits<int64_t>::max()}, {2});
  const Numbers places(1);
  EXPECT_EQ(error_of([&] { planned.add(std::vector<int32_t>(1), places, Numbers{1}); }).code,
            ErrorCode::kInvalidArgument);
  planned.add_runs(Numbers{7}, Numbers{1}, Numbers{1});
  order.expect(planned.take(), {7}, true);
  PlannedBatches of_other_files(kMostSamples, 2);
  EXPECT_EQ(error_of([&] { of_other_files.set_order(order.get(true)); }).code, ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace gdsdata::testing
