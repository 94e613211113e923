#include "backend/socket_poll.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <thread>
#include <vector>

namespace gdsdata {
namespace {

constexpr std::chrono::milliseconds kNone{0}, kLong{20'000};

// Two sockets that are connected.
struct Pair {
  Pair() {
    int sockets[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, sockets), 0);
    near = Descriptor(sockets[0]);
    far = Descriptor(sockets[1]);
  }
  void send() { EXPECT_EQ(::write(far.get(), "x", 1), 1); }
  Descriptor near, far;
};

std::vector<int> ready(SocketPoll& poll, std::chrono::milliseconds patience) {
  std::vector<int> sockets;
  for (const SocketPoll::Ready& one : poll.wait(patience)) sockets.push_back(one.socket);
  return sockets;
}

TEST(SocketPoll, ASocketIsReadyForWhatItIsWatchedFor) {
  SocketPoll poll;
  Pair pair;
  poll.watch(pair.near.get(), /*reads=*/true, /*writes=*/false);
  EXPECT_TRUE(ready(poll, kNone).empty());
  poll.watch(pair.near.get(), /*reads=*/false, /*writes=*/true);
  auto now = poll.wait(kNone);
  ASSERT_EQ(now.size(), 1U);
  EXPECT_TRUE(now[0].writable && !now[0].readable && !now[0].failed);
  pair.send();
  poll.watch(pair.near.get(), /*reads=*/true, /*writes=*/true);
  now = poll.wait(kLong);
  ASSERT_EQ(now.size(), 1U);
  EXPECT_TRUE(now[0].writable && now[0].readable);
}

TEST(SocketPoll, ASocketStaysReadyUntilItIsRead) {
  SocketPoll poll;
  Pair pair;
  poll.watch(pair.near.get(), /*reads=*/true, /*writes=*/false);
  pair.send();
  EXPECT_EQ(ready(poll, kLong), std::vector<int>{pair.near.get()});
  EXPECT_EQ(ready(poll, kLong), std::vector<int>{pair.near.get()});
}

TEST(SocketPoll, AnEndOfTheOtherSideIsReadable) {
  SocketPoll poll;
  Pair pair;
  poll.watch(pair.near.get(), /*reads=*/true, /*writes=*/false);
  pair.far.reset();
  const auto now = poll.wait(kLong);
  ASSERT_EQ(now.size(), 1U);
  EXPECT_TRUE(now[0].readable);
}

TEST(SocketPoll, AForgottenSocketIsNeverReady) {
  SocketPoll poll;
  Pair pair;
  poll.watch(pair.near.get(), /*reads=*/true, /*writes=*/false);
  poll.forget(pair.near.get());
  pair.send();
  EXPECT_TRUE(ready(poll, kNone).empty());
}

TEST(SocketPoll, TheNumberOfAClosedSocketIsWatchedAnew) {
  SocketPoll poll;
  int closed = -1;
  {
    Pair pair;
    closed = pair.near.get();
    poll.watch(closed, /*reads=*/true, /*writes=*/true);
  }
  EXPECT_TRUE(ready(poll, kNone).empty());
  Pair next;
  ASSERT_EQ(next.near.get(), closed);
  poll.watch(closed, /*reads=*/true, /*writes=*/false);
  next.send();
  EXPECT_EQ(ready(poll, kLong), std::vector<int>{closed});
}

TEST(SocketPoll, ManySocketsAreAllReturnedInTurns) {
  SocketPoll poll;
  std::vector<Pair> pairs(200);
  for (Pair& pair : pairs) {
    poll.watch(pair.near.get(), /*reads=*/true, /*writes=*/false);
    pair.send();
  }
  size_t seen = 0;
  while (seen < pairs.size()) {
    const auto sockets = ready(poll, kLong);
    ASSERT_FALSE(sockets.empty());
    for (const int socket : sockets) poll.forget(socket);
    seen += sockets.size();
  }
  EXPECT_TRUE(ready(poll, kNone).empty());
}

TEST(SocketPoll, AWakeEndsAWaitAndIsUsedUp) {
  SocketPoll poll;
  std::thread waker([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    poll.wake();
    poll.wake();
  });
  const auto begun = std::chrono::steady_clock::now();
  EXPECT_TRUE(ready(poll, kLong).empty());
  EXPECT_LT(std::chrono::steady_clock::now() - begun, kLong);
  waker.join();
  poll.wait(kNone);  // for the second wake
  const auto again = std::chrono::steady_clock::now();
  EXPECT_TRUE(ready(poll, std::chrono::milliseconds(30)).empty());
  EXPECT_GE(std::chrono::steady_clock::now() - again, std::chrono::milliseconds(29));
}

}  // namespace
}  // namespace gdsdata
