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

// Cuts the body to `most_body_bytes`. Calls `poll` every now and then; if it throws, cancels the
// request and rethrows. Throws Failure (kIo) if there is no complete response.
HttpResponse http_exchange(const HttpRequest& request, size_t most_body_bytes, const std::function<void()>& poll);

}  // namespace gdsdata
