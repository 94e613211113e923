#include "engine/staged_copies.h"

#include <algorithm>
#include <utility>

#include "tuning.h"

namespace gdsdata {

void StagedCopies::wait_for_all() noexcept {
  for (const Copy& copy : in_flight_) {
    try {
      std::visit([](const auto& end) { end->wait(); }, copy.end);
    } catch (...) {  // the device is lost, and its copies too
    }
  }
}

void StagedCopies::open_once() {
  if (staging_ != nullptr) return;
  stream_ = device_.make_stream();
  staging_ = std::make_unique<Staging>(device_, staging_bytes_);
}

void StagedCopies::copy_out(ActiveSegment& active) {
  for (const auto& event : active.group().request().before) stream_->wait(*event);
  for (const Staging::Run& run : active.place.runs) stream_->copy_out(run.host, run.device, run.bytes);
  active.copied = stream_->record();
}

void StagedCopies::copy_in(ActiveSegment& active) {
  if (!active.is_read() || active.stopped()) return;
  try {
    for (const auto& event : active.group().request().before) {
      if (!event->done()) stream_->wait(*event);  // a wait costs the device microseconds even if it is done
    }
    for (const Staging::Run& run : active.place.runs) stream_->copy_in(run.device, run.host, run.bytes);
    active.copied = stream_->record();
  } catch (const Failure& failure) {
    active.error = failure.error();
    finish(*stream_);  // earlier copies read staging memory and write the device's
  }
}

void StagedCopies::release_when_copied(ActiveSegment& active) {
  if (active.copied == nullptr) return release(active.place);
  active.group().copied_by(stream_.get(), active.copied);
  in_flight_.push_back({active.group().request().before, active.copied, {}});
  in_flight_.back().place = std::exchange(active.place, {});
}

bool StagedCopies::carry(EndedSegment& segment, Staging::Place&& place) {
  try {
    Copy& copy = in_flight_.emplace_back();
    copy.place = std::move(place);
    try {
      copy.end = link_.carry(segment, copy.place.runs);
      return true;
    } catch (...) {
      place = std::move(copy.place);
      in_flight_.pop_back();
      throw;
    }
  } catch (...) {
    segment.error = current_error();
    release(place);
    return false;
  }
}

void StagedCopies::reclaim() {
  while (!in_flight_.empty()) {
    try {
      if (!in_flight_.front().done()) return;
    } catch (const Failure&) {  // the device is lost: its next user gets the error
    }
    release(in_flight_.front().place);
    in_flight_.pop_front();
  }
}

template <typename Wait>
void StagedCopies::count_wait(Work work, Counter& counter, Wait wait) {
  const auto asked = Clock::now();
  wait();
  const auto ended = Clock::now();
  counter.add(ns_between(asked, ended));
  log_.spans.add(work, asked, ended, 0);
}

void StagedCopies::wait_for_device(const Events& uses) {
  if (all_done(uses)) return;
  link_.flush();
  count_wait(Work::kDevice, log_.counters.device_ns, [&] {
    for (const auto& event : uses) wait_for(*event);
  });
}

void StagedCopies::wait_for_copied(ActiveSegment& active) {
  wait_for_device(active.group().request().before);
  count_wait(Work::kLink, log_.counters.link_ns, [&] { wait_for(*active.copied); });
}

bool StagedCopies::copied_soon(ActiveSegment& active) {
  const auto until = Clock::now() + tuning::kShortCopyPolls;
  while (!active.copied->done()) {
    if (Clock::now() > until) return false;
  }
  return true;
}

void StagedCopies::wait_for_oldest() {
  const Copy& oldest = in_flight_.front();
  try {
    wait_for_device(oldest.before);
    count_wait(Work::kLink, log_.counters.link_ns, [&] {
      if (const auto* event = std::get_if<std::shared_ptr<Event>>(&oldest.end)) {
        wait_for(**event);
      } else {
        std::get<std::shared_ptr<Link::Ticket>>(oldest.end)->wait();
      }
    });
  } catch (const Failure&) {  // the device is lost: its next user gets the error
  }
  reclaim();
}

}  // namespace gdsdata
