// An HTTP server on the loopback interface that answers ranges of one object, or whatever a test
// chooses in their place.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "testing.h"

namespace gdsdata::testing {

class RangeServer {
 public:
  struct Asked {
    size_t number = 0;  // of the request, from 0 on
    std::string head;
    uint64_t begin = 0, end = 0;
  };
  enum class Then { kGoOn, kClose, kReset, kStall };
  struct Answer {
    std::string head;
    std::span<const std::byte> body;
    Then then = Then::kGoOn;
    std::chrono::milliseconds delay{0};
    std::chrono::milliseconds between{0};  // chunks of 1000 bytes
  };
  using Choose = std::function<Answer(const Asked&)>;

  // Without a choice, every range is answered.
  explicit RangeServer(Bytes object, Choose choose = nullptr)
      : object_(std::move(object)),
        choose_(choose ? std::move(choose) : [this](const Asked& asked) { return usual(asked); }) {
    listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    EXPECT_EQ(::bind(listener_, reinterpret_cast<sockaddr*>(&address), length), 0);
    EXPECT_EQ(::listen(listener_, 256), 0);
    ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length);
    port_ = ntohs(address.sin_port);
    accepting_ = std::thread([this] { accept_all(); });
  }
  ~RangeServer() {
    {
      std::lock_guard lock(mutex_);
      ends_ = true;
      for (const int socket : sockets_) ::shutdown(socket, SHUT_RDWR);
    }
    ended_.notify_all();
    ::shutdown(listener_, SHUT_RDWR);
    accepting_.join();
    for (std::thread& thread : threads_) thread.join();
    ::close(listener_);
  }

  std::string url(const std::string& query = "") const {
    return "http://127.0.0.1:" + std::to_string(port_) + "/object" + query;
  }
  const Bytes& object() const { return object_; }
  size_t requests() const { return requests_.load(); }
  size_t connections() const { return connections_.load(); }
  std::vector<Asked> log() const {
    std::lock_guard lock(mutex_);
    return log_;
  }

  // The right answer to a range, with another end or ETag if the test wants one.
  Answer usual(const Asked& asked, const std::string& etag = "\"v1\"") const {
    const uint64_t length = asked.end - asked.begin;
    return {"HTTP/1.1 206 Partial Content\r\nContent-Length: " + std::to_string(length) + "\r\nContent-Range: bytes " +
                std::to_string(asked.begin) + "-" + std::to_string(asked.end - 1) + "/" +
                std::to_string(object_.size()) + "\r\nETag: " + etag + "\r\n\r\n",
            std::span(object_).subspan(asked.begin, length)};
  }
  Answer cut(const Asked& asked, size_t body_bytes, Then then) const {
    Answer answer = usual(asked);
    answer.body = answer.body.first(std::min(body_bytes, answer.body.size()));
    answer.then = then;
    return answer;
  }
  static Answer refusal(int status, const std::string& lines = "", const std::string& code = "Code") {
    static std::mutex mutex;
    static std::vector<std::unique_ptr<std::string>> kept;
    std::lock_guard lock(mutex);
    const auto& body = *kept.emplace_back(std::make_unique<std::string>("<Error><Code>" + code + "</Code></Error>"));
    return {"HTTP/1.1 " + std::to_string(status) + " x\r\n" + lines +
                "x-amz-request-id: REQ7\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n",
            std::as_bytes(std::span(body))};
  }

 private:
  void accept_all() {
    for (;;) {
      const int socket = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (socket < 0 && errno == EMFILE) {  // a test has taken all descriptors
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        continue;
      }
      if (socket < 0) return;
      const int yes = 1;
      ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
      std::lock_guard lock(mutex_);
      if (ends_) {
        ::close(socket);
        return;
      }
      ++connections_;
      sockets_.push_back(socket);
      threads_.emplace_back([this, socket] { serve(socket); });
    }
  }

  void serve(int socket) {
    std::string received;
    while (answer_one(socket, received)) {
    }
    std::lock_guard lock(mutex_);
    std::erase(sockets_, socket);
    ::close(socket);
  }

  bool answer_one(int socket, std::string& received) {
    size_t end = 0;
    while ((end = received.find("\r\n\r\n")) == std::string::npos) {
      char buffer[4096];
      const ssize_t count = ::recv(socket, buffer, sizeof(buffer), 0);
      if (count <= 0) return false;
      received.append(buffer, static_cast<size_t>(count));
    }
    Asked asked;
    asked.head = received.substr(0, end);
    received.erase(0, end + 4);
    asked.end = object_.size();
    if (const size_t at = asked.head.find("Range: bytes="); at != std::string::npos) {
      char* rest = nullptr;
      asked.begin = std::strtoull(asked.head.c_str() + at + 13, &rest, 10);
      asked.end = std::strtoull(rest + 1, nullptr, 10) + 1;
    }
    {
      std::lock_guard lock(mutex_);
      asked.number = requests_++;
      log_.push_back(asked);
    }
    const Answer answer = choose_(asked);
    if (answer.delay.count() > 0 && pause(answer.delay)) return false;
    if (!send_all(socket, std::as_bytes(std::span(answer.head)))) return false;
    for (auto left = answer.body; !left.empty();) {
      const auto chunk = answer.between.count() > 0 ? left.first(std::min<size_t>(left.size(), 1000)) : left;
      if (!send_all(socket, chunk)) return false;
      left = left.subspan(chunk.size());
      if (answer.between.count() > 0 && pause(answer.between)) return false;
    }
    if (answer.then == Then::kReset) {
      // The client receives the bytes before the RST, which would discard them.
      pause(std::chrono::milliseconds(5));
      const linger now{1, 0};
      ::setsockopt(socket, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
    }
    if (answer.then == Then::kStall) pause(std::chrono::hours(1));
    return answer.then == Then::kGoOn;
  }

  // Returns true if the server ends.
  bool pause(std::chrono::milliseconds time) {
    std::unique_lock lock(mutex_);
    return ended_.wait_for(lock, time, [this] { return ends_; });
  }

  static bool send_all(int socket, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t count = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (count <= 0) return false;
      bytes = bytes.subspan(static_cast<size_t>(count));
    }
    return true;
  }

  const Bytes object_;
  const Choose choose_;
  int listener_ = -1;
  uint16_t port_ = 0;
  std::atomic<size_t> requests_{0}, connections_{0};
  mutable std::mutex mutex_;  // guards the members that follow
  std::condition_variable ended_;
  bool ends_ = false;
  std::vector<int> sockets_;
  std::vector<std::thread> threads_;
  std::vector<Asked> log_;
  std::thread accepting_;
};

}  // namespace gdsdata::testing
