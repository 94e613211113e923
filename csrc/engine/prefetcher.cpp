#include "engine/prefetcher.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <utility>

#include "base/condition.h"
#include "engine/repeated_call.h"
#include "engine/ring.h"
#include "engine/slot.h"
#include "engine/stall_clock.h"
#include "tuning.h"

namespace gdsdata {

class Prefetcher::Core : public std::enable_shared_from_this<Core> {
 public:
  Core(std::shared_ptr<Engine> engine, std::shared_ptr<FileTable> files, std::shared_ptr<BufferPool> pool,
       PrefetchOptions options, std::shared_ptr<Residence> residence);
  PlannedBatches& planned() { return planned_; }
  void added(size_t batches);  // to planned()
  std::optional<Batch> next(const std::function<void()>& poll);
  void close();
  PrefetchStatistics statistics() const;
  bool forked() const { return process_ != process_id(); }

 private:
  using Clock = std::chrono::steady_clock;
  // Here or on the thread for it. The caller holds neither filling_ nor mutex_.
  void have_slots_filled();
  // The caller holds filling_, but not mutex_.
  void fill_free_slots();
  bool half_is_ready() const;  // of the ring's samples: some slots are short. The caller holds mutex_.
  void fill(Engine& engine, size_t index, bool patient);
  void submit(Engine& engine, size_t index, bool patient, std::span<const int32_t> files,
              std::span<const int64_t> offsets);
  void gather(Slot& slot, std::span<const int32_t> files, std::span<const int64_t> offsets);
  size_t placement(uint64_t file_offset) const;
  // The caller holds mutex_, and releases the result after unlocking it.
  std::shared_ptr<DeviceBuffer> mark_ready(size_t index);
  bool help_until_head(std::unique_lock<std::mutex>& lock);
  void wait_for_head(std::unique_lock<std::mutex>& lock, const std::function<void()>& poll);
  uint64_t progress() const;  // of all batches in flight: see Engine::progress_of
  // The caller holds no lock.
  void slot_done(size_t index);  // on a worker
  Error stall_of(std::optional<size_t> head);

  const int64_t process_ = process_id();
  const std::shared_ptr<FileTable> files_;
  const PrefetchOptions options_;
  const std::shared_ptr<BufferPool> pool_;
  const std::shared_ptr<Residence> residence_;

  PlannedBatches planned_;
  // Held while slots are filled, which allocates memory, so workers never take it. Lock it before
  // mutex_. Guards calls of planned_.take() and, except for its result, a slot that is being
  // filled.
  std::mutex filling_;

  // Nothing is allocated under it, because workers take it. Guards the members that follow, and
  // slots that are ready or free.
  mutable std::mutex mutex_;
  Condition changed_;
  // Released by close(), because a worker that destroys this must not destroy the engine.
  std::shared_ptr<Engine> engine_;
  bool closed_ = false;
  bool consumer_waits_ = false;
  Ring ring_;
  std::atomic<bool> head_ready_{false};  // ring_.head_ready(), readable without the lock
  std::vector<Slot> slots_;
  size_t planned_batches_ = 0;  // how many planned_ has, but for those that are being added
  PrefetchStatistics statistics_;
  uint64_t calls_ = 0;       // calls of next() that found a planned batch
  uint64_t ready_seen_ = 0;  // sum of the batches ready at each of these calls
  uint64_t completed_ = 0;   // groups, for progress()
  std::optional<Clock::time_point> full_since_;

  // Fills the slots of a GPU: to submit the samples of 8 MiB takes the consumer half as long as the
  // link needs for them. Null: the consumer fills them. close() ends it, because it uses this.
  std::unique_ptr<RepeatedCall> filler_;
};

Prefetcher::Core::Core(std::shared_ptr<Engine> engine, std::shared_ptr<FileTable> files,
                       std::shared_ptr<BufferPool> pool, PrefetchOptions options, std::shared_ptr<Residence> residence)
    : files_(std::move(files)),
      options_(options),
      pool_(std::move(pool)),
      residence_(std::move(residence)),
      planned_(options.batch_samples, files_->size()),
      engine_(std::move(engine)),
      ring_(options.slots),
      slots_(options.slots) {
  if (pool_->buffer_bytes() <
      result_bytes(options_.conversion, options_.sample_bytes * options_.batch_samples) + kPlacementBytes) {
    throw Failure({ErrorCode::kInvalidArgument, "the pool's buffers are smaller than a batch"});
  }
  if (residence_ != nullptr && residence_->most_samples() < options_.batch_samples) {
    throw Failure({ErrorCode::kInvalidArgument, "the residence gathers fewer samples at a time than a batch has"});
  }
  for (Slot& slot : slots_) {
    GroupRequest request;
    request.files = files_;
    request.take_memory = [&slot] { return slot.take_memory(); };
    request.conversion = options_.conversion;
    slot.group = std::make_shared<Group>(std::move(request));
  }
  if (engine_->device()->host_addressable()) return;
  try {
    filler_ = std::make_unique<RepeatedCall>("gdsdata-filler", [this] {
      const std::lock_guard filling(filling_);
      fill_free_slots();
    });
  } catch (const std::system_error&) {  // no thread is available
  }
}

void Prefetcher::Core::have_slots_filled() {
  if (filler_ != nullptr) return filler_->request();
  const std::lock_guard filling(filling_);
  fill_free_slots();
}

void Prefetcher::Core::added(size_t batches) {
  {
    const std::lock_guard lock(mutex_);
    planned_batches_ += batches;
  }
  have_slots_filled();
}

void Prefetcher::Core::fill_free_slots() {
  while (true) {
    std::shared_ptr<Engine> engine;
    std::optional<size_t> index;
    bool patient = false;
    {
      const std::lock_guard lock(mutex_);
      if (closed_ || planned_batches_ == 0) return;
      index = ring_.acquire();
      if (!index) return;
      --planned_batches_;
      engine = engine_;
      patient = half_is_ready();
    }
    fill(*engine, *index, patient);
  }
}

bool Prefetcher::Core::half_is_ready() const {
  size_t samples = 0;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (ring_.state(i) == Ring::State::kReady) samples += slots_[i].samples;
  }
  return 2 * samples >= slots_.size() * options_.batch_samples;
}

void Prefetcher::Core::fill(Engine& engine, size_t index, bool patient) {
  Slot& slot = slots_[index];
  const auto [files, offsets] = planned_.take();
  slot.samples = files.size();
  slot.offset = placement(static_cast<uint64_t>(offsets.front()));
  slot.result = {};
  const bool gathers = residence_ != nullptr && residence_->ready();
  bool in_flight = false;
  try {
    slot.reserve(*pool_);
    if (!engine.device()->host_addressable()) {
      slot.take_memory();
      auto& uses = slot.buffer->uses;
      // One for each stream: the workers', the guest's and the link's.
      uses.reserve(uses.size() + engine.options().workers + 2);
    }
    if (gathers) {
      gather(slot, files, offsets);
    } else {
      submit(engine, index, patient, files, offsets);
      in_flight = true;
    }
  } catch (...) {
    slot.result.error = current_error();
    slot.group->edit().on_done = nullptr;  // it holds a reference to this
  }
  std::shared_ptr<DeviceBuffer> released;
  const std::lock_guard lock(mutex_);
  if (!in_flight) {
    released = mark_ready(index);
  } else if (closed_) {  // close() may have run before the submit
    slot.group->cancel();
  }
}

void Prefetcher::Core::submit(Engine& engine, size_t index, bool patient, std::span<const int32_t> files,
                              std::span<const int64_t> offsets) {
  Slot& slot = slots_[index];
  GroupRequest& request = slot.group->edit();
  if (slot.buffer != nullptr) request.before = slot.buffer->uses;
  request.patient = patient;
  // Keeps this alive while reads into its slot are in flight.
  request.on_done = [self = shared_from_this(), index] { self->slot_done(index); };
  request.transfers.clear();
  request.transfers.reserve(files.size());
  for (size_t i = 0; i < files.size(); ++i) {
    request.transfers.push_back(
        {static_cast<uint32_t>(files[i]), static_cast<uint64_t>(offsets[i]), options_.sample_bytes});
  }
  engine.submit(slot.group);
}

void Prefetcher::Core::gather(Slot& slot, std::span<const int32_t> files, std::span<const int64_t> offsets) {
  std::byte* memory = slot.buffer->data() + slot.offset;
  slot.result.copies = {residence_->gather(memory, files, offsets, options_.sample_bytes, slot.buffer->uses)};
  slot.result.bytes[Route::kPinnedCache] += files.size() * options_.sample_bytes;
}

// A batch may start anywhere in its buffer, on a cache line. If memory and file offset of all
// samples are congruent modulo the alignment of direct I/O, a disk can write to it without a
// bounce.
size_t Prefetcher::Core::placement(uint64_t file_offset) const {
  constexpr uint64_t kSector = 512, kCacheLine = 64;
  const uint64_t place = file_offset % kPlacementBytes;
  const bool useful = options_.conversion == Conversion::kNone && options_.sample_bytes % kSector == 0;
  return useful && place % kCacheLine == 0 ? place : 0;
}

void Prefetcher::Core::slot_done(size_t index) {
  std::shared_ptr<DeviceBuffer> released;
  const std::lock_guard lock(mutex_);
  Slot& slot = slots_[index];
  slot.result = slot.group->take_result();
  released = mark_ready(index);
}

std::shared_ptr<DeviceBuffer> Prefetcher::Core::mark_ready(size_t index) {
  ring_.ready(index);
  ++completed_;
  head_ready_.store(ring_.head_ready(), std::memory_order_release);
  if (ring_.count(Ring::State::kFilling) == 0 && planned_batches_ > 0) full_since_ = Clock::now();
  if (consumer_waits_ && ring_.head() == index) changed_.notify_all();
  return closed_ ? slots_[index].give_up_buffer(*pool_) : nullptr;
}

std::optional<Prefetcher::Batch> Prefetcher::Core::next(const std::function<void()>& poll) {
  std::unique_lock lock(mutex_);
  if (closed_) {
    lock.unlock();
    throw Failure({ErrorCode::kClosed, "this iterator was closed; make a new one with iter(dataset)"});
  }
  if (!ring_.head() && planned_batches_ == 0) return std::nullopt;
  ready_seen_ += ring_.count(Ring::State::kReady);
  ++calls_;
  if (!ring_.head_ready()) {
    const auto began = Clock::now();
    if (!help_until_head(lock)) wait_for_head(lock, poll);
    ++statistics_.stalls;
    statistics_.stall_s += std::chrono::duration<double>(Clock::now() - began).count();
  }
  if (full_since_) {
    statistics_.ring_full_s += std::chrono::duration<double>(Clock::now() - *full_since_).count();
    full_since_.reset();
  }
  const size_t index = ring_.take();
  Slot& slot = slots_[index];
  std::optional<Error> error = std::move(slot.result.error);
  Batch batch{nullptr, slot.offset, slot.samples, {}};
  if (!error) {
    ++statistics_.batches;
    statistics_.bytes += slot.result.bytes;
    batch.buffer = std::move(slot.buffer);
    batch.buffer->uses.clear();  // the batch's own copies waited for them
    batch.copies = std::move(slot.result.copies);
    pool_->handed_over();
  } else if (slot.buffer != nullptr) {
    slot.add_uses();
  }
  const bool is_first = statistics_.batches == 1;
  ring_.release(index);
  head_ready_.store(ring_.head_ready(), std::memory_order_release);
  lock.unlock();
  have_slots_filled();
  if (error) throw Failure(std::move(*error));
  if (residence_ != nullptr && is_first) residence_->begin();
  return batch;
}

// If the processor can write batches, the consumer copies too and does not sleep: waking it would
// cost as much as a small batch. Then it polls for a moment, because a worker may be about to
// finish. Returns false if it has to sleep.
bool Prefetcher::Core::help_until_head(std::unique_lock<std::mutex>& lock) {
  const std::shared_ptr<Engine> engine = engine_;
  lock.unlock();
  engine->hurry();
  while (true) {
    bool helped = engine->help();
    const auto until = Clock::now() + tuning::kConsumerLooks;
    while (!helped && !head_ready_.load(std::memory_order_acquire) && Clock::now() < until) {
      helped = engine->help();
    }
    lock.lock();
    if (closed_) return false;
    if (ring_.head_ready()) return true;
    if (!helped) return false;
    lock.unlock();
  }
}

void Prefetcher::Core::wait_for_head(std::unique_lock<std::mutex>& lock, const std::function<void()>& poll) {
  constexpr std::chrono::milliseconds kPollInterval{50};
  StallClock clock(options_.stall_timeout);
  consumer_waits_ = true;
  while (!changed_.wait_for(lock, kPollInterval, [this] { return ring_.head_ready() || closed_; })) {
    if (clock.stalled(progress())) {
      consumer_waits_ = false;
      const std::optional<size_t> head = ring_.head();
      lock.unlock();
      throw Failure(stall_of(head));
    }
    if (poll) {
      lock.unlock();
      poll();  // may throw: the next call then returns the batch
      lock.lock();
    }
  }
  consumer_waits_ = false;
  if (!closed_) return;
  lock.unlock();
  throw Failure({ErrorCode::kClosed, "this iterator was closed while it waited for a batch"});
}

uint64_t Prefetcher::Core::progress() const {
  uint64_t progress = completed_;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (ring_.state(i) == Ring::State::kFilling) progress += engine_->progress_of(*slots_[i].group);
  }
  return progress;
}

Error Prefetcher::Core::stall_of(std::optional<size_t> head) {
  const std::string waited = "no read has ended for " + std::to_string(options_.stall_timeout.count()) + " ms; ";
  const std::unique_lock filling(filling_, std::try_to_lock);  // with it, the head's request is complete
  if (!head || !filling) return {ErrorCode::kStalled, waited + "the next batch could not begin: does the GPU answer?"};
  // It was submitted to the engine, because gathered batches are ready at once.
  const Transfer& first = slots_[*head].group->request().transfers.front();
  return {ErrorCode::kStalled,
          waited + "the next batch waits for '" + files_->path(first.file) + "' at offset " +
              std::to_string(first.offset) + ". Is its storage still reachable? stall_timeout_s raises the limit",
          files_->path(first.file), first.offset, first.length};
}

void Prefetcher::Core::close() {
  std::shared_ptr<Engine> engine;  // destroyed after the lock is released
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    engine.swap(engine_);
    planned_batches_ = 0;
    changed_.notify_all();
  }
  if (filler_ != nullptr) filler_->end();
  for (size_t i = 0; i < slots_.size(); ++i) {  // no slot is being filled now
    std::shared_ptr<DeviceBuffer> released;
    const std::lock_guard lock(mutex_);
    if (ring_.state(i) == Ring::State::kFilling) {
      slots_[i].group->cancel();
    } else {
      released = slots_[i].give_up_buffer(*pool_);
    }
  }
}

PrefetchStatistics Prefetcher::Core::statistics() const {
  std::lock_guard lock(mutex_);
  PrefetchStatistics result = statistics_;
  if (full_since_) result.ring_full_s += std::chrono::duration<double>(Clock::now() - *full_since_).count();
  if (calls_ > 0) result.mean_ready = static_cast<double>(ready_seen_) / static_cast<double>(calls_);
  result.ready = ring_.count(Ring::State::kReady);
  result.filling = ring_.count(Ring::State::kFilling);
  return result;
}

Prefetcher::Prefetcher(std::shared_ptr<Engine> engine, std::shared_ptr<FileTable> files,
                       std::shared_ptr<BufferPool> pool, PrefetchOptions options, std::shared_ptr<Residence> residence)
    : core_(std::make_shared<Core>(std::move(engine), std::move(files), std::move(pool), options,
                                   std::move(residence))) {}

Prefetcher::~Prefetcher() { close(); }

void Prefetcher::plan(std::span<const int32_t> files, std::span<const int64_t> offsets,
                      std::span<const int64_t> sizes) {
  Core& core = living_core();
  core.planned().add(files, offsets, sizes);
  core.added(sizes.size());
}

void Prefetcher::set_order(const SampleOrder& order) { living_core().planned().set_order(order); }

void Prefetcher::plan_runs(std::span<const int64_t> begins, std::span<const int64_t> lengths,
                           std::span<const int64_t> sizes) {
  Core& core = living_core();
  core.planned().add_runs(begins, lengths, sizes);
  core.added(sizes.size());
}

std::optional<Prefetcher::Batch> Prefetcher::next(const std::function<void()>& poll) {
  return living_core().next(poll);
}

PrefetchStatistics Prefetcher::statistics() const {
  return core_->forked() ? PrefetchStatistics() : core_->statistics();  // its locks may be held forever
}

void Prefetcher::close() {
  if (!core_->forked()) return core_->close();
  // A forked child cannot end what is in flight, and a lock may be held forever. So it is leaked.
  static auto* left = new std::vector<std::shared_ptr<Core>>;
  left->push_back(core_);
}

Prefetcher::Core& Prefetcher::living_core() const {
  if (core_->forked()) {
    throw Failure(
        {ErrorCode::kClosed, "an iterator does not work in its forked child; make a new one there with iter(dataset)"});
  }
  return *core_;
}

}  // namespace gdsdata
