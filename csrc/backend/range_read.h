// One range of an object into memory: attempts, resumed where the last one ended, until every byte
// is there, or with the reason why not.
//
//   access --> window --> attempt: head is judged --> bytes to the sink --> end is judged
//     ^                                                                        │
//     └──────────────────────────── backoff <─────────── kRetry ───────────────┘
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "backend/http_client.h"
#include "backend/range_verdict.h"
#include "base/remote_object.h"

namespace gdsdata {

// Lives until its end. Everything but `begin` happens on a reactor's thread.
class RangeRead : public std::enable_shared_from_this<RangeRead> {
 public:
  struct Sink {
    // Takes bytes at an offset of the object. They come in order, each once.
    std::function<void(uint64_t offset, std::span<const std::byte>)> take;
    // Optional. Returns memory into which the bytes from this offset on may be received before they
    // are taken; empty if there is none.
    std::function<std::span<std::byte>(uint64_t offset)> memory_at = nullptr;
  };
  // The last call. Must not block or throw.
  using Done = std::function<void(std::optional<Error>)>;
  // Returns true once nobody wants the bytes. The range then ends with the attempt in flight,
  // before its deadline. Not called after `done`.
  using Canceled = std::function<bool()>;

  static void begin(std::shared_ptr<HttpClient> client, std::shared_ptr<RemoteObject> object, ObjectRange range,
                    Sink sink, Done done, Canceled canceled = nullptr);
  ~RangeRead();

 private:
  class Attempt;
  using Clock = HttpReactor::Clock;

  RangeRead(std::shared_ptr<HttpClient> client, std::shared_ptr<RemoteObject> object, ObjectRange range, Sink sink,
            Done done, Canceled canceled);
  // Takes a step of this read, which fails with what the step throws.
  template <typename Step>
  void guard(Step step) noexcept;
  void ask_access();
  void take_access(std::shared_ptr<const ObjectAccess> access, std::optional<Error> error);
  void start_attempt();
  HttpRequest request_for(const std::string& url) const;
  std::unique_ptr<Attempt> make_attempt(bool fresh_connection);
  void watch();
  void look_at_progress();
  void end_stalled_attempt();
  void hedge();
  bool take_first_byte(Attempt& attempt);
  void attempt_ended(Attempt& attempt, Verdict verdict);
  void note_end_of(const Attempt& attempt);
  uint64_t least_progress() const;
  void retry(const Verdict& verdict);
  bool is_canceled() const { return canceled_ && canceled_(); }
  void finish_canceled();
  void finish(std::optional<Error> error);
  std::chrono::milliseconds backoff(const Verdict& verdict);
  ObjectRange left() const { return {position_, range_.end}; }
  HttpReactor& reactor() { return shard_.reactor; }

  std::shared_ptr<RangeRead> self_;  // until the end
  const std::shared_ptr<HttpClient> client_;
  HttpShard& shard_;
  const std::shared_ptr<RemoteObject> object_;
  const ObjectRange range_;
  const Sink sink_;
  Done done_;
  const Canceled canceled_;
  Clock::time_point deadline_;  // from the first attempt on
  uint64_t position_;  // bytes before it are delivered
  std::shared_ptr<const ObjectAccess> access_;
  unsigned accesses_dropped_ = 0;  // since the last progress
  unsigned idle_attempts_ = 0;  // in a row, without progress
  uint64_t attempts_ = 0;
  bool doubts_connections_ = false;  // the last attempt got no answer: others in the pool may be dead, too
  // At most one of them delivers: the first that has a byte. The other one then ends.
  std::unique_ptr<Attempt> attempt_, second_;
  Clock::time_point last_byte_;
  std::optional<uint64_t> position_at_look_;  // past the deadline
  HttpReactor::Timer watch_, hedge_;
};

}  // namespace gdsdata
