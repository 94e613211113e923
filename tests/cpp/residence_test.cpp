// Files that stay registered with the device, and batches that it gathers from them.
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "staged_prefetcher.h"

namespace gdsdata::testing {
namespace {

class StagedResidence : public StagedPrefetcher {
 protected:
  void SetUp() override {
    StagedPrefetcher::SetUp();
    if (!real_cuda()) FAKE(cuda, fake_cuda_set_one_address)(1);
  }

  // Waits until it is ready (true) or has an error (false).
  bool settled(Residence& residence) {
    residence.begin();
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (!residence.ready() && !residence.error()) {
      EXPECT_LT(std::chrono::steady_clock::now(), until) << "neither ready nor an error";
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return residence.ready();
  }

  // Takes a planned batch. Returns false if none is left.
  bool use_next(Prefetcher& prefetcher, Consumer& consumer) {
    auto batch = prefetcher.next({});
    if (!batch) return false;
    const size_t offset = batch->offset;
    consumer.use(*consumer.lease(*batch), offset, next_expected());
    return true;
  }

  // Checks an epoch's batches against the files. Returns the number of gathered bytes.
  uint64_t expect_epoch(const std::shared_ptr<Residence>& residence, size_t batches = 40) {
    expected_.clear();
    const auto prefetcher = make(make_engine({}), 3, residence);
    Consumer consumer(device_);
    std::mt19937_64 random(10);
    plan(*prefetcher, random, batches);
    while (use_next(*prefetcher, consumer)) {
    }
    EXPECT_TRUE(expected_.empty());
    consumer.expect_right();
    return prefetcher->statistics().bytes[Route::kPinnedCache];
  }

  std::shared_ptr<Residence> make_residence(size_t most_samples = kBatch) {
    return std::make_shared<Residence>(device_, files_, most_samples);
  }
};

TEST_F(StagedResidence, OnceReadyBatchesOfAnySampleSizeAreGathered) {
  for (const uint64_t sample_bytes : {1, 2, 17, 1000, 2050, 4096, 4097, 70'001}) {
    SCOPED_TRACE(std::to_string(sample_bytes) + " bytes a sample");
    set_samples(sample_bytes, 100);
    drop_from_page_cache(files_->path(0));
    const auto residence = make_residence();
    ASSERT_TRUE(settled(*residence)) << residence->error()->message;
    EXPECT_GE(residence->registered_bytes(), 200 * sample_bytes);
    EXPECT_EQ(expect_epoch(residence), 40 * kBatch * sample_bytes) << "all of it is gathered";
  }
}

TEST_F(StagedResidence, FilesOfSeveralWindowsAreGatheredAcrossTheirBorders) {
  constexpr uint64_t kWindowBytes = 32 << 20;
  set_samples(1 << 20, 33);
  const auto residence = make_residence();
  ASSERT_TRUE(settled(*residence)) << residence->error()->message;
  Memory memory(*device_, 3000);
  const std::vector<int64_t> offsets = {kWindowBytes - 500, kWindowBytes, kWindowBytes - 1000};
  residence->gather(memory.data(), std::vector<int32_t>{0, 1, 1}, offsets, 1000, {})->wait();
  const Bytes got = memory.content();
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(std::memcmp(got.data() + i * 1000, contents_[i == 0 ? 0 : 1].data() + offsets[i], 1000), 0) << i;
  }
}

TEST_F(StagedResidence, NothingIsRegisteredBeforeTheFirstBatchIsOut) {
  const auto made = std::chrono::steady_clock::now();
  const auto residence = make_residence();
  const auto prefetcher = make(make_engine({}), 3, residence);
  std::mt19937_64 random(10);
  plan(*prefetcher, random, 3);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  const uint64_t registered_bytes = residence->registered_bytes();
  if (std::chrono::steady_clock::now() - made < std::chrono::milliseconds(90)) {  // it waits 100 ms at most
    EXPECT_EQ(registered_bytes, 0u);
  }
  Consumer consumer(device_);
  auto batch = prefetcher->next({});
  const size_t offset = batch->offset;
  consumer.use(*consumer.lease(*batch), offset, next_expected());
  EXPECT_TRUE(settled(*residence));
  consumer.expect_right();
}

TEST_F(StagedResidence, BatchesAreReadUntilItIsReady) {
  set_delay_us(2000);
  for (int round = 0; round < 10; ++round) {
    expect_epoch(make_residence(), 20);  // some are read, and some gathered
    ASSERT_FALSE(HasFatalFailure());
  }
}

TEST_F(StagedResidence, MoreBatchesThanAreInFlightAtATimeAreGathered) {
  for (const size_t most_samples : {size_t{1}, size_t{600'000}, size_t{4 << 20}}) {  // 32, 2 and 2 in flight
    auto residence = make_residence(most_samples);
    ASSERT_TRUE(settled(*residence)) << residence->error()->message;
    set_delay_us(1000);
    Memory memory(*device_, 100 * sample_bytes_);
    Bytes expected;
    for (int64_t i = 0; i < 100; ++i) {
      const int64_t offset = (i * 37) % 1000 * static_cast<int64_t>(sample_bytes_);
      residence->gather(memory.data() + i * sample_bytes_, std::vector<int32_t>{1}, std::vector<int64_t>{offset},
                        sample_bytes_, {});
      expected.insert(expected.end(), contents_[1].begin() + offset, contents_[1].begin() + offset + sample_bytes_);
    }
    residence.reset();  // waits for all of them
    ASSERT_TRUE(same(memory.content(), expected)) << most_samples;
  }
}

TEST_F(StagedResidence, AnEpochEndsBeforeItsGathersAndTheNextOneGathersBehindThem) {
  SKIP_WITH_REAL_CUDA();
  const auto residence = make_residence();
  ASSERT_TRUE(settled(*residence)) << residence->error()->message;
  const auto engine = make_engine({});
  Consumer consumer(device_);
  std::mt19937_64 random(11);
  set_delay_us(300'000);
  for (int epoch = 0; epoch < 3; ++epoch) {
    const auto began = std::chrono::steady_clock::now();
    auto prefetcher = make(engine, 3, residence);
    plan(*prefetcher, random, 2);
    while (use_next(*prefetcher, consumer)) {
    }
    prefetcher.reset();
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(200)) << "epoch " << epoch;
  }
  set_delay_us(0);
  consumer.expect_right();
}

TEST_F(StagedResidence, TwoEpochsAtATimeAreGathered) {
  const auto residence = make_residence();
  ASSERT_TRUE(settled(*residence)) << residence->error()->message;
  const auto engine = make_engine({});
  set_delay_us(1000);
  Consumer consumer(device_);
  std::mt19937_64 random(13);
  constexpr int kBatches = 20;
  const std::array both{make(engine, 3, residence), make(engine, 3, residence)};
  for (int i = 0; i < kBatches; ++i) {
    for (const auto& prefetcher : both) plan(*prefetcher, random, 1);
    for (const auto& prefetcher : both) ASSERT_TRUE(use_next(*prefetcher, consumer));
  }
  consumer.expect_right();
  for (const auto& prefetcher : both) {
    EXPECT_EQ(prefetcher->statistics().bytes[Route::kPinnedCache], kBatches * kBatch * sample_bytes_);
  }
}

TEST_F(StagedResidence, GathersOfAnAbandonedEpochAreDoneBeforeTheirMemoryIsWrittenAgain) {
  SKIP_WITH_REAL_CUDA();
  const auto residence = make_residence();
  ASSERT_TRUE(settled(*residence)) << residence->error()->message;
  const auto engine = make_engine({});
  Consumer consumer(device_);
  set_delay_us(20'000);
  for (int epoch = 0; epoch < 5; ++epoch) {
    const auto prefetcher = make(engine, 3, residence);
    std::mt19937_64 random(12);
    plan(*prefetcher, random, 10);
    auto batch = prefetcher->next({});
    consumer.lease(*batch);  // dropped at once, and the others are not taken
  }
  expected_.clear();
  EXPECT_EQ(expect_epoch(residence, 10), 10 * kBatch * sample_bytes_);
}

TEST_F(StagedResidence, MoreSamplesThanItGathersAtATimeAreRefused) {
  const auto residence = make_residence(kBatch - 1);
  EXPECT_EQ(error_of([&] { make(make_engine({}), 3, residence); }).code, ErrorCode::kInvalidArgument);
  ASSERT_TRUE(settled(*residence)) << residence->error()->message;
  const std::vector<int32_t> files(kBatch, 0);
  const std::vector<int64_t> offsets(kBatch, 0);
  Memory memory(*device_, kBatch * sample_bytes_);
  EXPECT_EQ(error_of([&] { residence->gather(memory.data(), files, offsets, sample_bytes_, {}); }).code,
            ErrorCode::kInvalidArgument);
}

TEST_F(StagedResidence, ManySmallSamplesDoNotPinMuchMemoryForTheirAddresses) {
  SKIP_WITH_REAL_CUDA();
  constexpr size_t kManySamples = 4 << 20;
  const uint64_t before = FAKE(cuda, fake_cuda_live_objects)().registered_bytes;
  Residence residence(device_, files_, kManySamples);
  ASSERT_TRUE(settled(residence)) << residence.error()->message;
  const uint64_t pinned_bytes = FAKE(cuda, fake_cuda_live_objects)().registered_bytes - before;
  EXPECT_LE(pinned_bytes - residence.registered_bytes(), 64u << 20) << "two gathers' addresses";
}

TEST_F(StagedResidence, ASampleBehindTheEndOfItsFileIsAnError) {
  const auto residence = make_residence();
  ASSERT_TRUE(settled(*residence)) << residence->error()->message;
  const auto prefetcher = make(make_engine({}), 2, residence);
  std::vector<int64_t> offsets(kBatch, 0);
  offsets[3] = static_cast<int64_t>(contents_[0].size()) - 1;
  prefetcher->plan(std::vector<int32_t>(kBatch, 0), offsets, std::vector<int64_t>{kBatch});
  const Error error = error_of([&] { prefetcher->next({}); });
  EXPECT_EQ(error.code, ErrorCode::kCorrupt);
  EXPECT_EQ(error.offset, contents_[0].size() - 1);
  EXPECT_NE(error.message.find(files_->path(0)), std::string::npos) << error.message;
}

TEST_F(StagedResidence, AFileThatIsNotThereIsItsErrorAndOthersAreReadStill) {
  const TemporaryFolder folder;
  const auto residence =
      std::make_shared<Residence>(device_, table_of({files_->path(0), folder.file("missing")}), kBatch);
  ASSERT_FALSE(settled(*residence));
  EXPECT_EQ(residence->error()->code, ErrorCode::kNotFound);
  EXPECT_EQ(expect_epoch(residence), 0u);
}

TEST_F(StagedResidence, AFileThatWasTruncatedSinceItsIndexIsItsError) {
  const uint64_t size = contents_[0].size();
  const auto files =
      std::make_shared<FileTable>(std::vector<std::string>{files_->path(0)}, std::vector<FileIdentity>{{size + 1, 0}});
  Residence residence(device_, files, kBatch);
  ASSERT_FALSE(settled(residence));
  EXPECT_EQ(residence.error()->code, ErrorCode::kCorrupt);
}

TEST_F(StagedResidence, IsNotUsedOnceAFileWasChangedInPlace) {
  const auto residence = make_residence();
  ASSERT_TRUE(settled(*residence)) << residence->error()->message;
  files_->evict_changed(std::chrono::minutes(1));
  EXPECT_TRUE(residence->ready());
  contents_[0].push_back(std::byte{0});
  folder_.write("0", contents_[0]);
  files_->evict_changed(std::chrono::minutes(1));
  EXPECT_FALSE(residence->ready());
  EXPECT_EQ(expect_epoch(residence), 0u) << "all of it is read through the file table";
}

TEST_F(StagedResidence, AnEmptyFileAmongOthersHindersNothing) {
  const std::string empty = folder_.write("empty", {});
  const auto residence =
      std::make_shared<Residence>(device_, table_of({files_->path(0), files_->path(1), empty}), kBatch);
  ASSERT_TRUE(settled(*residence)) << residence->error()->message;
  EXPECT_EQ(expect_epoch(residence), 40 * kBatch * sample_bytes_);
}

TEST_F(StagedResidence, AFileThatCannotBeMappedIsItsError) {
  Residence residence(device_, table_of({files_->path(0), "/sys/devices/system/cpu/online"}), kBatch);
  ASSERT_FALSE(settled(residence));
  EXPECT_NE(residence.error()->message.find("/sys/devices/system/cpu/online"), std::string::npos)
      << residence.error()->message;
}

TEST_F(StagedResidence, ARefusedRegistrationIsItsErrorAndBatchesAreReadStill) {
  SKIP_WITH_REAL_CUDA();
  FAKE(cuda, fake_cuda_set_read_only_register)(0);
  auto residence = make_residence();
  EXPECT_FALSE(settled(*residence));
  FAKE(cuda, fake_cuda_set_read_only_register)(1);
  EXPECT_EQ(residence->error()->code, ErrorCode::kUnavailable);
  EXPECT_NE(residence->error()->message.find("mapped read-only"), std::string::npos) << residence->error()->message;
  EXPECT_EQ(expect_epoch(residence), 0u);

  const auto engine = make_engine({});  // its workers register too
  FAKE(cuda, fake_cuda_fail_after)("cuMemHostGetDevicePointer", 1, 2);
  residence = make_residence();
  EXPECT_FALSE(settled(*residence)) << "the second file's";
  EXPECT_EQ(residence->error()->code, ErrorCode::kDevice);
  EXPECT_EQ(expect_epoch(residence), 0u);
}

TEST_F(StagedResidence, AKernelThatDoesNotCompileIsItsError) {
  SKIP_WITH_REAL_CUDA();
  FAKE(cuda, fake_cuda_fail_next)("cuStreamCreate", 2);
  const auto residence = make_residence();
  EXPECT_FALSE(settled(*residence));
  EXPECT_EQ(residence->error()->code, ErrorCode::kDevice);
  EXPECT_EQ(expect_epoch(residence), 0u);
}

TEST_F(StagedResidence, ADeviceThatSeesOtherAddressesIsRefused) {
  SKIP_WITH_REAL_CUDA();
  FAKE(cuda, fake_cuda_set_one_address)(0);
  const auto residence = make_residence();
  EXPECT_FALSE(settled(*residence));
  EXPECT_EQ(residence->error()->code, ErrorCode::kUnavailable);
  EXPECT_NE(residence->error()->message.find("other addresses"), std::string::npos) << residence->error()->message;
  EXPECT_EQ(expect_epoch(residence), 0u);
}

// If "cuEventRecord" fails, the gather itself is queued and still uses its addresses and target.
TEST_F(StagedResidence, AGatherThatFailsIsItsBatchsErrorAndTheNextBatchIsRight) {
  SKIP_WITH_REAL_CUDA();
  const auto residence = make_residence();
  ASSERT_TRUE(settled(*residence)) << residence->error()->message;
  const auto prefetcher = make(make_engine({}), 1, residence);
  Consumer consumer(device_);
  std::mt19937_64 random(11);
  for (const char* call : {"cuLaunchKernel", "cuEventRecord"}) {
    SCOPED_TRACE(call);
    set_delay_us(5000);
    FAKE(cuda, fake_cuda_fail_next)(call, 719);
    plan(*prefetcher, random, 1);
    next_expected();
    EXPECT_EQ(error_of([&] { prefetcher->next({}); }).code, ErrorCode::kDevice);
    for (int i = 0; i < 5; ++i) {
      plan(*prefetcher, random, 1);
      auto batch = prefetcher->next({});
      ASSERT_TRUE(batch);
      const size_t offset = batch->offset;
      consumer.use(*consumer.lease(*batch), offset, next_expected());
    }
    ASSERT_NO_FATAL_FAILURE(consumer.expect_right());
  }
}

TEST_F(StagedResidence, ClosesWhileItRegisters) {
  std::mt19937_64 random(12);
  for (int round = 0; round < 50; ++round) {
    const auto residence = make_residence();
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
  }
  set_samples(1 << 20, 40);
  for (int round = 0; round < 5; ++round) make_residence();
}

}  // namespace
}  // namespace gdsdata::testing
