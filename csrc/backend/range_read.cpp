#include "backend/range_read.h"

#include <algorithm>
#include <cerrno>
#include <random>
#include <string>
#include <utility>

#include "base/descriptors.h"
#include "base/url.h"

namespace gdsdata {

namespace {

// After so many attempts in a row without progress, the range fails, if the deadline has not passed
// before. A server that is busy says so: then only the deadline counts.
constexpr unsigned kMostIdleAttempts = 12;
// An access that expires on its way is renewed so often without progress. One that is refused may
// have been withdrawn, and is renewed once.
constexpr unsigned kMostRenewals = 3;
// Signatures have the time in seconds, so within one of them the next is the same.
constexpr std::chrono::milliseconds kNextSignature{1000};
// Past the deadline, a response goes on if it has so many bytes in each stall_timeout.
constexpr uint64_t kLeastProgressBytes = 64 << 10;
// An attempt makes progress with so many bytes, or with this part of a short range.
constexpr uint64_t kAttemptsOfRange = 32;
// The beginning of a refusal's body, which names the reason.
constexpr size_t kMostReasonBytes = 4096;
// At most one request in so many is asked for twice.
constexpr uint64_t kRequestsOfHedge = 50;
constexpr double kMostRetryAfterS = 1e6;

}  // namespace

class RangeRead::Attempt final : public HttpReceiver {
 public:
  // It has a place in the window, and leaves it at its end.
  Attempt(RangeRead& owner, HttpWindow& window, bool fresh_connection)
      : owner_(owner), window_(window), fresh_connection_(fresh_connection), begun_(Clock::now()) {}
  ~Attempt() override {
    if (exchange_ != HttpReactor::kNone) owner_.reactor().cancel(exchange_);
    // Not in `take_body`: an atomic addition waits for the stores of the copy before it.
    owner_.client_->statistics().bytes.fetch_add(received_, std::memory_order_relaxed);
    window_.leave(throttled_);
  }

  // Begins where an earlier redirect led, if there was one.
  bool begin() {
    kept_redirect_ = owner_.object_->redirect();
    return start(kept_redirect_.empty() ? owner_.access_->url : kept_redirect_);
  }

  bool start(std::string url) {
    HttpRequest request = owner_.request_for(url);
    request.fresh_connection = fresh_connection_;
    url_ = std::move(url);
    exchange_ = owner_.reactor().start(std::move(request), *this);
    return exchange_ != HttpReactor::kNone;
  }

  bool take_head(HttpHead head) override {
    head_ = std::move(head);
    if (!is_success(head_.status)) return true;  // its body is the reason
    verdict_ = judge_content(head_, *owner_.object_, owner_.left());
    if (verdict_.action != Verdict::Action::kTake) return false;
    owner_.object_->set_etag(head_.header("etag"));
    if (hops_ > 0) owner_.object_->keep_redirect(url_);
    owner_.shard_.first_bytes.add(std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - begun_));
    return owner_.take_first_byte(*this);
  }

  std::span<std::byte> body_memory() override {
    if (!is_success(head_.status) || !owner_.sink_.memory_at) return {};
    const auto memory = owner_.sink_.memory_at(owner_.position_);
    return memory.first(std::min<uint64_t>(memory.size(), owner_.left().length()));
  }

  bool take_body(std::span<const std::byte> bytes) override {
    if (is_redirect(head_.status)) return true;  // nobody reads it
    if (!is_success(head_.status)) {
      const size_t kept = std::min(bytes.size(), kMostReasonBytes - reason_.size());
      reason_.append(reinterpret_cast<const char*>(bytes.data()), kept);
      return reason_.size() < kMostReasonBytes;
    }
    const ObjectRange left = owner_.left();
    if (bytes.size() > left.length()) {
      verdict_ = judge_wrong_length(received_ + bytes.size(), received_ + left.length());
      return false;
    }
    owner_.sink_.take(owner_.position_, bytes);
    owner_.position_ += bytes.size();
    received_ += bytes.size();
    owner_.last_byte_ = Clock::now();
    return true;
  }

  void ended(const HttpEnd& end) noexcept override {
    exchange_ = HttpReactor::kNone;
    owner_.guard([&] { judge(end); });
  }

  // May end this attempt.
  void take_waiting() {
    if (exchange_ != HttpReactor::kNone) owner_.reactor().take_waiting(exchange_);
  }

  bool delivers() const { return delivers_; }
  void deliver() { delivers_ = true; }
  uint64_t received() const { return received_; }
  bool answered() const { return head_.status != 0; }
  void drop_redirects(bool is_refused) const {
    owner_.object_->drop_redirect(kept_redirect_, is_refused);
    owner_.object_->drop_redirect(url_, is_refused);
  }

 private:
  void judge(const HttpEnd& end) {
    if (follow(end)) return;
    Verdict verdict;
    if (verdict_.action != Verdict::Action::kTake) {
      verdict = std::move(verdict_);
    } else if (is_redirect(head_.status) && end.code != CurlApi::kOk) {
      verdict = judge_failure(end);
    } else if (head_.status != 0 && !is_success(head_.status)) {
      verdict = judge_own_refusal();
    } else if (owner_.left().length() == 0 && delivers_) {
      verdict = {};
    } else if (end.code != CurlApi::kOk) {
      verdict = judge_failure(end);
    } else {
      verdict = judge_wrong_length(received_, received_ + owner_.left().length());
    }
    if (verdict.action != Verdict::Action::kTake)
      verdict.reason = without_words(std::move(verdict.reason), secret_words(*owner_.access_));
    throttled_ = verdict.action == Verdict::Action::kRetryThrottled;
    if (!kept_redirect_.empty() && verdict.action != Verdict::Action::kTake) {
      drop_redirects(!throttled_ && verdict.action != Verdict::Action::kRetry);
      if (!throttled_) verdict.action = Verdict::Action::kRetry;  // the access itself was not refused
    }
    owner_.attempt_ended(*this, std::move(verdict));
  }

  // The server may repeat words of the request. They go before its text is cut.
  Verdict judge_own_refusal() {
    const auto words = secret_words(*owner_.access_);
    for (auto& [name, value] : head_.headers) value = without_words(std::move(value), words);
    return judge_refusal(head_, without_words(std::move(reason_), words));
  }

  // Returns false if the response is no redirect, or one that is not followed.
  bool follow(const HttpEnd& end) {
    if (end.code != CurlApi::kOk || !is_redirect(head_.status) || end.redirect_url.empty()) return false;
    verdict_ = judge_redirect(url_, end.redirect_url, hops_++);
    if (verdict_.action != Verdict::Action::kTake) return false;
    head_ = {};
    if (start(end.redirect_url)) return true;
    verdict_ = {Verdict::Action::kFail, "libcurl refuses the URL of a redirect", ErrorCode::kIo, EINVAL};
    return false;
  }

  RangeRead& owner_;
  HttpWindow& window_;
  const bool fresh_connection_;
  const Clock::time_point begun_;
  HttpReactor::Exchange exchange_ = HttpReactor::kNone;
  std::string url_;    // after redirects
  std::string kept_redirect_;  // where it began, if an earlier redirect led there
  unsigned hops_ = 0;  // redirects; it keeps its place in the first host's window
  HttpHead head_;
  std::string reason_;
  Verdict verdict_;
  uint64_t received_ = 0;
  bool delivers_ = false;
  bool throttled_ = false;
};

void RangeRead::begin(std::shared_ptr<HttpClient> client, std::shared_ptr<RemoteObject> object, ObjectRange range,
                      Sink sink, Done done, Canceled canceled) {
  std::shared_ptr<RangeRead> read(new RangeRead(std::move(client), std::move(object), range, std::move(sink),
                                                std::move(done), std::move(canceled)));
  read->reactor().post([read] {
    read->self_ = read;
    read->guard([&] { read->ask_access(); });
  });
}

RangeRead::RangeRead(std::shared_ptr<HttpClient> client, std::shared_ptr<RemoteObject> object, ObjectRange range,
                     Sink sink, Done done, Canceled canceled)
    : client_(std::move(client)),
      shard_(client_->next_shard()),
      object_(std::move(object)),
      range_(range),
      sink_(std::move(sink)),
      done_(std::move(done)),
      canceled_(std::move(canceled)),
      position_(range.begin) {}

RangeRead::~RangeRead() = default;

template <typename Step>
void RangeRead::guard(Step step) noexcept {
  const auto self = shared_from_this();
  try {
    step();
  } catch (...) {
    finish(current_error());
  }
}

void RangeRead::ask_access() {
  auto access = object_->access_or_request([self = shared_from_this()](auto answered, auto error) {
    self->reactor().post([self, answered = std::move(answered), error = std::move(error)]() mutable {
      self->guard([&] { self->take_access(std::move(answered), std::move(error)); });
    });
  });
  if (access != nullptr) take_access(std::move(access), std::nullopt);
}

void RangeRead::take_access(std::shared_ptr<const ObjectAccess> access, std::optional<Error> error) {
  if (error) return finish(std::move(error));
  access_ = std::move(access);
  shard_.window_of(access_->url).enter([self = shared_from_this()] { self->guard([&] { self->start_attempt(); }); });
}

// The headers of the access may be secret, so no other server gets them.
HttpRequest RangeRead::request_for(const std::string& url) const {
  HttpRequest request;
  request.url = url;
  if (url == access_->url || origin_of(url) == origin_of(access_->url)) request.headers = access_->headers;
  request.headers.push_back("Range: bytes=" + std::to_string(position_) + "-" + std::to_string(range_.end - 1));
  // A weak tag never matches (RFC 9110, 13.1.1). The answer's tag is compared in any case.
  const std::string etag = object_->etag();
  if (!etag.empty() && !etag.starts_with("W/")) request.headers.push_back("If-Match: " + etag);
  request.connect_timeout = client_->options().connect_timeout;
  return request;
}

std::unique_ptr<RangeRead::Attempt> RangeRead::make_attempt(bool fresh_connection) {
  HttpWindow& window = shard_.window_of(access_->url);
  std::unique_ptr<Attempt> attempt;
  try {
    attempt = std::make_unique<Attempt>(*this, window, fresh_connection);
  } catch (...) {
    window.leave(false);
    throw;
  }
  ++shard_.started;
  client_->statistics().requests.fetch_add(1, std::memory_order_relaxed);
  return attempt->begin() ? std::move(attempt) : nullptr;
}

void RangeRead::start_attempt() {
  if (is_canceled()) {
    shard_.window_of(access_->url).leave(false);
    return finish_canceled();
  }
  // Time in a queue does not count, because other ranges make progress meanwhile.
  if (++attempts_ == 1) deadline_ = Clock::now() + client_->options().deadline;
  attempt_ = make_attempt(doubts_connections_);
  if (attempt_ == nullptr) {
    const Verdict refused{Verdict::Action::kFail, "libcurl refuses the request", ErrorCode::kIo, EINVAL};
    return finish(refused.error(*object_, left()));
  }
  last_byte_ = Clock::now();
  watch();
  const auto slow = shard_.first_bytes.slow();
  if (client_->options().hedge && slow) {
    hedge_ = reactor().at(Clock::now() + *slow, [this] { guard([this] { hedge(); }); });
  }
}

// Timers do not outlive this object.
void RangeRead::watch() {
  const auto stall_timeout = client_->options().stall_timeout;
  const auto now = Clock::now();
  const auto next = std::min(last_byte_ + stall_timeout, now < deadline_ ? deadline_ : now + stall_timeout);
  watch_ = reactor().at(next, [this] { guard([this] { look_at_progress(); }); });
}

// Ends an attempt that has delivered nothing for too long, or too little past the deadline.
void RangeRead::look_at_progress() {
  // Few bytes do not wake the reactor, and are progress all the same.
  if (attempt_ != nullptr) attempt_->take_waiting();
  if (second_ != nullptr) second_->take_waiting();
  if (attempt_ == nullptr && second_ == nullptr) return;
  const auto now = Clock::now();
  bool ends = now >= last_byte_ + client_->options().stall_timeout;
  if (now >= deadline_) {
    ends = ends || (position_at_look_ && position_ < *position_at_look_ + kLeastProgressBytes);
    position_at_look_ = position_;
  }
  if (ends) return end_stalled_attempt();
  watch();
}

void RangeRead::end_stalled_attempt() {
  // A server that announced more than the range may go on waiting.
  if (left().length() == 0) return finish(std::nullopt);
  const auto self = shared_from_this();
  const auto patience = std::to_string(client_->options().stall_timeout.count());
  reactor().drop(hedge_);
  for (std::unique_ptr<Attempt>* const one : {&attempt_, &second_}) {
    if (*one != nullptr) {
      note_end_of(**one);
      (*one)->drop_redirects(/*is_refused=*/false);  // their server may be dead
    }
    one->reset();
  }
  doubts_connections_ = true;
  retry({Verdict::Action::kRetry, "the server sent nothing for " + patience + " ms, or too little by the deadline",
         ErrorCode::kIo, ETIMEDOUT});
}

// Asks once more, on another connection, for a range that is among the slowest to begin.
void RangeRead::hedge() {
  if (attempt_ == nullptr || attempt_->delivers() || second_ != nullptr || is_canceled()) return;
  if (shard_.hedged * kRequestsOfHedge > shard_.started || !shard_.window_of(access_->url).try_enter()) return;
  ++shard_.hedged;
  client_->statistics().hedges.fetch_add(1, std::memory_order_relaxed);
  second_ = make_attempt(/*fresh_connection=*/true);
}

// Returns false if another attempt delivers already.
bool RangeRead::take_first_byte(Attempt& attempt) {
  if ((attempt_ != nullptr && attempt_->delivers()) || (second_ != nullptr && second_->delivers())) return false;
  attempt.deliver();
  // The other one is canceled later, because this is a call of libcurl.
  if (second_ == nullptr || attempt_ == nullptr) return true;
  reactor().post([weak = weak_from_this()] {
    const auto self = weak.lock();
    if (self == nullptr) return;
    const bool delivers = (self->attempt_ != nullptr && self->attempt_->delivers()) ||
                          (self->second_ != nullptr && self->second_->delivers());
    if (!delivers) return;  // that attempt has ended already
    if (self->attempt_ != nullptr && !self->attempt_->delivers()) self->attempt_.reset();
    if (self->second_ != nullptr && !self->second_->delivers()) self->second_.reset();
  });
  return true;
}

void RangeRead::attempt_ended(Attempt& attempt, Verdict verdict) {
  const auto self = shared_from_this();
  const bool delivered = attempt.delivers();
  note_end_of(attempt);
  std::unique_ptr<Attempt>& ended = attempt_.get() == &attempt ? attempt_ : second_;
  std::unique_ptr<Attempt>& other = attempt_.get() == &attempt ? second_ : attempt_;
  ended.reset();
  if (left().length() == 0) return finish(std::nullopt);
  if (!delivered && other != nullptr) return;  // that one goes on
  other.reset();
  reactor().drop(watch_);
  reactor().drop(hedge_);
  retry(verdict);
}

uint64_t RangeRead::least_progress() const {
  return std::clamp<uint64_t>(range_.length() / kAttemptsOfRange, 1, kLeastProgressBytes);
}

void RangeRead::note_end_of(const Attempt& attempt) {
  doubts_connections_ = !attempt.answered();
  if (attempt.received() < least_progress()) return;
  idle_attempts_ = 0;
  accesses_dropped_ = 0;
}

void RangeRead::retry(const Verdict& verdict) {
  using Action = Verdict::Action;
  if (is_canceled()) return finish_canceled();
  ++idle_attempts_;
  auto pause = verdict.action == Action::kRetrySigned ? std::chrono::milliseconds(0) : backoff(verdict);
  const bool is_throttled = verdict.action == Action::kRetryThrottled;
  bool again = verdict.action == Action::kRetry || is_throttled;
  if (verdict.action == Action::kRetrySigned && accesses_dropped_ < (verdict.is_expired ? kMostRenewals : 1)) {
    if (++accesses_dropped_ > 1) pause = kNextSignature;
    again = true;
    object_->drop_access(access_.get());
  }
  const bool is_hopeless = idle_attempts_ >= kMostIdleAttempts && !is_throttled;
  if (!again || is_hopeless || Clock::now() + pause >= deadline_) {
    Verdict last = verdict;
    if (again) last.reason += " (tried " + std::to_string(attempts_) + " times)";
    return finish(last.error(*object_, range_));
  }
  client_->statistics().retries.fetch_add(1, std::memory_order_relaxed);
  const bool is_by_server = is_throttled && !is_out_of_descriptors(verdict.system_errno);
  if (is_by_server) client_->statistics().throttled.fetch_add(1, std::memory_order_relaxed);
  reactor().at(Clock::now() + pause, [self = shared_from_this()] { self->guard([&] { self->ask_access(); }); });
}

// Full jitter (M. Brooker, "Exponential backoff and jitter", 2015), and as long as the server says.
std::chrono::milliseconds RangeRead::backoff(const Verdict& verdict) {
  const HttpOptions& options = client_->options();
  const std::chrono::milliseconds asked(
      static_cast<int64_t>(std::min(verdict.retry_after_s.value_or(0.0), kMostRetryAfterS) * 1e3));
  if (idle_attempts_ <= 1 && verdict.action == Verdict::Action::kRetry) return asked;
  const auto most = std::min(options.most_backoff, options.least_backoff * (1 << std::min(idle_attempts_, 16U)));
  return asked + std::chrono::milliseconds(std::uniform_int_distribution<int64_t>(0, most.count())(shard_.random));
}

void RangeRead::finish_canceled() {
  const Verdict canceled{Verdict::Action::kFail, "the read was canceled", ErrorCode::kClosed};
  finish(canceled.error(*object_, range_));
}

void RangeRead::finish(std::optional<Error> error) {
  reactor().drop(watch_);
  reactor().drop(hedge_);
  attempt_.reset();
  second_.reset();
  const auto self = std::exchange(self_, nullptr);
  if (const Done done = std::exchange(done_, nullptr)) done(std::move(error));
}

}  // namespace gdsdata
