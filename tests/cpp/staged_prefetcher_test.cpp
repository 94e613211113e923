// Batches on a device that the processor cannot write, and their users.
#include "staged_prefetcher.h"

#include <chrono>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace gdsdata::testing {
namespace {

TEST_F(StagedPrefetcher, GivesBatchesInOrderHoweverTheirReadsEnd) {
  for (const uint64_t sample_bytes : {1000, 4096, 70'001}) {
    set_samples(sample_bytes, 100);
    for (const Setting& setting : {Setting{}, Setting{DirectMode::kAlways, "seed=1,late=0.5,late_ms=2,reorder=0.5"},
                                   Setting{DirectMode::kNever}}) {
      std::mt19937_64 random(1);
      const auto prefetcher = make(make_engine(setting));
      Consumer consumer(device_);
      plan(*prefetcher, random, 40);
      while (auto batch = prefetcher->next({})) {
        const size_t offset = batch->offset;
        consumer.use(*consumer.lease(*batch), offset, next_expected());
      }
      EXPECT_TRUE(expected_.empty());
      ASSERT_NO_FATAL_FAILURE(consumer.expect_right());
    }
  }
}

TEST_F(StagedPrefetcher, WritesNoBufferThatAConsumersStreamHasNotReadYet) {
  const auto prefetcher = make(make_engine({}), 3);
  Consumer slow(device_);
  std::mt19937_64 random(2);
  plan(*prefetcher, random, 100);
  std::set<std::byte*> buffers;
  for (size_t i = 0; auto batch = prefetcher->next({}); ++i) {
    set_delay_us(i % 2 == 0 ? 5000 : 0);  // delays the use, and copies that are queued meanwhile
    const size_t offset = batch->offset;
    const auto lease = slow.lease(*batch);
    buffers.insert(lease->data());
    slow.use(*lease, offset, next_expected());
  }
  set_delay_us(0);
  EXPECT_LE(buffers.size(), 3 + 2u) << "a slow consumer's buffers are used again too";
  ASSERT_NO_FATAL_FAILURE(slow.expect_right());
}

TEST_F(StagedPrefetcher, ASecondStreamThatWasNamedKeepsTheBufferToo) {
  const auto prefetcher = make(make_engine({}), 2);
  Consumer fast(device_), slow(device_);
  std::mt19937_64 random(3);
  plan(*prefetcher, random, 60);
  while (auto batch = prefetcher->next({})) {
    const size_t offset = batch->offset;
    for (const auto& copy : batch->copies) copy->wait();
    const auto lease = fast.lease(*batch);
    const std::byte* middle = lease->data() + offset + sample_bytes_ * kBatch / 2;
    EXPECT_TRUE(Lease::record_stream(middle, slow.handle())) << "a view of a part names its batch";
    EXPECT_TRUE(Lease::record_stream(middle, slow.handle()));
    set_delay_us(4000);
    slow.use(*lease, offset, next_expected());
    set_delay_us(100);
  }
  ASSERT_NO_FATAL_FAILURE(slow.expect_right());
}

TEST_F(StagedPrefetcher, MemoryThatNobodyLeasedIsNoLease) {
  Memory memory(*device_, 4096);
  EXPECT_FALSE(Lease::record_stream(memory.data(), 1));
  EXPECT_FALSE(Lease::record_stream(nullptr, 1));
  Consumer consumer(device_);
  const auto prefetcher = make(make_engine({}));
  std::mt19937_64 random(3);
  plan(*prefetcher, random, 1);
  auto batch = prefetcher->next({});
  auto lease = consumer.lease(*batch);
  const std::byte* data = lease->data();
  EXPECT_EQ(consumer.leased(), 1u);
  EXPECT_TRUE(Lease::record_stream(data, consumer.handle()));
  EXPECT_FALSE(Lease::record_stream(data + pool_->buffer_bytes(), consumer.handle())) << "one behind its end";
  lease.reset();
  EXPECT_EQ(consumer.leased(), 0u);
  EXPECT_FALSE(Lease::record_stream(data, consumer.handle())) << "it has ended";
}

TEST_F(StagedPrefetcher, BatchesAreTheConsumersForAsLongAsItKeepsThem) {
  auto prefetcher = make(make_engine({}), 2);
  Consumer consumer(device_);
  std::mt19937_64 random(4);
  plan(*prefetcher, random, 50);
  std::vector<std::pair<std::unique_ptr<Lease>, size_t>> kept;
  while (auto batch = prefetcher->next({})) {
    const size_t offset = batch->offset;
    kept.emplace_back(consumer.lease(*batch), offset);
  }
  prefetcher.reset();
  ASSERT_EQ(kept.size(), 50u);
  for (const auto& [lease, offset] : kept) consumer.use(*lease, offset, next_expected());
  ASSERT_NO_FATAL_FAILURE(consumer.expect_right());
}

TEST_F(StagedPrefetcher, AnEpochIsBrokenOffAHundredTimesAndContentStaysRight) {
  const auto engine = make_engine({DirectMode::kAuto, "seed=1,late=0.1,late_ms=1"});
  Consumer consumer(device_);
  std::mt19937_64 random(5);
  for (int round = 0; round < 100; ++round) {
    set_delay_us(round % 4 == 0 ? 3000 : 100);
    if (round % 10 == 0) drop_from_page_cache(files_->path(0));
    expected_.clear();
    const auto prefetcher = make(engine);
    plan(*prefetcher, random, 12);
    for (size_t i = random() % 8; i > 0; --i) {
      auto batch = prefetcher->next({});
      ASSERT_TRUE(batch);
      const size_t offset = batch->offset;
      consumer.use(*consumer.lease(*batch), offset, next_expected());
    }
    if (round % 2 == 0) prefetcher->close();
  }
  set_delay_us(0);
  ASSERT_NO_FATAL_FAILURE(consumer.expect_right());
}

TEST_F(StagedPrefetcher, FindsItsBuffersAgainInTheNextEpoch) {
  const auto engine = make_engine({});
  Consumer consumer(device_);
  std::set<std::byte*> buffers;
  std::mt19937_64 random(6);
  for (int epoch = 0; epoch < 10; ++epoch) {
    const auto prefetcher = make(engine, 3);
    plan(*prefetcher, random, 10);
    while (auto batch = prefetcher->next({})) {
      const size_t offset = batch->offset;
      const auto lease = consumer.lease(*batch);
      buffers.insert(lease->data());
      consumer.use(*lease, offset, next_expected());
    }
  }
  EXPECT_LE(buffers.size(), 3 + 2u);
  ASSERT_NO_FATAL_FAILURE(consumer.expect_right());
}

TEST_F(StagedPrefetcher, ABatchThatFailsIsAnErrorInItsPlaceAndLaterOnesAreRight) {
  const auto prefetcher = make(make_engine({}), 3);
  Consumer consumer(device_);
  set_delay_us(3000);
  std::mt19937_64 random(7);
  for (int round = 0; round < 10; ++round) {
    plan(*prefetcher, random, 1);
    // One sample lies beyond the end of its file, while copies of the others may be in flight.
    std::vector<int64_t> offsets(kBatch, 0);
    offsets.back() = static_cast<int64_t>(contents_[0].size());
    prefetcher->plan(std::vector<int32_t>(kBatch, 0), offsets, std::vector<int64_t>{kBatch});
    auto batch = prefetcher->next({});
    const size_t offset = batch->offset;
    consumer.use(*consumer.lease(*batch), offset, next_expected());
    EXPECT_EQ(error_of([&] { prefetcher->next({}); }).code, ErrorCode::kCorrupt);
  }
  EXPECT_FALSE(prefetcher->next({}));
  ASSERT_NO_FATAL_FAILURE(consumer.expect_right());
}

TEST_F(StagedPrefetcher, NoMemoryOnTheDeviceIsAnErrorOfTheBatchAndNoStall) {
  SKIP_WITH_REAL_CUDA();
  const auto prefetcher = make(make_engine({}), 1);
  Consumer consumer(device_);
  std::mt19937_64 random(8);
  FAKE(cuda, fake_cuda_fail_next)("cuMemAlloc", 2);
  plan(*prefetcher, random, 2);
  const Error error = error_of([&] { prefetcher->next({}); });
  next_expected();
  EXPECT_EQ(error.code, ErrorCode::kDevice);
  EXPECT_NE(error.message.find("CUDA_ERROR_OUT_OF_MEMORY"), std::string::npos) << error.message;
  auto batch = prefetcher->next({});
  ASSERT_TRUE(batch);
  const size_t offset = batch->offset;
  consumer.use(*consumer.lease(*batch), offset, next_expected());
  EXPECT_FALSE(prefetcher->next({}));
  ASSERT_NO_FATAL_FAILURE(consumer.expect_right());
}

TEST_F(StagedPrefetcher, APoolThatLackedMemoryOnceKeepsItsBuffersAfterwards) {
  SKIP_WITH_REAL_CUDA();
  const auto pool = std::make_shared<BufferPool>(device_, 10000, 3);
  for (int i = 0; i < 10; ++i) {
    FAKE(cuda, fake_cuda_fail_next)("cuMemAlloc", 2);
    EXPECT_EQ(error_of([&] { BufferPool::Reservation{*pool}; }).code, ErrorCode::kDevice);
  }
  const uint64_t before = FAKE(cuda, fake_cuda_calls)("cuMemAlloc");
  for (int i = 0; i < 10; ++i) {
    auto buffer = BufferPool::Reservation(*pool).take();
    pool->handed_over();
    buffer.reset();
  }
  EXPECT_EQ(FAKE(cuda, fake_cuda_calls)("cuMemAlloc"), before + 1) << "every batch gets new memory";
}

TEST_F(StagedPrefetcher, AConsumerThatDoesNotEndDoesNotKeepItsEpochFromClosing) {
  SKIP_WITH_REAL_CUDA();
  const auto engine = make_engine({});
  Consumer consumer(device_);
  std::mt19937_64 random(9);
  set_delay_us(300'000);
  {
    const auto prefetcher = make(engine);
    plan(*prefetcher, random, 4);
    auto batch = prefetcher->next({});
    ASSERT_TRUE(batch);
    const size_t offset = batch->offset;
    consumer.use(*consumer.lease(*batch), offset, next_expected());
    const auto began = std::chrono::steady_clock::now();
    prefetcher->close();
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(100));
  }
  set_delay_us(0);
  ASSERT_NO_FATAL_FAILURE(consumer.expect_right());
}

}  // namespace
}  // namespace gdsdata::testing
