#include "engine/link.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

namespace gdsdata {

// Done when its copies are, and when they could not be asked for.
class Link::Ticket final : public Event {
 public:
  explicit Ticket(Link& link) : link_(link) {}

  bool done() override { return is_given() && (event_ == nullptr || event_->done()); }
  // A link that waits for who sleeps here is a slow one: so not for as long as an event's own wait.
  void wait() override {
    constexpr std::chrono::microseconds kSleep{10};
    while (!done()) std::this_thread::sleep_for(kSleep);
  }
  // `event`, if any, is behind them.
  void given(std::shared_ptr<Event> event) {
    event_ = std::move(event);
    given_.store(true, std::memory_order_release);
  }

 private:
  bool is_given() {
    if (!given_.load(std::memory_order_acquire)) link_.give(kMostUnderWay);
    return given_.load(std::memory_order_acquire);
  }

  Link& link_;
  std::shared_ptr<Event> event_;
  std::atomic<bool> given_{false};
};

std::shared_ptr<Event> Link::carry(std::shared_ptr<Group> group, const RouteBytes& bytes,
                                   std::span<const Staging::Run> runs) {
  auto ticket = std::make_shared<Ticket>(*this);
  {
    std::lock_guard lock(mutex_);
    waiting_.push_back({std::move(group), bytes, runs, ticket, std::nullopt});
  }
  try {
    give(kMostUnderWay);
  } catch (...) {  // no memory: they wait on, and whoever comes next gives them
  }
  return ticket;
}

void Link::give(size_t most_under_way) {
  std::vector<Load> given;
  {
    std::lock_guard lock(mutex_);
    const auto ended = [](Event& event) {
      try {
        return event.done();
      } catch (const Failure&) {  // the device is lost: whoever uses it next is told
        return true;
      }
    };
    while (!under_way_.empty() && ended(*under_way_.front())) under_way_.pop_front();
    while (!waiting_.empty() && under_way_.size() < most_under_way) give_batch(given);
  }
  for (Load& load : given) load.group->segment_ended(load.bytes, std::move(load.error));
}

void Link::give_batch(std::vector<Load>& given) {
  batch_.clear();
  const size_t first = given.size();
  do {
    for (const Staging::Run& run : waiting_.front().runs) batch_.push_back({run.device, run.host, run.bytes});
    given.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  } while (!waiting_.empty() && batch_.size() + waiting_.front().runs.size() <= kMostCopies);
  std::shared_ptr<Event> copied;
  std::optional<Error> error;
  try {
    if (stream_ == nullptr) stream_ = device_.make_stream();
    stream_->copy_all_in(batch_);
    copied = stream_->record();
    under_way_.push_back(copied);
  } catch (const Failure& failure) {
    error = failure.error();
    if (stream_ != nullptr) finish(*stream_);  // some may have been asked for: they read staging memory
  }
  for (size_t i = first; i < given.size(); ++i) {
    if (copied != nullptr) given[i].group->copied_by(stream_.get(), copied);
    given[i].error = error;
    given[i].ticket->given(copied);
  }
}

}  // namespace gdsdata
