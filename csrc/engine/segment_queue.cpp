#include "engine/segment_queue.h"

#include <algorithm>
#include <utility>

#include "tuning.h"

namespace gdsdata {

void SegmentQueue::push_fresh(std::vector<Segment>& segments, bool helped) {
  size_t to_wake = 0;
  {
    std::lock_guard lock(mutex_);
    const Group& group = *segments.front().group;
    const bool patient = group.request().patient;
    auto& fresh = of(group.request().priority).fresh;
    size_t pushed = 0;
    try {
      for (; pushed < segments.size(); ++pushed) fresh.push_back(std::move(segments[pushed]));
    } catch (...) {
      fresh.resize(fresh.size() - pushed);
      throw;
    }
    to_wake = claim_workers(patient ? 1 : waiting_segments() - (helped ? 1 : 0));
  }
  segments.clear();
  wake(to_wake);
}

void SegmentQueue::hurry() {
  size_t to_wake = 0;
  {
    std::lock_guard lock(mutex_);
    to_wake = claim_workers(waiting_segments());
  }
  wake(to_wake);
}

size_t SegmentQueue::waiting_segments() const {
  size_t count = 0;
  for (const Waiting& waiting : waiting_segments_) count += waiting.size();
  return count;
}

void SegmentQueue::push_for_storage(Segment&& segment) {
  size_t to_wake = 0;
  {
    std::lock_guard lock(mutex_);
    of(segment.group->request().priority).for_storage.push_back(std::move(segment));
    to_wake = claim_workers(1);
  }
  wake(to_wake);
}

size_t SegmentQueue::claim_workers(size_t segments) {
  const size_t idle = std::min(waiting_workers_, segments);
  for (size_t rest = segments - idle; rest > 0 && !sleeping_.empty(); --rest) {
    sleeping_.back()->interrupt();
    sleeping_.pop_back();
  }
  return idle;
}

bool SegmentQueue::sleeps(Backend& backend) {
  std::lock_guard lock(mutex_);
  if (std::any_of(waiting_segments_.begin(), waiting_segments_.end(), [](const auto& of) { return !of.empty(); })) {
    return false;
  }
  sleeping_.push_back(&backend);
  return true;
}

void SegmentQueue::wakes(Backend& backend) {
  std::lock_guard lock(mutex_);
  std::erase(sleeping_, &backend);
}

void SegmentQueue::wake(size_t workers) {
  for (; workers > 0; --workers) filled_.notify_one();
}

Segment SegmentQueue::take_from(std::deque<Segment>& segments) {
  Segment segment = std::move(segments.front());
  segments.pop_front();
  return segment;
}

bool SegmentQueue::pop(Segment& segment, bool wait) {
  Waiting &training = of(Priority::kTraining), &background = of(Priority::kBackground);
  std::unique_lock lock(mutex_);
  const auto filled = [&] { return !training.empty() || !background.empty(); };
  if (wait && !filled()) {
    ++waiting_workers_;
    filled_.wait(lock, [&] { return filled() || closed_; });
    --waiting_workers_;
  }
  return take_next(segment);
}

bool SegmentQueue::pop_spare(Segment& segment) {
  std::lock_guard lock(mutex_);
  return waiting_workers_ == 0 && take_next(segment);
}

bool SegmentQueue::take_next(Segment& segment) {
  Waiting &training = of(Priority::kTraining), &background = of(Priority::kBackground);
  if (training.empty() && background.empty()) return false;
  Waiting* next = &training;
  if (!background.empty() && (training.empty() || ++passed_over_ > tuning::kMostPassedOver)) {
    passed_over_ = 0;
    next = &background;
  }
  segment = take_from(next->for_storage.empty() ? next->fresh : next->for_storage);
  return true;
}

bool SegmentQueue::pop_fresh(Segment& segment, Priority lowest) {
  std::lock_guard lock(mutex_);
  auto& training = of(Priority::kTraining).fresh;
  auto& fresh = training.empty() && lowest == Priority::kBackground ? of(Priority::kBackground).fresh : training;
  if (fresh.empty()) return false;
  segment = take_from(fresh);
  return true;
}

bool SegmentQueue::pop_fresh_of(const Group& group, Segment& segment) {
  std::lock_guard lock(mutex_);
  auto& fresh = of(group.request().priority).fresh;
  const auto found =
      std::find_if(fresh.begin(), fresh.end(), [&](const Segment& s) { return s.group.get() == &group; });
  if (found == fresh.end()) return false;
  segment = std::move(*found);
  fresh.erase(found);
  return true;
}

void SegmentQueue::close() {
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
  }
  filled_.notify_all();
}

}  // namespace gdsdata
