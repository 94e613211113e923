#include "backend/socket_poll.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

#include "base/error.h"

namespace gdsdata {

namespace {

// Sockets that one call returns. The others come with the next.
constexpr size_t kMostReady = 64;

int opened(const std::function<int()>& open) {
  const int fd = open_descriptor(open);
  if (fd >= 0) return fd;
  const int reason = errno;
  throw Failure({ErrorCode::kIo, std::string("no descriptor to wait for sockets with: ") + std::strerror(reason), "", 0,
                 0, reason});
}

}  // namespace

SocketPoll::SocketPoll()
    : epoll_(opened([] { return ::epoll_create1(EPOLL_CLOEXEC); })),
      wake_(opened([] { return ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); })) {
  ready_.reserve(kMostReady);
  watch(wake_.get(), /*reads=*/true, /*writes=*/false);
}

void SocketPoll::watch(int socket, bool reads, bool writes) {
  epoll_event event{};
  event.events = (reads ? EPOLLIN : 0U) | (writes ? EPOLLOUT : 0U);
  event.data.fd = socket;
  // The kernel removes a socket that is closed, so MOD fails if its number was given to a new one.
  // If there is no memory to add a socket, it is never ready, and time limits end its exchange.
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, socket, &event) != 0 && errno == ENOENT) {
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket, &event);
  }
}

void SocketPoll::forget(int socket) { ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, socket, nullptr); }

std::span<const SocketPoll::Ready> SocketPoll::wait(std::chrono::milliseconds patience) {
  std::array<epoll_event, kMostReady> events;
  const int count = ::epoll_wait(epoll_.get(), events.data(), kMostReady, static_cast<int>(patience.count()));
  ready_.clear();
  for (int i = 0; i < count; ++i) {
    const auto [flags, data] = events[static_cast<size_t>(i)];
    if (data.fd == wake_.get()) {
      uint64_t wakes = 0;
      [[maybe_unused]] const ssize_t read = ::read(wake_.get(), &wakes, sizeof(wakes));
      continue;
    }
    // libcurl reads a hang-up as an end of the data.
    ready_.push_back({data.fd, (flags & (EPOLLIN | EPOLLHUP)) != 0, (flags & EPOLLOUT) != 0, (flags & EPOLLERR) != 0});
  }
  return ready_;
}

void SocketPoll::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
}

WatchedSocket& WatchedSocket::operator=(WatchedSocket&& other) noexcept {
  if (this == &other) return *this;
  forget();
  poll_ = other.poll_;
  socket_ = std::move(other.socket_);
  return *this;
}

void WatchedSocket::forget() {
  if (socket_.get() >= 0) poll_->forget(socket_.get());
}

}  // namespace gdsdata
