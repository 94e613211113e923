#include "backend/plain_connections.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace gdsdata {

namespace {

// A firewall may drop a connection that is idle for longer. libcurl has the same limit.
constexpr std::chrono::seconds kLongestIdle{118};

bool is_quiet(int socket) {
  char byte = 0;
  return ::recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
}

}  // namespace

std::optional<PlainConnection> PlainConnections::take(std::string_view origin) {
  const auto oldest = std::chrono::steady_clock::now() - kLongestIdle;
  for (size_t i = idle_.size(); i-- > 0;) {
    if (idle_[i].connection.origin != origin) continue;
    PlainConnection connection = std::move(idle_[i].connection);
    const bool is_fresh = idle_[i].since >= oldest;
    idle_.erase(idle_.begin() + static_cast<ptrdiff_t>(i));
    if (is_fresh && is_quiet(connection.socket.get())) return connection;
  }
  return std::nullopt;
}

void PlainConnections::keep(PlainConnection connection) noexcept {
  if (idle_.size() >= most_) idle_.erase(idle_.begin());
  idle_.push_back({std::move(connection), std::chrono::steady_clock::now()});
}

bool PlainConnections::close_one() {
  if (idle_.empty()) return false;
  idle_.erase(idle_.begin());
  return true;
}

bool PlainConnections::close_ready(int socket) {
  const auto found =
      std::find_if(idle_.begin(), idle_.end(), [&](const Idle& one) { return one.connection.socket.get() == socket; });
  if (found == idle_.end()) return false;
  // Its number may be of a socket that was closed in the same turn.
  if (!is_quiet(socket)) idle_.erase(found);
  return true;
}

}  // namespace gdsdata
