#include "engine/link.h"

#include <chrono>
#include <thread>
#include <utility>

#include "tuning.h"

namespace gdsdata {

// Polls more often than an event's own wait, because a sleeping waiter stalls the link.
void Link::Ticket::wait() {
  while (!done()) std::this_thread::sleep_for(tuning::kLinkSleep);
}

bool Link::Ticket::is_submitted() {
  if (!submitted_.load(std::memory_order_acquire)) link_.submit(tuning::kMostBatchesOnLink);
  return submitted_.load(std::memory_order_acquire);
}

void Link::Ticket::submitted(std::shared_ptr<Event> event) {
  event_ = std::move(event);
  submitted_.store(true, std::memory_order_release);
}

std::shared_ptr<Link::Ticket> Link::carry(EndedSegment& segment, std::span<const Staging::Run> runs) {
  auto ticket = std::make_shared<Ticket>(*this);
  {
    std::lock_guard lock(mutex_);
    waiting_.emplace_back();
    waiting_.back() = {std::move(segment), runs, ticket};
  }
  submit(tuning::kMostBatchesOnLink);
  return ticket;
}

void Link::submit(size_t most_in_flight) {
  std::vector<Load> submitted;
  {
    std::lock_guard lock(mutex_);
    const auto has_ended = [](Event& event) {
      try {
        return event.done();
      } catch (...) {  // the device is lost: its next user gets the error
        return true;
      }
    };
    while (!in_flight_.empty() && has_ended(*in_flight_.front())) in_flight_.pop_front();
    while (!waiting_.empty() && in_flight_.size() < most_in_flight && submit_batch(submitted)) {
    }
  }
  for (Load& load : submitted) load.segment.report();
}

bool Link::submit_batch(std::vector<Load>& submitted) {
  batch_.clear();
  const size_t first = submitted.size();
  std::shared_ptr<Event> copied;
  std::optional<Error> error;
  try {
    do {
      for (const Staging::Run& run : waiting_.front().runs) batch_.push_back({run.device, run.host, run.bytes});
      submitted.push_back(std::move(waiting_.front()));
      waiting_.pop_front();
    } while (!waiting_.empty() && batch_.size() + waiting_.front().runs.size() <= tuning::kMostCopiesOfBatch);
    if (stream_ == nullptr) stream_ = device_.make_stream();
    stream_->copy_all_in(batch_);
    copied = stream_->record();
    in_flight_.push_back(copied);
    for (size_t i = first; i < submitted.size(); ++i) submitted[i].segment.group->copied_by(stream_.get(), copied);
  } catch (...) {
    if (submitted.size() == first) return false;  // no memory: the next caller submits them
    error = current_error();
    if (stream_ != nullptr) finish(*stream_);  // submitted ones may still read staging memory
    copied.reset();
  }
  for (size_t i = first; i < submitted.size(); ++i) {
    if (error) submitted[i].segment.error = copy_of(*error);
    submitted[i].ticket->submitted(copied);
  }
  return true;
}

}  // namespace gdsdata
