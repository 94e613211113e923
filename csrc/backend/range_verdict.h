// Judges the answer to a request for a range of an object. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "backend/http_head.h"
#include "backend/http_receiver.h"
#include "base/error.h"
#include "base/remote_object.h"

namespace gdsdata {

// The bytes [begin, end) of an object.
struct ObjectRange {
  uint64_t begin = 0, end = 0;
  uint64_t length() const { return end - begin; }
};

struct Verdict {
  enum class Action : uint8_t {
    kTake,           // the body is what was asked for
    kRetry,          // the same request may succeed later
    kRetryThrottled,  // it may, with fewer requests in flight
    kRetrySigned,    // it may, with a new access
    kFail,
  };
  Action action = Action::kTake;
  std::string reason = {};                  // except for kTake: a sentence for the user, without its subject
  ErrorCode code = ErrorCode::kIo;          // of kFail, or of a retry that is the last
  int system_errno = 0;
  std::optional<double> retry_after_s = {};  // as the server asks
  bool is_expired = false;                   // of kRetrySigned: the access ended, and was not refused

  Error error(const RemoteObject& object, ObjectRange asked) const;
};

// Judges a status of success: whether these bytes of this version follow.
Verdict judge_content(const HttpHead& head, const RemoteObject& object, ObjectRange asked);
// Judges any other status. `body` is its beginning, in which stores name the reason.
Verdict judge_refusal(const HttpHead& head, std::string_view body);
// Judges a redirect to an absolute URL: kTake if it may be followed. `hops`: that were followed.
Verdict judge_redirect(std::string_view from, std::string_view to, unsigned hops);
// Judges an exchange that failed: the connection, TLS, a time limit.
Verdict judge_failure(const HttpEnd& end);
// Judges a complete exchange whose body has another length than was asked for.
Verdict judge_wrong_length(uint64_t received, uint64_t asked);

inline bool is_success(int status) { return status >= 200 && status < 300; }
inline bool is_redirect(int status) {
  return status == 301 || status == 302 || status == 303 || status == 307 || status == 308;
}

}  // namespace gdsdata
