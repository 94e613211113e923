// One request for an object that has a local cache: blocks that are there are read from it, and
// missing ones are fetched, kept, and passed on.
//
//   each block --claim--> kPresent: read    kClaimed: fetch, fill    kElsewhere: wait for another
//                         kNoRoom, or kElsewhere for too long: fetch the wanted bytes alone
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "backend/http_client.h"
#include "backend/range_verdict.h"
#include "backend/scatter.h"
#include "base/block_cache.h"
#include "base/types.h"

namespace gdsdata {

// Only the worker's thread may use it.
class CachedRead {
 public:
  // Consecutive blocks on their way from the server. It releases the claims that have not ended.
  struct Fetch {
    Fetch(CachedRead& read, size_t first_block, ObjectRange range, bool is_kept);
    ~Fetch();
    Fetch(const Fetch&) = delete;
    Fetch& operator=(const Fetch&) = delete;
    void fill();

    CachedRead* const read;
    const std::shared_ptr<CachedObject> object;
    const size_t first_block;
    ObjectRange range;
    const bool is_kept;  // these blocks are claimed
    size_t block_count = 1, blocks_ended = 0;
    std::unique_ptr<std::byte[]> bytes;
    std::optional<Error> error;
  };
  using Clock = HttpReactor::Clock;
  // Called once for each fetch, on a reactor's thread. Must not block or throw. The fetch is alone
  // in a list, so that it can be queued without memory.
  using Fetches = std::list<std::unique_ptr<Fetch>>;
  using Fetched = std::function<void(Fetches one)>;

  CachedRead(const Request& request, std::shared_ptr<HttpClient> client, Fetched fetched);
  // Fetches end with the attempts in flight.
  ~CachedRead() { is_over_->store(true, std::memory_order_relaxed); }

  // Reads, claims and begins to fetch whatever it can.
  void advance() noexcept;
  void take(std::unique_ptr<Fetch> fetch);
  // If the request was canceled, fetches end with the attempts in flight, and the read with them.
  void note_canceled();
  bool waits_for_others() const { return !pending_.empty() && !error_; }
  // When `advance` has something to do, while it waits for others.
  Clock::time_point next_look() const { return next_look_; }
  bool ended() const { return fetches_ == 0 && (pending_.empty() || error_); }
  Completion finish();

  // The memory that a request needs for its blocks.
  static uint64_t buffer_bytes(const Request& request);

 private:
  void advance_all();
  void add(size_t block, bool is_kept, std::unique_ptr<Fetch>& run);
  void read_block(size_t block);
  void begin_fetch(std::unique_ptr<Fetch> fetch);
  void deliver(const ObjectRange& range, const std::byte* bytes, Route route);
  ObjectRange wanted_of(size_t block) const;

  const Request request_;
  const std::shared_ptr<HttpClient> client_;
  const Fetched fetched_;
  CachedObject& cached_;
  Scatter scatter_;
  const std::shared_ptr<std::atomic<bool>> is_over_;  // nobody waits for the fetches
  std::vector<size_t> pending_;  // blocks that are neither read nor being fetched
  Clock::time_point waits_since_ = Clock::now();  // or since others last filled one of them
  Clock::time_point next_look_;
  size_t fetches_ = 0;           // in flight
  Completion completion_;
  std::optional<Error> error_;
};

}  // namespace gdsdata
