// Connections without TLS that no exchange uses now.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "backend/socket_poll.h"

namespace gdsdata {

struct PlainConnection {
  std::string origin;
  WatchedSocket socket;  // watched for reading
  bool is_used = false;  // a response came over it before
};

class PlainConnections {
 public:
  // Keeps at most so many, and has memory for them.
  explicit PlainConnections(size_t most) : most_(most) { idle_.reserve(most); }
  // Returns the one that was used last, if the server has not closed it.
  std::optional<PlainConnection> take(std::string_view origin);
  // Closes the one that is idle for longest if there is no room.
  void keep(PlainConnection connection) noexcept;
  // Closes an idle connection whose socket is ready: the server has closed it, or sent what nobody
  // asked for. Returns false if it is none of these.
  bool close_ready(int socket);
  void close_all(std::string_view origin) {
    std::erase_if(idle_, [&](const Idle& one) { return one.connection.origin == origin; });
  }
  // Closes the one that is idle for longest. Returns false if there is none.
  bool close_one();
  void clear() { idle_.clear(); }

 private:
  struct Idle {
    PlainConnection connection;
    std::chrono::steady_clock::time_point since;
  };
  const size_t most_;
  std::vector<Idle> idle_;  // in the order of `since`
};

}  // namespace gdsdata
