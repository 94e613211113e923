#include "backend/cached_read.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <utility>

#include "backend/range_read.h"
#include "base/file.h"
#include "tuning.h"

namespace gdsdata {

namespace {

// The pause between two looks at the blocks of others is a part of the wait so far, within bounds.
constexpr int kLooksOfWait = 8;
constexpr std::chrono::milliseconds kShortestPause{1}, kLongestPause{50};

}  // namespace

CachedRead::Fetch::Fetch(CachedRead& owner, size_t block, ObjectRange of_block, bool is_claimed)
    : read(&owner), object(owner.request_.file->cached()), first_block(block), range(of_block), is_kept(is_claimed) {}

CachedRead::Fetch::~Fetch() {
  for (; is_kept && blocks_ended < block_count; ++blocks_ended) object->release(first_block + blocks_ended);
}

void CachedRead::Fetch::fill() {
  for (; is_kept && blocks_ended < block_count; ++blocks_ended) {
    const uint64_t begin = blocks_ended * object->block_bytes();
    // A block that cannot be kept is passed on all the same.
    object->fill(first_block + blocks_ended,
                 {bytes.get() + begin, std::min(object->block_bytes(), range.length() - begin)});
  }
}

CachedRead::CachedRead(const Request& request, std::shared_ptr<HttpClient> client, Fetched fetched)
    : request_(request),
      client_(std::move(client)),
      fetched_(std::move(fetched)),
      cached_(*request.file->cached()),
      scatter_(request),
      is_over_(std::make_shared<std::atomic<bool>>(false)) {
  completion_.tag = request.tag;
  const auto first = static_cast<size_t>(request.offset / cached_.block_bytes());
  const auto last = static_cast<size_t>((request.offset + request.length - 1) / cached_.block_bytes());
  pending_.resize(last - first + 1);
  std::iota(pending_.begin(), pending_.end(), first);
}

uint64_t CachedRead::buffer_bytes(const Request& request) {
  return request.length + 2 * request.file->cached()->block_bytes();
}

ObjectRange CachedRead::wanted_of(size_t block) const {
  const uint64_t begin = block * cached_.block_bytes();
  return {std::max(begin, request_.offset),
          std::min({begin + cached_.block_bytes(), request_.offset + request_.length, cached_.size_bytes()})};
}

void CachedRead::advance() noexcept {
  try {
    advance_all();
  } catch (...) {
    error_ = current_error();
  }
}

void CachedRead::advance_all() {
  const auto now = Clock::now();
  // The process that fetches a block may be stopped, or its server may hang.
  const bool waited_too_long = now - waits_since_ >= client_->options().stall_timeout;
  const size_t before = pending_.size();
  std::unique_ptr<Fetch> run;
  std::erase_if(pending_, [&](size_t block) {
    if (error_) return false;
    switch (cached_.claim(block)) {
      case CachedObject::Claim::kPresent:
        read_block(block);
        return true;
      case CachedObject::Claim::kElsewhere:
        if (!waited_too_long) return false;
        add(block, /*is_kept=*/false, run);
        return true;
      case CachedObject::Claim::kClaimed:
        add(block, /*is_kept=*/true, run);
        return true;
      case CachedObject::Claim::kNoRoom:
        add(block, /*is_kept=*/false, run);
        return true;
    }
    return false;
  });
  if (run != nullptr) begin_fetch(std::move(run));
  if (pending_.size() < before) waits_since_ = now;
  next_look_ = now + std::clamp<Clock::duration>((now - waits_since_) / kLooksOfWait, kShortestPause, kLongestPause);
}

// Adds a block to a run, or begins to fetch that one and makes another.
void CachedRead::add(size_t block, bool is_kept, std::unique_ptr<Fetch>& run) {
  const uint64_t begin = block * cached_.block_bytes();
  const ObjectRange range =
      is_kept ? ObjectRange{begin, std::min(begin + cached_.block_bytes(), cached_.size_bytes())} : wanted_of(block);
  const bool goes_on = run != nullptr && run->is_kept == is_kept && run->range.end == range.begin &&
                       run->range.length() + range.length() <= tuning::kRemoteRequestBytes;
  if (goes_on) {
    run->range.end = range.end;
    ++run->block_count;
    return;
  }
  std::unique_ptr<Fetch> next;
  try {
    next = std::make_unique<Fetch>(*this, block, range, is_kept);
  } catch (...) {
    if (is_kept) cached_.release(block);
    throw;
  }
  if (run != nullptr) begin_fetch(std::move(run));
  run = std::move(next);
}

void CachedRead::read_block(size_t block) {
  const ObjectRange wanted = wanted_of(block);
  const auto bytes = std::make_unique_for_overwrite<std::byte[]>(wanted.length());
  for (uint64_t done = 0; done < wanted.length();) {
    const ssize_t moved = ::pread(cached_.descriptor(), bytes.get() + done, wanted.length() - done,
                                  static_cast<off_t>(wanted.begin + done));
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) {
      error_ = system_error("read from the local cache", cached_.data_path(), moved < 0 ? errno : EIO, wanted.begin,
                            wanted.length());
      return;
    }
    done += static_cast<uint64_t>(moved);
  }
  deliver(wanted, bytes.get(), Route::kLocalCache);
}

void CachedRead::begin_fetch(std::unique_ptr<Fetch> fetch) {
  fetch->bytes = std::make_unique_for_overwrite<std::byte[]>(fetch->range.length());
  const ObjectRange range = fetch->range;
  // std::function wants what can be copied.
  const auto shared = std::make_shared<Fetches>();
  shared->push_back(std::move(fetch));
  RangeRead::begin(
      client_, request_.file->remote(), range,
      {[shared, first = range.begin](uint64_t offset, std::span<const std::byte> bytes) {
         std::byte* const place = shared->front()->bytes.get() + (offset - first);
         if (place != bytes.data()) std::memcpy(place, bytes.data(), bytes.size());
       },
       [shared, range](uint64_t offset) {
         return std::span(shared->front()->bytes.get(), range.length()).subspan(offset - range.begin);
       }},
      [shared, fetched = fetched_](std::optional<Error> error) {
        shared->front()->error = std::move(error);
        fetched(std::move(*shared));
      },
      [is_over = is_over_] { return is_over->load(std::memory_order_relaxed); });
  ++fetches_;
}

void CachedRead::take(std::unique_ptr<Fetch> fetch) {
  --fetches_;
  if (fetch->error) {
    if (!error_) error_ = std::move(fetch->error);
    return;
  }
  fetch->fill();
  completion_.storage_bytes += fetch->range.length();
  deliver(fetch->range, fetch->bytes.get(), fetch->is_kept ? Route::kCacheFill : Route::kRemote);
}

void CachedRead::note_canceled() {
  if (error_ || !request_.is_canceled()) return;
  error_ = Error{ErrorCode::kClosed, "the read was canceled"};
  is_over_->store(true, std::memory_order_relaxed);
}

// The part of a range that the request wants.
void CachedRead::deliver(const ObjectRange& range, const std::byte* bytes, Route route) {
  const uint64_t begin = std::max(range.begin, request_.offset);
  const uint64_t end = std::min(range.end, request_.offset + request_.length);
  completion_.bytes[route] += scatter_.take(begin, {bytes + (begin - range.begin), end - begin});
}

Completion CachedRead::finish() {
  if (error_) {
    completion_.error = std::move(error_);
    completion_.bytes = {};
  } else {
    scatter_.finish();
  }
  return std::move(completion_);
}

}  // namespace gdsdata
