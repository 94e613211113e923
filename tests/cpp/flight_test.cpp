// Flights without a kernel: the test issues each step, or invents its result.
#include "backend/flight.h"

#include <sys/uio.h>
#include <unistd.h>

#include <functional>

#include "backend/bounce.h"
#include "testing.h"

namespace gdsdata::testing {
namespace {

// A refusal is remembered for the process, so each test runs in its own.
class FlightTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kLength = 3 * 65536 + 777, kOffset = 1001;

  void SetUp() override {
    ::testing::FLAGS_gtest_death_test_style = "threadsafe";
    if (File::open_for_reading(folder_.write("probe", Bytes(1)))->direct() < 0) GTEST_SKIP() << "no O_DIRECT here";
  }
  static void in_own_process(const std::function<void()>& test) {
    EXPECT_EXIT(
        {
          test();
          std::_Exit(HasFailure() ? 1 : 0);
        },
        ::testing::ExitedWithCode(0), "");
  }

  struct Asked {
    Bytes memory;
    Piece piece;
    Flight flight;
  };
  std::unique_ptr<Asked> begin(File& file, Direction direction, const Bytes& bytes) {
    auto asked = std::make_unique<Asked>();
    asked->memory = bytes;
    asked->piece = {kOffset, kLength, asked->memory.data()};
    const Request request{0, direction, Conversion::kNone, &file, kOffset, kLength, {&asked->piece, 1}};
    EXPECT_TRUE(asked->flight.begin(request, arena_, false, options_, nullptr));
    return asked;
  }
  static int64_t issue(const Flight::Step& step, uint64_t most = UINT64_MAX) {
    iovec first = step.memory[0];
    if (first.iov_len > most) first.iov_len = most;
    const auto offset = static_cast<off_t>(step.offset);
    const auto count = static_cast<int>(step.memory_count);
    const ssize_t moved = most != UINT64_MAX ? ::preadv(step.fd, &first, 1, offset)
                          : step.write       ? ::pwritev(step.fd, step.memory.data(), count, offset)
                                             : ::preadv(step.fd, step.memory.data(), count, offset);
    return moved < 0 ? -errno : moved;
  }
  // Answers EINVAL to direct steps and issues the others.
  static void refuse_until_ended(Flight& flight) {
    while (!flight.ended()) {
      const Flight::Step& step = flight.next();
      ASSERT_GE(step.fd, 0);
      flight.advance(step.direct ? -EINVAL : issue(step));
    }
  }

  BackendOptions options_;
  BounceArena arena_{*host_device(), 16 << 20};
  const TemporaryFolder folder_;
  const Bytes content_ = random_bytes(kOffset + kLength + 5000, 1);
};

TEST_F(FlightTest, ReadsInFlightAtTheFirstRefusalAllFallBack) {
  in_own_process([&] {
    const auto file = File::open_for_reading(folder_.write("a", content_));
    std::vector<std::unique_ptr<Asked>> all;
    for (int i = 0; i < 4; ++i) {
      all.push_back(begin(*file, Direction::kRead, Bytes(kLength)));
      EXPECT_TRUE(all.back()->flight.next().direct);
    }
    for (const auto& asked : all) asked->flight.advance(-EINVAL);
    EXPECT_EQ(direct_refusals().size(), 1u);
    for (const auto& asked : all) {
      refuse_until_ended(asked->flight);
      Completion completion = asked->flight.finish();
      ASSERT_FALSE(completion.error) << completion.error->message;
      EXPECT_EQ(std::memcmp(asked->memory.data(), content_.data() + kOffset, kLength), 0);
    }
  });
}

TEST_F(FlightTest, AReadThatGoesOnBehindAnothersRefusalKeepsItsDescriptor) {
  in_own_process([&] {
    const auto file = File::open_for_reading(folder_.write("a", content_));
    const auto refused = begin(*file, Direction::kRead, Bytes(kLength));
    const auto goes_on = begin(*file, Direction::kRead, Bytes(kLength));
    const Flight::Step& step = goes_on->flight.next();
    const int fd = step.fd;
    goes_on->flight.advance(issue(step, 4096));
    refused->flight.next();
    refused->flight.advance(-EINVAL);
    EXPECT_EQ(goes_on->flight.next().fd, fd);
    EXPECT_TRUE(goes_on->flight.next().direct);
    while (!goes_on->flight.ended()) goes_on->flight.advance(issue(goes_on->flight.next()));
    EXPECT_FALSE(goes_on->flight.finish().error);
    EXPECT_EQ(std::memcmp(goes_on->memory.data(), content_.data() + kOffset, kLength), 0);
  });
}

TEST_F(FlightTest, WritesInFlightAtTheFirstRefusalAllFallBack) {
  in_own_process([&] {
    const std::string path = folder_.write("w", Bytes(content_.size()));
    const auto file = File::open_for_writing(path, false);
    const Bytes written = random_bytes(kLength, 2);
    std::vector<std::unique_ptr<Asked>> all;
    for (int i = 0; i < 3; ++i) {
      all.push_back(begin(*file, Direction::kWrite, written));
      Flight& flight = all.back()->flight;
      while (!flight.next().direct) flight.advance(issue(flight.next()));  // up to its whole pages
    }
    for (const auto& asked : all) asked->flight.advance(-EINVAL);
    for (const auto& asked : all) {
      refuse_until_ended(asked->flight);
      Completion completion = asked->flight.finish();
      ASSERT_FALSE(completion.error) << completion.error->message;
      EXPECT_EQ(completion.bytes[Route::kBuffered], kLength);
    }
    Bytes expected(content_.size());
    std::copy(written.begin(), written.end(), expected.begin() + kOffset);
    EXPECT_TRUE(read_file(path) == expected);
  });
}

TEST_F(FlightTest, OtherErrorsOfADirectReadAreErrorsAndNoRefusal) {
  in_own_process([&] {
    const auto file = File::open_for_reading(folder_.write("a", content_));
    for (const int system_errno : {EIO, ENOMEM, EMFILE, EFAULT}) {
      const auto asked = begin(*file, Direction::kRead, Bytes(kLength));
      asked->flight.next();
      asked->flight.advance(-system_errno);
      ASSERT_TRUE(asked->flight.ended());
      EXPECT_EQ(asked->flight.finish().error->system_errno, system_errno);
      EXPECT_GE(file->direct(), 0);
    }
    EXPECT_TRUE(direct_refusals().empty());
  });
}

TEST_F(FlightTest, ARefusalIsAnErrorWhereFallbacksAre) {
  in_own_process([&] {
    options_.strict = true;
    const auto file = File::open_for_reading(folder_.write("a", content_));
    const auto asked = begin(*file, Direction::kRead, Bytes(kLength));
    asked->flight.next();
    asked->flight.advance(-EINVAL);
    ASSERT_TRUE(asked->flight.ended());
    EXPECT_EQ(asked->flight.finish().error->system_errno, EINVAL);
  });
}

}  // namespace
}  // namespace gdsdata::testing
