#include "engine/lane.h"

#include <algorithm>
#include <utility>

#include "backend/select.h"
#include "base/descriptors.h"
#include "base/fallbacks.h"
#include "tuning.h"

namespace gdsdata {

namespace {

// Ends what SegmentQueue::sleeps began.
struct Sleep {
  SegmentQueue& queue;
  Backend& backend;
  ~Sleep() { queue.wakes(backend); }
};

}  // namespace

Lane::Lane(std::string backend, std::string fallback, const BackendOptions& options, Device& device, WorkerLog& log)
    : name_(std::move(backend)), fallback_(std::move(fallback)), options_(options), device_(device), log_(log) {}

void Lane::make_backend_once() {
  if (backend_ != nullptr) return;
  try {
    backend_ = make_backend(name_, options_, device_);
  } catch (const Failure& failure) {
    const bool falls_back =
        !fallback_.empty() && is_out_of_descriptors(failure.error().system_errno) && !options_.strict;
    if (!falls_back) throw;
    note_fallback("a worker uses " + fallback_ + " calls instead: " + failure.error().message);
    backend_ = make_backend(fallback_, options_, device_);
  }
}

void Lane::expect_memory(const std::vector<std::span<std::byte>>& memory) {
  for (; expected_memory_ < memory.size(); ++expected_memory_) backend_->expect_memory(memory[expected_memory_]);
}

void Lane::add(ActiveSegment& active, uint32_t file, Request request) {
  if (free_tags_.empty()) {
    free_tags_.reserve(asked_.size() + 1);  // capacity for all tags
    asked_.emplace_back();
    free_tags_.push_back(asked_.size() - 1);
  }
  request.tag = free_tags_.back();
  waiting_.push_back(request);
  free_tags_.pop_back();
  asked_[request.tag] = {&active, file, request};
  ++active.open_requests;
  log_.counters.requests.add(1);
}

Lane::Exchange Lane::exchange(std::chrono::milliseconds patience, SegmentQueue* queue) {
  Exchange exchange;
  const auto asked = Clock::now();
  size_t taken = submit();
  if (in_flight_ == 0) {
    exchange.moved = taken > 0;
    return exchange;
  }
  completions_.resize(std::min(options_.queue_depth, tuning::kMostCompletionsAtOnce));
  const size_t few = patience.count() > 0 ? std::clamp<size_t>(in_flight_ / 4, 1, tuning::kMostCompletionsAtOnce) : 0;
  size_t count = reap(few, few > 1 ? std::min(patience, tuning::kFewCompletionsTimeout) : patience, queue);
  if (count == 0 && few > 1) count = reap(1, patience, queue);
  in_flight_ -= count;
  try {
    taken += submit();
  } catch (...) {
    exchange.failure = std::current_exception();
  }
  const auto ended = Clock::now();
  log_.counters.storage_ns.add(ns_between(asked, ended));
  RouteBytes bytes;
  for (size_t i = 0; i < count; ++i) bytes += completions_[i].bytes;
  exchange.completions = std::span(completions_).first(count);
  exchange.moved = taken + count > 0;
  const bool found_nothing = !exchange.moved && patience.count() == 0;
  if (!found_nothing) log_.spans.add(Work::kStorage, asked, ended, bytes.total());
  return exchange;
}

size_t Lane::submit() {
  if (waiting_.empty()) return 0;
  const size_t offered = std::min(waiting_.size(), options_.queue_depth);
  batch_.assign(waiting_.begin(), waiting_.begin() + static_cast<ptrdiff_t>(offered));
  const size_t taken = backend_->submit(batch_);
  for (size_t i = 0; i < taken; ++i) asked_[batch_[i].tag].active->group().count_requests_taken(1);
  log_.counters.exchanged.add(taken);
  waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<ptrdiff_t>(taken));
  in_flight_ += taken;
  return taken;
}

size_t Lane::reap(size_t min, std::chrono::milliseconds patience, SegmentQueue* queue) {
  if (min == 0 || queue == nullptr || !waiting_.empty()) return backend_->reap(completions_, min, patience);
  if (!queue->sleeps(*backend_)) return backend_->reap(completions_, 0, {});
  const Sleep sleep{*queue, *backend_};
  return backend_->reap(completions_, min, patience);
}

Lane::Asked Lane::complete(const Completion& completion) {
  const Asked asked = asked_[completion.tag];
  ActiveSegment& active = *asked.active;
  free_tags_.push_back(completion.tag);
  if (asked.request.file->remote() == nullptr || asked.request.remote) {
    active.bytes += completion.bytes;
  } else {
    active.bytes[Route::kLocalCache] += completion.bytes.total();
  }
  active.group().count_request_completed();
  log_.counters.exchanged.add(1);
  log_.counters.storage_bytes.add(completion.storage_bytes);
  return asked;
}

void Lane::drop(const Request& request) {
  --asked_[request.tag].active->open_requests;
  free_tags_.push_back(request.tag);
}

void Lane::drop_waiting() {
  for (const Request& request : waiting_) drop(request);
  waiting_.clear();
}

}  // namespace gdsdata
