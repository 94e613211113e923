// One worker: a thread's loop around its backends, and where the processor cannot write the device, its staging
// memory and its stream.
//
//   read    page cache, then backend --> memory                                       (a device the processor writes)
//           page cache, then backend --> staging memory --copy on the stream--> device   (one it cannot write)
//           backend --> device                                                        (a backend that reaches it)
//   write   the same ways back
//
// The host waits for a copy only where it needs the staging memory that the copy holds, or writes what it brought.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "backend/page_cache.h"
#include "base/extent_math.h"
#include "engine/engine.h"
#include "engine/link.h"
#include "engine/round_files.h"
#include "engine/spans.h"
#include "engine/staging.h"

namespace gdsdata {

class Worker {
 public:
  // A guest has no thread of its own: who waits for a group lends it one, and it waits for its copies at once.
  Worker(const EngineOptions& options, const Selection& selection, Device& device, SegmentQueue& queue, Link& link,
         bool is_guest);

  // Until the queue is closed and what was taken has ended.
  void run();
  // A guest takes one fresh segment, serves it from memory and queues the rest of it for storage; false where there
  // is none. Of a device that the processor can write.
  bool help(Priority lowest);
  // The same of one that it cannot, with a segment of this group, a short read: in the device's memory when this
  // returns, or queued as a whole.
  bool help_with(const Group& group);

  // Of a guest, on the way to a device that the processor cannot write.
  static constexpr uint64_t kGuestStagingBytes = Staging::kFirstBytes;
  static_assert(kGuestStagingBytes >= Staging::most_bytes(kShortReadBytes));

  const WorkerCounters& counters() const { return counters_; }
  SpanLog& spans() { return spans_; }

 private:
  using Clock = std::chrono::steady_clock;

  // A segment on its way.
  struct Active {
    Segment segment;
    Clock::time_point started;
    size_t begun_parts = 0;  // of a read: the first ones, a round of them after the other
    size_t host_parts = 0;   // the first ones; a backend moves the others between storage and device by itself
    RoundFiles files;
    std::vector<Piece> pieces, device_pieces;
    size_t open_requests = 0;
    RouteBytes bytes;
    std::optional<Error> error;
    Staging::Place place;
    std::shared_ptr<Event> copied;  // what is behind its copies out of the device

    // Throw Failure. The second one returns null if it gives up.
    File& file(uint32_t index) { return *open(index, WhenTaken::kWait); }
    File* open(uint32_t index, WhenTaken when_taken);
  };

  // A backend and the requests that wait for room in it.
  struct Lane {
    std::unique_ptr<Backend> backend;  // made when first needed: a warm page cache needs none
    std::deque<Request> waiting;
    size_t in_flight = 0;
    bool busy() const { return in_flight > 0 || !waiting.empty(); }
  };

  struct Asked {
    Active* active = nullptr;
    uint32_t file = 0;
    Request request;
  };

  bool work();
  void fail_all(const Error& error);
  void reserve_active();
  bool has_active();
  std::optional<Error> open_device(bool wholly);
  void make_staging();
  bool served_by_staging(Active& active);
  Active& begin(Segment segment);
  std::span<Transfer> parts_of(Active& active);
  // False where there is no staging memory for it yet.
  bool start(Active& active);
  bool place(Active& active);
  // More segments, where that makes more requests that the backend is given in one go.
  void gather();
  void read_on(Active& active);
  void read_round(Active& active, std::span<Transfer> parts);
  void read_unfinished();
  void settle(Active& active);
  void start_write(Active& active);
  size_t count_host_parts(Active& active, std::span<Transfer> parts);
  size_t open_files(Active& active, std::span<const Transfer> parts, WhenTaken when_taken);
  void serve_all_from_memory(Active& active, std::span<const Transfer> parts);
  void serve_from_memory(Active& active, std::span<const Transfer> parts);
  void wait_for(Event& event);
  void wait_for_device(const Events& uses);
  void wait_for_copy(const Events& before, Event& copied);
  void wait_for_own_copy(Active& active);
  void wait_for_staging();
  void reclaim_staging();
  void request(Active& active, std::span<const Transfer> left);
  void request_writes(Active& active, std::span<const Transfer> left);
  void request_of_device(Active& active, std::span<const Transfer> left);
  void add_request(Active& active, Lane& lane, uint32_t file, Request request);
  bool make_backend_once(Lane& lane, const std::string& name, Active& active);
  void expect_staging();
  bool exchange(Lane& lane, std::chrono::milliseconds patience);
  size_t submit(Lane& lane);
  size_t reap(Lane& lane, size_t min, std::chrono::milliseconds patience);
  // For another segment.
  bool has_room() const {
    return parked_ == nullptr && unfinished_.empty() && host_.waiting.empty() && device_lane_.waiting.empty();
  }
  // Segments hold files open only while they have requests.
  bool holds_files() const { return host_.busy() || device_lane_.busy(); }
  void exchange_all(bool idle);
  void drop_abandoned(Lane& lane);
  void completed(Lane& lane, Completion& completion);
  bool retry_by_host(const Asked& asked, const Error& error);
  void write_what_was_copied(bool wait);
  void end(Active& active);
  static void take_checksums(const Active& active);
  bool goes_by_link(const Active& active) const;
  void copy_to_device(Active& active);
  void copy_out_of_staging(Active& active);
  void retire(Active& active);

  const EngineOptions& options_;
  const Selection& selection_;
  Device& device_;
  SegmentQueue& queue_;
  Link& link_;
  const bool staged_;  // the processor cannot write the device
  const bool is_guest_;
  PageCache page_cache_;
  WorkerCounters counters_;
  SpanLog spans_;

  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Staging> staging_;
  size_t expected_ = 0;  // pieces of its memory that the host's backend knows
  struct Copy {
    Events before;  // what else it waits for
    std::shared_ptr<Event> event;
    Staging::Place place;
  };
  std::deque<Copy> copying_;  // to the device, oldest first
  std::deque<Active*> leaving_;  // from the device, oldest first
  Active* parked_ = nullptr;     // until there is staging memory for it
  std::vector<Active*> unfinished_, continued_;  // reads whose next round waits for descriptors; those tried again
  const size_t most_files_in_round_;
  Clock::time_point counted_at_;  // what comes after it is not in active_ns yet

  Lane host_;          // whose pieces the processor can write
  Lane device_lane_;   // whose pieces are device memory; idle where no backend reaches it
  std::vector<Asked> by_tag_;
  std::vector<uint64_t> free_tags_;
  std::vector<std::unique_ptr<Active>> actives_;
  std::vector<Active*> idle_actives_;

  // Scratch, kept for its capacity.
  std::vector<File*> part_files_;
  std::vector<Transfer> left_, parts_;
  std::vector<Range> ranges_;
  std::vector<Completion> completions_;
  std::vector<Request> batch_;
};

}  // namespace gdsdata
