// cuFile moves bytes from disks into a GPU's memory, by DMA if nvidia-fs or PCI P2PDMA allows it.
// Otherwise it copies through host memory, and only its statistics show that. So bytes count as
// Route::kGds only if the statistics show DMA and no copy. The statistics are those of the process:
// a copy by another thread can only lower this count.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <deque>
#include <list>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "backend/cufile_api.h"
#include "backend/cufile_memory.h"
#include "backend/request_error.h"
#include "base/fallbacks.h"
#include "base/file.h"
#include "tuning.h"

namespace gdsdata {

namespace {

// After so many answers in a row without progress, the request fails.
constexpr int kMaxIdleAnswers = 1000;

// A file registered with cuFile. It is the File's companion, so it ends before the descriptor
// closes. Requests in flight keep it open.
struct CufileFile {
  CufileFile(const CufileApi& api, int fd) : api(api), process(process_id()) {
    CufileApi::Descriptor descriptor{};
    descriptor.type = CufileApi::kTypeFd;
    descriptor.fd = fd;
    status = api.handle_register(&handle, &descriptor);
  }
  ~CufileFile() {
    if (status.code == 0 && process == process_id()) api.handle_deregister(handle);
  }
  CufileFile(const CufileFile&) = delete;
  CufileFile& operator=(const CufileFile&) = delete;

  const CufileApi& api;
  const int64_t process;
  CufileApi::Handle handle = nullptr;
  CufileApi::Status status{};
  std::atomic<bool> by_dma{false};  // whether its last transfer went by DMA
};

// A request in flight.
struct Going {
  Request request;
  Completion completion;
  CufileFile* file = nullptr;
  CufileRoutes before;
  size_t parts = 0;  // not completed yet
};

// The range of one call or of one entry in a batch.
struct Part {
  Going* going = nullptr;
  uint64_t offset = 0;
  uint64_t length = 0;
  int idle_answers = 0;  // in a row without progress
  bool in_flight = false;
};

struct Batch {
  CufileApi::Batch handle = nullptr;
  std::vector<Part> parts;
  size_t in_flight = 0;
  int idle_answers = 0;
};

bool passes(int64_t result) { return result == -EINTR || result == -EAGAIN || (result <= -5039 && result >= -5043); }

class CufileBackend final : public Backend {
 public:
  CufileBackend(const BackendOptions& options, Device& device) : options_(options), api_(get_api(device)) {
    if (options.strict && !api_.counts_routes) {
      throw Failure(
          {ErrorCode::kUnavailable,
           std::string("cuFile: bytes cannot be seen to go by DMA, as strict asks: ") + CufileApi::why_not_counted()});
    }
    const size_t depth = std::min<size_t>(options.queue_depth, api_.properties.max_batch_entries);
    depth_ = options.cufile_batch ? std::max<size_t>(depth, 1) : 1;
    // cuFile handles entries that are longer than its own buffers in another way, which copies.
    const uint64_t cache_bytes = uint64_t{api_.properties.per_buffer_cache_kib} * 1024;
    entry_bytes_ = cache_bytes == 0 ? options.request_bytes : cache_bytes;
    batches_.resize(std::min(depth_, tuning::kCufileBatches));
    for (Batch& batch : batches_) batch.parts.resize(depth_ / batches_.size());
    entries_.reserve(batches_.front().parts.size());
    events_.resize(batches_.front().parts.size());
  }

  ~CufileBackend() override {
    for (Batch& batch : batches_) give_up(batch);
  }

  Capabilities capabilities() const override { return {"cufile", depth_, options_.request_bytes, true}; }

  void expect_memory(std::span<std::byte> memory) override {
    if (auto user = register_cufile_memory(memory)) memory_.push_back(std::move(user));
  }

  size_t submit(std::span<const Request> requests) override {
    std::list<Going> taking(std::min(requests.size(), depth_ - std::min(depth_, going_.size())));
    size_t taken = 0;
    while (!taking.empty()) {  // nothing is thrown from here on: what is taken ends in a completion
      going_.splice(going_.end(), taking, taking.begin());
      if (begin(going_.back(), requests[taken++])) break;  // that took long, so reap first
    }
    fill_batches();
    return taken;
  }

  size_t reap(std::span<Completion> completions, size_t min, std::chrono::milliseconds timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (true) {
      for (Batch& batch : batches_) take_answers(batch, 0, {});
      fill_batches();
      size_t given = 0;
      while (given < completions.size() && !completed_.empty()) {
        completions[given++] = std::move(completed_.front().completion);
        completed_.pop_front();
      }
      if (given > 0 || min == 0 || going_.empty()) return given;
      const auto left = deadline - std::chrono::steady_clock::now();
      if (left.count() <= 0) return 0;
      const auto busy = std::find_if(batches_.begin(), batches_.end(), [](const Batch& b) { return b.in_flight > 0; });
      if (busy != batches_.end())
        take_answers(*busy, 1, std::min<std::chrono::nanoseconds>(left, tuning::kCufileLooks));
    }
  }

 private:
  static const CufileApi& get_api(Device& device) {
    if (const std::string refusal = cufile_refusal(device); !refusal.empty()) {
      throw Failure({ErrorCode::kUnavailable, refusal});
    }
    device.bind_thread();  // cuFile uses the calling thread's device
    return CufileApi::get();
  }

  // Takes a step of a request, which fails with what the step throws.
  template <typename Step>
  static void guard(Going& going, Step step) noexcept {
    try {
      step();
    } catch (...) {
      fail(going, current_error());
    }
  }

  // Returns true if it has transferred the bytes by blocking calls. A copy through host memory in a
  // batch may wait forever if cuFile's pool of buffers is empty. So batches are only for files that
  // are known to use DMA.
  bool begin(Going& going, const Request& request) noexcept {
    going.parts = 1;  // so that it does not end meanwhile
    guard(going, [&] { prepare(going, request); });
    const bool is_prepared = !going.completion.error;
    const bool is_batched = is_prepared && options_.cufile_batch && going.file->by_dma;
    if (is_batched) guard(going, [&] { cut(going); });
    if (is_prepared && !is_batched) transfer({&going, request.offset, request.length});
    end(going);
    return is_prepared && !is_batched;
  }

  void prepare(Going& going, const Request& request) {
    going.request = request;
    going.completion.tag = request.tag;
    const bool one_piece = request.pieces.size() == 1 && request.pieces.front().offset == request.offset &&
                           request.pieces.front().length == request.length;
    if (!one_piece || request.conversion != Conversion::kNone) {
      return fail(going, {ErrorCode::kInvalidArgument, "cuFile moves one unconverted piece a request, and all of it",
                          request.file->path(), request.offset, request.length});
    }
    while (going.file == nullptr) {  // again if the file has begun to rest meanwhile
      if (request.file->buffered() < 0) return fail(going, closed_error(request));
      int fd = request.file->direct();
      const bool must_be_direct = options_.strict || options_.direct == DirectMode::kAlways;
      if (fd < 0 && must_be_direct) return fail(going, direct_refused_error(request));
      if (fd < 0) fd = request.file->buffered();
      const auto companion = request.file->companion(fd, [&] { return std::make_shared<CufileFile>(api_, fd); });
      going.file = static_cast<CufileFile*>(companion.get());
    }
    if (going.file->status.code != 0) {
      Error error = cufile_error("register with cuFile", request.file->path(), going.file->status);
      error.code = ErrorCode::kUnavailable;
      return fail(going, std::move(error));
    }
    going.before = CufileRoutes::now(api_);
  }

  void cut(Going& going) {
    const uint64_t end = going.request.offset + going.request.length;
    for (uint64_t offset = going.request.offset; offset < end; offset += entry_bytes_) {
      waiting_.push_back({&going, offset, std::min(entry_bytes_, end - offset)});
      ++going.parts;
    }
  }

  // Transfers all of a part by blocking calls.
  void transfer(Part part) noexcept {
    Going& going = *part.going;
    ++going.parts;
    while (!going.completion.error && part.length > 0) {
      const CufilePlace place = place_of(part);
      const auto file_offset = static_cast<off_t>(part.offset);
      const auto memory_offset = static_cast<off_t>(place.offset_bytes);
      CufileApi::Handle handle = going.file->handle;
      int64_t result = going.request.direction == Direction::kWrite
                           ? api_.write(handle, place.memory, part.length, file_offset, memory_offset)
                           : api_.read(handle, place.memory, part.length, file_offset, memory_offset);
      if (result == -1) result = -errno;
      advance(part, result);
    }
    end(going);
  }

  // Handles the result of a call or an entry: bytes, or a negative errno or cuFile code.
  void advance(Part& part, int64_t result) noexcept {
    guard(*part.going, [&] { take_result(part, result); });
  }

  void take_result(Part& part, int64_t result) {
    Going& going = *part.going;
    const Request& request = going.request;
    const bool write = request.direction == Direction::kWrite;
    const auto fail_with = [&](int code) {
      // Some file systems report an error at a file's end. The truncation is the better message.
      if (!write && request.file->current_size_bytes() < part.offset + part.length) {
        return fail(going, truncated_error(request));
      }
      const char* operation = write ? "write with cuFile" : "read with cuFile";
      fail(going, cufile_error(operation, request.file->path(), {code, 0}, part.offset, part.length));
    };
    if (result > 0 && static_cast<uint64_t>(result) <= part.length) {
      part.offset += static_cast<uint64_t>(result);
      part.length -= static_cast<uint64_t>(result);
      part.idle_answers = 0;
      going.completion.storage_bytes += static_cast<uint64_t>(result);
    } else if (result > 0) {
      fail_with(EIO);  // more than requested
    } else if (result == 0 && !write && part.offset >= request.file->current_size_bytes()) {
      fail(going, truncated_error(request));
    } else if ((result == 0 || passes(result)) && ++part.idle_answers < kMaxIdleAnswers) {
      std::this_thread::yield();
    } else {
      fail_with(result == 0 ? EIO : static_cast<int>(-result));
    }
  }

  void fill_batches() noexcept {
    for (Batch& batch : batches_) {
      if (batch.in_flight > 0) continue;
      entries_.clear();
      while (!waiting_.empty() && entries_.size() < batch.parts.size()) {
        const Part waiting = waiting_.front();
        waiting_.pop_front();
        if (waiting.going->completion.error) {
          end(*waiting.going);
        } else {
          add(batch, waiting);
        }
      }
      if (!entries_.empty()) submit_batch(batch);
    }
  }

  void add(Batch& batch, const Part& waiting) {
    Part& part = batch.parts[entries_.size()];
    part = waiting;
    part.in_flight = true;
    const CufilePlace place = place_of(part);
    CufileApi::Entry entry{};
    entry.mode = CufileApi::kBatchMode;
    entry.memory = place.memory;
    entry.file_offset = static_cast<off_t>(part.offset);
    entry.memory_offset = static_cast<off_t>(place.offset_bytes);
    entry.length = part.length;
    entry.handle = part.going->file->handle;
    const bool write = part.going->request.direction == Direction::kWrite;
    entry.operation = write ? CufileApi::kOperationWrite : CufileApi::kOperationRead;
    entry.cookie = &part;
    entries_.push_back(entry);
  }

  void submit_batch(Batch& batch) {
    const auto count = static_cast<unsigned>(entries_.size());
    CufileApi::Status status{};
    if (batch.handle == nullptr) status = api_.batch_set_up(&batch.handle, static_cast<unsigned>(batch.parts.size()));
    if (status.code == 0) {
      status = api_.batch_submit(batch.handle, count, entries_.data(), 0);
    } else {
      batch.handle = nullptr;
    }
    if (status.code == 0) {
      batch.in_flight = count;
      return;
    }
    // cuFile does not say which entries it took, but none is in flight after the batch is
    // destroyed. Blocking calls then find the error, if there is one.
    give_up(batch);
    guard(*batch.parts.front().going, [&] {
      note_fallback("cuFile refused a batch and is called for each part of it instead: " + CufileApi::describe(status));
    });
    for (unsigned i = 0; i < count; ++i) {
      Part part = std::exchange(batch.parts[i], {});
      --part.going->parts;
      transfer(part);
    }
  }

  // Events come in any order, and each has its own status: a batch never fails as a whole.
  void take_answers(Batch& batch, unsigned min, std::chrono::nanoseconds patience) {
    if (batch.in_flight == 0) return;
    auto count = static_cast<unsigned>(batch.in_flight);
    timespec limit{};
    limit.tv_nsec = patience.count();
    const CufileApi::Status status = api_.batch_status(batch.handle, min, &count, events_.data(), &limit);
    if (status.code != 0) {
      if (++batch.idle_answers >= kMaxIdleAnswers || !passes(-status.code)) abandon(batch, status);
      return;
    }
    batch.idle_answers = 0;
    for (unsigned i = 0; i < count; ++i) {
      const CufileApi::Event& event = events_[i];
      if (event.status == CufileApi::kWaiting || event.status == CufileApi::kPending) continue;
      Part& slot = *static_cast<Part*>(event.cookie);
      if (!slot.in_flight) continue;  // reported twice
      Part part = std::exchange(slot, {});
      --batch.in_flight;
      advance(part, result_of(event));
      const bool goes_on = part.length > 0 && !part.going->completion.error;
      if (goes_on) guard(*part.going, [&] { waiting_.push_front(part); });
      if (!goes_on || part.going->completion.error) end(*part.going);
    }
  }

  static int64_t result_of(const CufileApi::Event& event) {
    const auto result = static_cast<int64_t>(event.result);
    if (result < -1) return result;
    if (event.status == CufileApi::kComplete && result >= 0) return result;
    if (event.status == CufileApi::kTimeout) return -ETIMEDOUT;
    if (event.status == CufileApi::kCanceled) return -ECANCELED;
    if (event.status == CufileApi::kInvalid) return -EINVAL;
    return -EIO;
  }

  void abandon(Batch& batch, CufileApi::Status status) {
    give_up(batch);
    for (Part& slot : batch.parts) {
      if (!slot.in_flight) continue;
      const Part part = std::exchange(slot, {});
      guard(*part.going, [&] {
        fail(*part.going, cufile_error("learn from cuFile what became of a transfer of",
                                       part.going->request.file->path(), status, part.offset, part.length));
      });
      end(*part.going);
    }
  }

  // Cancels and destroys the batch. Nothing of it is in flight afterwards.
  void give_up(Batch& batch) {
    if (batch.handle == nullptr) return;
    if (batch.in_flight > 0) api_.batch_cancel(batch.handle);
    api_.batch_destroy(batch.handle);
    batch.handle = nullptr;
    batch.in_flight = 0;
    batch.idle_answers = 0;
  }

  static CufilePlace place_of(const Part& part) {
    const Piece& piece = part.going->request.pieces.front();
    return find_cufile_place(piece.memory + (part.offset - piece.offset), part.length);
  }

  static void fail(Going& going, Error error) noexcept {
    if (!going.completion.error) going.completion.error = std::move(error);
  }

  // Call it when a part has completed.
  void end(Going& going) noexcept {
    if (--going.parts > 0) return;
    if (!going.completion.error) guard(going, [&] { count(going); });
    const auto is_it = [&](const Going& other) { return &other == &going; };
    completed_.splice(completed_.end(), going_, std::find_if(going_.begin(), going_.end(), is_it));
  }

  void count(Going& going) {
    const CufileRoutes after = CufileRoutes::now(api_);
    const bool by_dma = after.dma > going.before.dma && after.host == going.before.host;
    going.file->by_dma = by_dma;
    going.completion.bytes[by_dma ? Route::kGds : Route::kGdsCompat] += going.request.length;
    if (by_dma) return;
    const char* why = api_.counts_routes
                          ? "neither nvidia-fs nor PCI P2PDMA serves this file system (gdscheck -p says why)"
                          : CufileApi::why_not_counted();
    const std::string text = std::string("cuFile copies through host memory, as far as is known: ") + why;
    if (options_.strict) {
      const Request& request = going.request;
      going.completion.bytes = {};
      return fail(going, {ErrorCode::kUnavailable, text + "; '" + request.file->path() + "' was to go by DMA (strict)",
                          request.file->path(), request.offset, request.length});
    }
    note_fallback(text);
  }

  BackendOptions options_;
  const CufileApi& api_;
  size_t depth_ = 1;
  uint64_t entry_bytes_ = 0;
  std::list<Going> going_, completed_;
  std::deque<Part> waiting_;  // for an entry in a batch
  std::vector<Batch> batches_;
  std::vector<CufileApi::Entry> entries_;
  std::vector<CufileApi::Event> events_;
  std::vector<std::shared_ptr<void>> memory_;  // registered
};

}  // namespace

std::string cufile_refusal(const Device& device) {
  if (device.host_addressable()) return "cuFile: it moves bytes into GPUs, and batches are on " + device.name();
  std::string refusal;
  // A separate thread opens the driver, so that the caller's current device does not change.
  std::thread([&] {
    try {
      cuda_device(device.ordinal())->bind_thread();
      CufileApi::get();
    } catch (const Failure& failure) {
      refusal = failure.what();
    }
  }).join();
  return refusal;
}

std::unique_ptr<Backend> make_cufile_backend(const BackendOptions& options, Device& device) {
  return std::make_unique<CufileBackend>(options, device);
}

}  // namespace gdsdata
