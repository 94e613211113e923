#include "engine/residence.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/extent_math.h"
#include "base/thread_name.h"
#include "base/without_memory.h"
#include "tuning.h"

namespace gdsdata {

namespace {

// A multiple of the streams, so that consecutive gathers use different ones.
size_t gathers_in_flight(size_t most_samples) {
  static_assert(tuning::kMostGathersInFlight % tuning::kGatherStreams == 0);
  const size_t fit = tuning::kMostGatherAddressBytes / (most_samples * sizeof(uint64_t));
  return std::clamp(fit - fit % tuning::kGatherStreams, tuning::kGatherStreams, tuning::kMostGathersInFlight);
}

}  // namespace

Residence::Residence(std::shared_ptr<Device> device, std::shared_ptr<FileTable> files, size_t most_samples)
    : device_(std::move(device)),
      files_(std::move(files)),
      most_samples_(std::max<size_t>(1, most_samples)),
      thread_([this] { register_files(); }) {}

Residence::~Residence() {
  stop_ = true;
  begin();
  thread_.join();
}

void Residence::begin() {
  {
    std::lock_guard lock(mutex_);
    begun_ = true;
  }
  changed_.notify_one();
}

std::optional<Error> Residence::error() const {
  std::lock_guard lock(mutex_);
  return error_;
}

void Residence::register_files() {
  name_this_thread("gdsdata-pinning");
  {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kPatience, [this] { return begun_; });
  }
  try {
    mappings_.reserve(files_->size());
    if (!stop_) device_->make_stream()->gather(nullptr, nullptr, 0,
                                               0);  // compiles the kernel before the first batch
    for (uint32_t i = 0; i < files_->size() && !stop_; ++i) register_file(i);
    if (stop_) return;
    gatherer_ = std::make_unique<Gatherer>(*this, most_samples_);
    ready_.store(true, std::memory_order_release);
  } catch (...) {
    std::lock_guard lock(mutex_);
    error_ = current_error();
  }
}

void Residence::register_file(uint32_t index) {
  const std::shared_ptr<File> file = files_->get(index);
  mappings_.push_back(Mapping::make(file->buffered(), file->size_bytes()));
  if (file->size_bytes() == 0) return;
  const Mapping* mapping = mappings_.back().get();
  if (mapping == nullptr) {
    throw Failure({ErrorCode::kUnavailable, "'" + file->path() + "' cannot be mapped into memory", file->path()});
  }
  const uint64_t mapped_bytes = align_up(mapping->size_bytes(), page_bytes());
  for (uint64_t offset = 0; offset < mapped_bytes && !stop_; offset += tuning::kRegistrationWindowBytes) {
    const std::byte* window = mapping->data() + offset;
    const uint64_t bytes = std::min(tuning::kRegistrationWindowBytes, mapped_bytes - offset);
    file->will_need(offset, bytes);  // else registering would read the file page by page
    const auto began = std::chrono::steady_clock::now();
    registrations_.push_back(device_->register_mapping(window, bytes));
    if (registrations_.back()->on_device() != window) {
      throw Failure({ErrorCode::kUnavailable,
                     device_->name() + " sees registered memory at other addresses than the processor does"});
    }
    registered_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    pause(tuning::kRegistrationPauses * (std::chrono::steady_clock::now() - began));
  }
}

void Residence::pause(std::chrono::nanoseconds time) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, time, [this] { return stop_.load(); });
}

std::shared_ptr<Event> Residence::gather(std::byte* target, std::span<const int32_t> files,
                                         std::span<const int64_t> offsets, uint64_t sample_bytes,
                                         const Events& before) {
  std::lock_guard lock(gathering_);
  return gatherer_->gather(target, files, offsets, sample_bytes, before);
}

Gatherer::Gatherer(const Residence& residence, size_t most_samples)
    : residence_(residence),
      most_samples_(most_samples),
      ended_(gathers_in_flight(most_samples)),
      addresses_(residence_.device().allocate_pinned(ended_.size() * most_samples * sizeof(uint64_t))) {
  for (auto& stream : streams_) stream = residence_.device().make_stream();
}

Gatherer::~Gatherer() {
  for (const auto& event : ended_) {
    // Other errors: the device is lost, and its work too.
    if (event != nullptr) retry_without_memory([&] { event->wait(); });
  }
}

std::shared_ptr<Event> Gatherer::gather(std::byte* target, std::span<const int32_t> files,
                                        std::span<const int64_t> offsets, uint64_t sample_bytes, const Events& before) {
  if (files.size() > most_samples_) {
    throw Failure({ErrorCode::kInvalidArgument, "a gather of " + std::to_string(files.size()) +
                                                    " samples, and not of at most " + std::to_string(most_samples_)});
  }
  std::shared_ptr<Event>& ended = ended_[next_];
  if (ended != nullptr) ended->wait();
  auto* addresses = reinterpret_cast<uint64_t*>(addresses_->data()) + next_ * most_samples_;
  for (size_t i = 0; i < files.size(); ++i) {
    const auto file = static_cast<uint32_t>(files[i]);
    const auto offset = static_cast<uint64_t>(offsets[i]);
    addresses[i] = residence_.address(file, offset, sample_bytes);
    if (addresses[i] == 0) {
      const std::string path = residence_.files().path(file);
      throw Failure({ErrorCode::kCorrupt,
                     "'" + path + "' ends before offset " + std::to_string(offset) + " + length " +
                         std::to_string(sample_bytes) + " that was to be read",
                     path, offset, sample_bytes});
    }
  }
  Stream& stream = *streams_[next_ % streams_.size()];
  try {
    for (const auto& event : before) stream.wait(*event);
    stream.gather(target, addresses, files.size(), sample_bytes);
    ended = stream.record();
  } catch (...) {
    finish(stream);  // the work may be queued, so addresses and target may be in use
    throw;
  }
  next_ = (next_ + 1) % ended_.size();
  return ended;
}

}  // namespace gdsdata
