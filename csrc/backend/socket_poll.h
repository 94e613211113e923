// Waits for many sockets, whatever their number, by epoll.
#pragma once

#include <chrono>
#include <span>
#include <utility>
#include <vector>

#include "base/descriptors.h"

namespace gdsdata {

// One thread uses it. Any thread may call `wake`.
class SocketPoll {
 public:
  struct Ready {
    int socket;
    bool readable, writable, failed;
  };

  // Throws Failure (kIo) without a descriptor for it.
  SocketPoll();
  SocketPoll(const SocketPoll&) = delete;
  SocketPoll& operator=(const SocketPoll&) = delete;

  // Adds a socket, or changes what it is watched for.
  void watch(int socket, bool reads, bool writes);
  void forget(int socket);  // which may be closed
  // Returns the sockets that are ready; none after a wake or at the end of `patience`. Sockets that
  // stay ready are returned again. Valid until the next call.
  std::span<const Ready> wait(std::chrono::milliseconds patience);
  void wake();

 private:
  const Descriptor epoll_, wake_;
  std::vector<Ready> ready_;
};

// A socket that leaves its poll before it is closed. Else the kernel reports it for as long as a
// forked child has it open.
class WatchedSocket {
 public:
  WatchedSocket(SocketPoll& poll, Descriptor socket) : poll_(&poll), socket_(std::move(socket)) {}
  WatchedSocket(WatchedSocket&&) noexcept = default;
  WatchedSocket& operator=(WatchedSocket&& other) noexcept;
  ~WatchedSocket() { forget(); }
  int get() const { return socket_.get(); }
  void watch(bool reads, bool writes) { poll_->watch(get(), reads, writes); }

 private:
  void forget();

  SocketPoll* poll_;
  Descriptor socket_;
};

}  // namespace gdsdata
