#include "backend/faulty.h"

#include <algorithm>
#include <cerrno>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "base/file.h"

namespace gdsdata {

namespace {

// Throws std::logic_error if `value` is no number, or is out of range.
void set(FaultPlan& plan, const std::string& key, const std::string& value) {
  if (key == "seed") {
    plan.seed = std::stoull(value);
  } else if (key == "shorten") {
    plan.shorten = std::stod(value);
  } else if (key == "interrupt") {
    plan.interrupt = std::stod(value);
  } else if (key == "late") {
    plan.late = std::stod(value);
  } else if (key == "late_ms") {
    plan.late_ms = std::stoll(value);
  } else if (key == "reorder") {
    plan.reorder = std::stod(value);
  } else if (key == "fail") {
    plan.fail = std::stod(value);
  } else if (key == "fail_at") {
    plan.fail_at = std::stoll(value);
  } else if (key == "error") {
    plan.error = std::stoll(value);
  } else if (key == "submit_throws") {
    plan.submit_throws = std::stod(value);
  } else if (key == "reap_throws") {
    plan.reap_throws = std::stod(value);
  } else {
    throw Failure({ErrorCode::kInvalidArgument,
                   "unknown fault '" + key +
                       "'; there are seed, shorten, interrupt, late, late_ms, reorder, fail, fail_at, error, "
                       "submit_throws, reap_throws"});
  }
}

}  // namespace

FaultPlan FaultPlan::parse(const std::string& text) {
  FaultPlan plan;
  std::istringstream stream(text);
  std::string item;
  while (std::getline(stream, item, ',')) {
    const Failure no_number({ErrorCode::kInvalidArgument, "the fault '" + item + "' needs a number"});
    const size_t equals = item.find('=');
    const std::string key = item.substr(0, equals);
    const std::string value = equals == std::string::npos ? "1" : item.substr(equals + 1);
    if (value.empty() || value.find_first_not_of("0123456789.-") != std::string::npos) throw no_number;
    try {
      set(plan, key, value);
    } catch (const std::logic_error&) {
      throw no_number;
    }
  }
  plan.random.seed(plan.seed);
  return plan;
}

bool FaultPlan::happens(double probability) {
  return probability > 0 && std::uniform_real_distribution<>(0, 1)(random) < probability;
}

uint64_t FaultPlan::shortened(uint64_t length) {
  if (length <= 1 || !happens(shorten)) return length;
  return std::uniform_int_distribution<uint64_t>(1, length - 1)(random);
}

FaultyBackend::FaultyBackend(std::unique_ptr<Backend> inner, FaultPlan plan)
    : inner_(std::move(inner)), plan_(std::move(plan)) {}

size_t FaultyBackend::submit(std::span<const Request> requests) {
  if (plan_.happens(plan_.submit_throws)) throw 1;
  // Delayed completions are in flight too.
  const size_t depth = inner_->capabilities().queue_depth, in_flight = extents_.size();
  if (in_flight >= depth) return 0;
  const size_t taken = inner_->submit(requests.first(std::min(depth - in_flight, requests.size())));
  for (const Request& request : requests.first(taken)) {
    extents_[request.tag] = {request.file, request.offset, request.length};
  }
  return taken;
}

size_t FaultyBackend::reap(std::span<Completion> completions, size_t min, std::chrono::milliseconds timeout) {
  if (plan_.happens(plan_.reap_throws)) throw 1;
  const auto deadline = Clock::now() + timeout;
  size_t given = 0;
  while (true) {
    // All completions of the inner backend pass through the plan into `held_`.
    const size_t inner_in_flight = extents_.size() - held_.size();
    scratch_.resize(inner_in_flight);
    const bool wait = given < min && inner_in_flight > 0;
    auto until = deadline;
    for (const Held& held : held_) until = std::min(until, held.until);
    const auto patience = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
    const size_t arrived = inner_->reap(scratch_, wait ? 1 : 0, std::max(patience, std::chrono::milliseconds(0)));
    for (size_t i = 0; i < arrived; ++i) {
      Completion completion = std::move(scratch_[i]);
      if (completed_++ == plan_.fail_at || plan_.happens(plan_.fail)) {
        const Extent& extent = extents_.at(completion.tag);
        completion.error = system_error("transfer (a fault made on purpose)", extent.file->path(),
                                        static_cast<int>(plan_.error), extent.offset, extent.length);
        completion.bytes = {};
      }
      const auto delay = plan_.happens(plan_.late) ? plan_.late_ms : 0;
      Held held{std::move(completion), Clock::now() + std::chrono::milliseconds(delay)};
      if (!held_.empty() && plan_.happens(plan_.reorder)) {
        held_.push_front(std::move(held));
      } else {
        held_.push_back(std::move(held));
      }
    }
    auto due = Clock::time_point::max();
    for (auto held = held_.begin(); held != held_.end() && given < completions.size();) {
      if (held->until <= Clock::now()) {
        extents_.erase(held->completion.tag);
        completions[given++] = std::move(held->completion);
        held = held_.erase(held);
      } else {
        due = std::min(due, held->until);
        ++held;
      }
    }
    std::unique_lock lock(mutex_);
    const bool interrupted = std::exchange(interrupted_, false);
    if (given >= min || given == completions.size() || extents_.empty() || interrupted || Clock::now() >= deadline) {
      return given;
    }
    if (extents_.size() == held_.size())
      wakes_.wait_until(lock, std::min(due, deadline), [this] { return interrupted_; });
  }
}

void FaultyBackend::interrupt() {
  {
    std::lock_guard lock(mutex_);
    interrupted_ = true;
  }
  wakes_.notify_one();
  inner_->interrupt();
}

}  // namespace gdsdata
