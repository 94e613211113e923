// Shared by tests of the engine with a device that the processor cannot write. They run with the
// fake driver, which delays and reorders copies as far as streams allow, or with a GPU (fakes.h).
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "base/extent_math.h"
#include "engine/staging.h"
#include "fakes.h"
#include "testing.h"

namespace gdsdata::testing {

inline constexpr std::byte kUntouched{0xEE};
inline constexpr uint64_t kSegmentBytes = 65536;
inline constexpr uint64_t kLeastStagingBytes = Staging::most_bytes(kSegmentBytes + kCutBytes);

struct Setting {
  DirectMode direct = DirectMode::kAuto;
  std::string faults = {};
  std::string backend = "auto";
  size_t workers = 2;
  uint64_t staging_bytes = 1 << 20;
  uint64_t segment_bytes = kSegmentBytes;
};

// A wait that takes longer is a hang.
inline constexpr std::chrono::seconds kPatience{30};

class Ended {
 public:
  std::function<void()> one() {
    return [state = state_] {
      std::lock_guard lock(state->mutex);
      ++state->count;
      state->changed.notify_all();
    };
  }
  bool wait_for(size_t count) {
    std::unique_lock lock(state_->mutex);
    return state_->changed.wait_for(lock, kPatience, [&] { return state_->count >= count; });
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    size_t count = 0;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

class Staged : public ::testing::Test {
 protected:
  void SetUp() override {
    device_ = test_device();
    if (device_ == nullptr) GTEST_SKIP() << "no GPU";
    if (real_cuda()) return;
    FAKE(cuda, fake_cuda_set_seed)(17);
    before_ = FAKE(cuda, fake_cuda_live_objects)();
  }

  void TearDown() override {
    engines_.clear();
    if (device_ == nullptr || real_cuda()) return;
    FAKE(cuda, fake_cuda_reset)();
    if (hung_) return;
    const FakeCudaObjects after = FAKE(cuda, fake_cuda_live_objects)();
    EXPECT_EQ(after.streams, before_.streams) << "a stream is left";
    EXPECT_EQ(after.allocations, before_.allocations) << "device memory is left";
    EXPECT_EQ(after.registrations, before_.registrations) << "pinned memory is left";
  }

  std::shared_ptr<Engine> make_engine(const Setting& setting, std::shared_ptr<Device> device = nullptr) {
    EngineOptions options;
    options.backend = setting.backend;
    options.workers = setting.workers;
    options.segment_bytes = setting.segment_bytes;
    options.staging_bytes = setting.staging_bytes;
    options.io.request_bytes = 65536;
    options.io.bounce_bytes = 1 << 20;
    options.io.queue_depth = 16;
    options.io.direct = setting.direct;
    options.io.faults = setting.faults;
    engines_.push_back(std::make_shared<Engine>(options, device != nullptr ? device : device_));
    return engines_.back();
  }

  // Submits a group, and waits for it and its copies. If it does not end, returns false and leaks
  // the group and its engine.
  bool run(const std::shared_ptr<Engine>& engine, const std::shared_ptr<Group>& group) {
    Ended ended;
    group->edit().on_done = ended.one();
    engine->submit(group);
    if (!ended.wait_for(1)) {
      leave(engine, group);
      return false;
    }
    for (const auto& copy : group->result().copies) copy->wait();
    return true;
  }

  void leave(const std::shared_ptr<Engine>& engine, const std::shared_ptr<Group>& group) {
    hung_ = true;
    new std::shared_ptr<Engine>(engine);
    new std::shared_ptr<Group>(group);
    ADD_FAILURE() << "a group did not end";
  }

  void set_delay_us(uint64_t most) {
    if (!real_cuda()) FAKE(cuda, fake_cuda_set_delay_us)(most);
  }

  std::shared_ptr<Device> device_;
  std::vector<std::shared_ptr<Engine>> engines_;
  FakeCudaObjects before_{};
  bool hung_ = false;
};

// Device memory, with calls that fill and read it and wait.
class Memory {
 public:
  Memory(Device& device, size_t bytes, std::byte filling = kUntouched)
      : buffer_(device.allocate(bytes)), host_(device.allocate_pinned(bytes)), stream_(device.make_stream()) {
    fill(Bytes(bytes, filling));
  }
  ~Memory() { stream_->record()->wait(); }
  std::byte* data() { return buffer_->data(); }
  size_t size() const { return buffer_->size_bytes(); }
  void fill(const Bytes& content) { fill_later(content)->wait(); }
  // The memory has the content after the event, and keeps the old one until then.
  std::shared_ptr<Event> fill_later(const Bytes& content) {
    std::memcpy(host_->data(), content.data(), content.size());
    stream_->copy_in(buffer_->data(), host_->data(), content.size());
    return stream_->record();
  }
  Bytes content() {
    read_later()->wait();
    return result();
  }
  std::shared_ptr<Event> read_later() {
    stream_->copy_out(host_->data(), buffer_->data(), size());
    return stream_->record();
  }
  Bytes result() const { return {host_->data(), host_->data() + size()}; }

 private:
  std::unique_ptr<DeviceBuffer> buffer_;
  std::unique_ptr<PinnedBuffer> host_;
  std::unique_ptr<Stream> stream_;
};

inline uint64_t counted(const RouteBytes& bytes) {
  return std::accumulate(bytes.bytes.begin(), bytes.bytes.end(), uint64_t{0});
}

// Compares bytes. The message names the first byte that differs.
inline ::testing::AssertionResult same(const Bytes& got, const Bytes& expected) {
  if (got.size() != expected.size()) {
    return ::testing::AssertionFailure() << got.size() << " bytes instead of " << expected.size();
  }
  const auto [a, b] = std::mismatch(got.begin(), got.end(), expected.begin());
  if (a == got.end()) return ::testing::AssertionSuccess();
  size_t different = 0;
  for (size_t i = 0; i < got.size(); ++i) different += got[i] != expected[i] ? 1 : 0;
  return ::testing::AssertionFailure() << different << " of " << got.size() << " bytes differ, the first at "
                                       << a - got.begin() << ": " << static_cast<int>(*a) << " instead of "
                                       << static_cast<int>(*b);
}

}  // namespace gdsdata::testing
