// One request and its whole response, for a caller that waits: lists, sizes, and writes.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "backend/http_client.h"

namespace gdsdata {

struct HttpResponse {
  HttpHead head;
  std::vector<std::byte> body;
};

// Calls `poll` every now and then. If `poll` throws, cancels the request and rethrows. Throws
// Failure: kIo if there is no complete response, or if its body is longer than `most_body_bytes`.
HttpResponse http_exchange(const HttpRequest& request, size_t most_body_bytes, const std::function<void()>& poll);

}  // namespace gdsdata
