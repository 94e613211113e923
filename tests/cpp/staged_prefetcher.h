// Shared by tests of batches on a device that the processor cannot write, and of their consumers.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "device/cuda_api.h"
#include "engine/buffer_pool.h"
#include "engine/prefetcher.h"
#include "engine/residence.h"
#include "python/lease.h"
#include "staged.h"

namespace gdsdata::testing {

// A consumer with its own stream, as torch has: it releases batches before the stream reads them.
class Consumer {
 public:
  explicit Consumer(std::shared_ptr<Device> device) : device_(std::move(device)) {
    device_->bind_thread();
    EXPECT_EQ(CudaApi::get().stream_create(&handle_, CudaApi::kStreamNonBlocking), CudaApi::kSuccess);
    stream_ = device_->foreign_stream(handle());
  }
  ~Consumer() {
    wait();
    stream_.reset();
    CudaApi::get().stream_destroy(handle_);
  }
  uintptr_t handle() const { return reinterpret_cast<uintptr_t>(handle_); }

  // Leases a batch as batches.cpp does.
  std::unique_ptr<Lease> lease(Prefetcher::Batch& batch) {
    for (const auto& copy : batch.copies) stream_->wait(*copy);
    return std::make_unique<Lease>(device_, std::move(batch.buffer), std::vector<uintptr_t>{handle()}, leased_);
  }
  // Reads the bytes later, on the stream. They are compared at the end.
  void use(const Lease& lease, size_t offset, Bytes expected) {
    uses_.push_back({device_->allocate_pinned(expected.size()), std::move(expected)});
    const Use& use = uses_.back();
    stream_->copy_out(use.got->data(), lease.data() + offset, use.expected.size());
  }
  void wait() { stream_->record()->wait(); }
  void expect_right() {
    wait();
    for (size_t i = 0; i < uses_.size(); ++i) {
      const std::byte* got = uses_[i].got->data();
      ASSERT_TRUE(same({got, got + uses_[i].expected.size()}, uses_[i].expected)) << "use " << i;
    }
    uses_.clear();
  }
  size_t leased() const { return *leased_; }

 private:
  struct Use {
    std::unique_ptr<PinnedBuffer> got;
    Bytes expected;
  };
  std::shared_ptr<Device> device_;
  CudaApi::Stream handle_ = nullptr;
  std::unique_ptr<Stream> stream_;
  std::deque<Use> uses_;
  std::shared_ptr<std::atomic<size_t>> leased_ = std::make_shared<std::atomic<size_t>>(0);
};

class StagedPrefetcher : public Staged {
 protected:
  static constexpr size_t kBatch = 10;

  void SetUp() override {
    Staged::SetUp();
    if (device_ != nullptr) set_samples(1000, 1000);
  }
  void TearDown() override {
    pool_.reset();
    Staged::TearDown();
  }

  void set_samples(uint64_t sample_bytes, size_t samples) {
    sample_bytes_ = sample_bytes;
    contents_.clear();
    std::vector<std::string> paths;
    for (size_t i = 0; i < 2; ++i) {
      contents_.push_back(random_bytes(sample_bytes * samples, 20 + i));
      paths.push_back(folder_.write(std::to_string(i), contents_[i]));
    }
    files_ = table_of(paths);
    pool_.reset();
  }

  std::unique_ptr<Prefetcher> make(std::shared_ptr<Engine> engine, size_t slots = 4,
                                   std::shared_ptr<Residence> residence = nullptr) {
    PrefetchOptions options;
    options.slots = slots;
    options.sample_bytes = sample_bytes_;
    options.batch_samples = kBatch;
    options.stall_timeout = std::chrono::milliseconds(20000);
    if (pool_ == nullptr) {
      pool_ = std::make_shared<BufferPool>(device_, sample_bytes_ * kBatch + Prefetcher::kPlacementBytes, slots + 2);
    }
    return std::make_unique<Prefetcher>(std::move(engine), files_, pool_, options, std::move(residence));
  }

  // Random samples of both files, and for every third batch consecutive ones.
  void plan(Prefetcher& prefetcher, std::mt19937_64& random, size_t batches) {
    const size_t samples = contents_[0].size() / sample_bytes_;
    std::vector<int32_t> files;
    std::vector<int64_t> offsets;
    for (size_t batch = 0; batch < batches; ++batch) {
      Bytes expected;
      const size_t first = random() % (samples - kBatch);
      const auto in_order_file = static_cast<int32_t>(random() % 2);
      for (size_t i = 0; i < kBatch; ++i) {
        files.push_back(batch % 3 == 0 ? in_order_file : static_cast<int32_t>(random() % 2));
        offsets.push_back(static_cast<int64_t>((batch % 3 == 0 ? first + i : random() % samples) * sample_bytes_));
        const auto begin = contents_[static_cast<size_t>(files.back())].begin() + offsets.back();
        expected.insert(expected.end(), begin, begin + static_cast<ptrdiff_t>(sample_bytes_));
      }
      expected_.push_back(std::move(expected));
    }
    prefetcher.plan(files, offsets, std::vector<int64_t>(batches, kBatch));
  }
  Bytes next_expected() {
    Bytes expected = std::move(expected_.front());
    expected_.pop_front();
    return expected;
  }

  TemporaryFolder folder_;
  uint64_t sample_bytes_ = 0;
  std::vector<Bytes> contents_;
  std::shared_ptr<FileTable> files_;
  std::shared_ptr<BufferPool> pool_;
  std::deque<Bytes> expected_;  // of the planned batches
};

}  // namespace gdsdata::testing
