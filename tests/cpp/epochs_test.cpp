// Objects that are removed from a structure that threads read without a lock.
#include "base/epochs.h"

#include <sys/wait.h>

#include <array>
#include <atomic>
#include <optional>
#include <thread>

#include "testing.h"

namespace gdsdata::testing {
namespace {

class Removed : public ::testing::Test {
 protected:
  // Adds an object that was removed just now. Returns what says whether it was destroyed.
  std::weak_ptr<int> remove() {
    auto object = std::make_shared<int>(1);
    std::weak_ptr<int> watched = object;
    EXPECT_TRUE(limbo_.add([&] { return Limbo::Object{std::move(object)}; }));
    return watched;
  }
  void destroy_unused() {
    std::vector<std::shared_ptr<void>> unused;
    limbo_.take_unused(unused);
  }

  Limbo limbo_, other_;
  PinSlot slot_, other_slot_;
};

TEST_F(Removed, IsDestroyedAtOnceIfNobodyReads) {
  const auto object = remove();
  EXPECT_FALSE(object.expired());
  EXPECT_EQ(limbo_.size(), 1u);
  destroy_unused();
  EXPECT_TRUE(object.expired());
  EXPECT_EQ(limbo_.size(), 0u);
  EXPECT_FALSE(limbo_.add([] { return Limbo::Object{}; }));
  EXPECT_EQ(limbo_.size(), 0u);
}

TEST_F(Removed, WaitsForPinsThatBeganBefore) {
  std::optional<Pin> first, second;
  first.emplace(slot_, limbo_);
  second.emplace(other_slot_, limbo_);
  const auto object = remove();
  destroy_unused();
  EXPECT_FALSE(object.expired());
  first.reset();
  destroy_unused();
  EXPECT_FALSE(object.expired());
  second.reset();
  destroy_unused();
  EXPECT_TRUE(object.expired());
}

TEST_F(Removed, DoesNotWaitForPinsThatBeganAfterwards) {
  std::optional<Pin> before(std::in_place, slot_, limbo_);
  const auto first = remove();
  const Pin after(other_slot_, limbo_);
  const auto second = remove();
  before.reset();
  destroy_unused();
  EXPECT_TRUE(first.expired());
  EXPECT_FALSE(second.expired());
}

TEST_F(Removed, DoesNotWaitForReadersOfAnotherStructure) {
  const Pin pin(slot_, other_);
  const auto object = remove();
  destroy_unused();
  EXPECT_TRUE(object.expired());
}

TEST_F(Removed, WaitsForThoseWhoHoldIt) {
  const auto object = remove();
  auto held = object.lock();
  destroy_unused();
  EXPECT_EQ(limbo_.size(), 1u);
  held.reset();
  destroy_unused();
  EXPECT_EQ(limbo_.size(), 0u);
}

// Descriptors of a file that stays in its table.
TEST_F(Removed, WaitsForThoseWhoHoldTheWholeOfWhichItIsAPart) {
  const auto whole = std::make_shared<int>(1);
  auto held = whole;
  EXPECT_TRUE(limbo_.add([&] { return Limbo::Object{std::make_shared<int>(2), whole}; }));
  destroy_unused();
  EXPECT_EQ(limbo_.size(), 1u);
  held.reset();
  destroy_unused();
  EXPECT_EQ(limbo_.size(), 0u);
}

TEST_F(Removed, DoesNotWaitForThreadsThatAForkedChildLacks) {
  std::atomic<bool> pinned{false}, ends{false};
  std::thread reader([&] {
    const Pin pin(slot_, limbo_);
    pinned = true;
    while (!ends) std::this_thread::yield();
  });
  while (!pinned) std::this_thread::yield();
  const auto object = remove();
  destroy_unused();
  EXPECT_FALSE(object.expired());
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);
    destroy_unused();
    const bool destroyed = object.expired();
    PinSlot own;
    const Pin pin(own, limbo_);
    const auto later = remove();
    destroy_unused();
    std::_Exit(destroyed && !later.expired() ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  ends = true;
  reader.join();
}

// Readers find objects without a lock, while another thread replaces them. A destroyed object has a
// value that no reader may see. Sanitizers also find the use of freed memory.
TEST(Epochs, ReadersNeverSeeADestroyedObject) {
  constexpr size_t kObjects = 16, kReaders = 3, kReplacements = 3000;
  constexpr uint64_t kAlive = 7, kDestroyed = 9;
  struct Object {
    ~Object() { value = kDestroyed; }
    volatile uint64_t value = kAlive;
  };
  std::array<std::atomic<Object*>, kObjects> found{};
  std::array<std::shared_ptr<Object>, kObjects> owned;
  Limbo limbo;
  std::atomic<bool> ends{false};
  std::atomic<size_t> reads{0}, wrong{0};
  std::vector<std::thread> readers;
  for (size_t i = 0; i < kReaders; ++i) {
    readers.emplace_back([&, i] {
      std::mt19937 random(static_cast<uint32_t>(i));
      PinSlot slot;
      while (!ends) {
        const Pin pin(slot, limbo);
        std::array<Object*, 8> objects{};
        for (Object*& object : objects) object = found[random() % kObjects];
        for (const Object* object : objects) {
          if (object == nullptr) continue;
          if (object->value != kAlive) ++wrong;
          ++reads;
        }
      }
    });
  }
  std::mt19937 random(99);
  size_t most_waiting = 0;
  for (size_t step = 0; step < kReplacements || (reads < 1000 && step < 1000 * kReplacements); ++step) {
    const size_t place = random() % kObjects;
    limbo.add([&] {
      found[place] = nullptr;
      return Limbo::Object{std::move(owned[place])};
    });
    owned[place] = std::make_shared<Object>();
    found[place] = owned[place].get();
    std::vector<std::shared_ptr<void>> unused;
    limbo.take_unused(unused);
    most_waiting = std::max(most_waiting, limbo.size());
  }
  ends = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_GE(reads, 1000u);
  std::vector<std::shared_ptr<void>> unused;
  limbo.take_unused(unused);
  EXPECT_EQ(limbo.size(), 0u) << "objects are left, and at most " << most_waiting << " waited";
}

}  // namespace
}  // namespace gdsdata::testing
