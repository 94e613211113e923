#include "engine/round_reader.h"

#include <algorithm>
#include <array>

namespace gdsdata {

namespace {

constexpr size_t kDescriptorsOfFile = 2;  // including the one for O_DIRECT

// Counts different files. It may count a file twice if two indices share a place.
class FileCounter {
 public:
  FileCounter() { seen_.fill(UINT32_MAX); }
  void add(uint32_t index) {
    uint32_t& place = seen_[index % seen_.size()];
    if (place != index) ++count_;
    place = index;
  }
  size_t count() const { return count_; }

 private:
  std::array<uint32_t, 64> seen_;
  size_t count_ = 0;
};

}  // namespace

RoundReader::RoundReader(const EngineOptions& options, const Device& device, SpanLog& spans)
    : asks_memory_(options.io.direct != DirectMode::kAlways),
      few_files_(most_cached_descriptors() / kDescriptorsOfFile),
      most_files_(std::max<size_t>(1, few_files_ / (options.workers + 1))),
      spans_(spans),
      page_cache_(device.host_addressable() ? PageCache::Into::kResult : PageCache::Into::kStaging) {}

size_t RoundReader::read(ActiveSegment& active, std::span<const Transfer> parts, size_t asked, WhenTaken when_taken,
                         std::vector<Transfer>& left) {
  active.files.clear();
  if (parts.empty()) return 0;  // then there may be no table
  std::vector<Opened> opened;
  parts = parts.first(open_files(active, parts, when_taken, opened));
  if (parts.empty()) return 0;
  const FileTable& table = *active.group().request().files;
  const size_t left_before = left.size();
  const Pin pin = table.pin(pin_slot_);
  find_files(table, parts, opened, pin);
  parts = parts.first(part_files_.size());
  asked = std::min(asked, parts.size());
  serve(active, parts.first(asked), left);
  if (!active.error) keep_files(active, parts, asked, std::span(left).subspan(left_before));
  return parts.size();
}

// Opens the files of the first parts, and returns the number of these. It must not have a pin: the
// files that are closed instead of them would wait for it.
size_t RoundReader::open_files(ActiveSegment& active, std::span<const Transfer> parts, WhenTaken when_taken,
                               std::vector<Opened>& opened) {
  FileTable& table = *active.group().request().files;
  const bool is_bounded = table.size() > few_files_;
  FileCounter files;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Transfer& part = parts[i];
    const bool is_held = i > 0 && parts[opened.back().part].file == part.file;
    if (i == 0 || !(is_held || table.touch(part.file))) {  // the first is held, so that each round advances
      try {
        auto file = table.get(part.file, i == 0 ? when_taken : WhenTaken::kGiveUp, part.length);
        if (file == nullptr) {
          if (opened.size() < 2) return i;
          // Only half of these stay open, because each needs a second descriptor for O_DIRECT.
          const size_t half = (opened.size() + 1) / 2;
          const size_t count = opened[half].part;
          opened.resize(half);
          return count;
        }
        opened.push_back({i, std::move(file)});
      } catch (const Failure& failure) {
        active.error = failure.error();
        active.error->offset = part.offset;
        active.error->length = part.length;
        return 0;
      }
    }
    if (!is_bounded) continue;
    files.add(part.file);
    if (files.count() >= most_files_) return i + 1;
  }
  return parts.size();
}

// Finds the files of the parts, up to one that was closed meanwhile. The table need not have those
// in `opened`, of which the first is that of the first part.
void RoundReader::find_files(const FileTable& table, std::span<const Transfer> parts, std::span<const Opened> opened,
                             const Pin& pin) {
  part_files_.clear();
  const Opened* held = opened.data();
  for (size_t i = 0; i < parts.size(); ++i) {
    if (held + 1 < opened.data() + opened.size() && held[1].part == i) ++held;
    const bool is_held = parts[held->part].file == parts[i].file;
    File* file = is_held ? held->file.get() : table.find(parts[i].file, pin);
    if (file == nullptr) return;
    part_files_.push_back(file);
  }
}

void RoundReader::serve(ActiveSegment& active, std::span<const Transfer> parts, std::vector<Transfer>& left) {
  const bool asked_before = !active.segment.rest.empty();
  if (asked_before || !asks_memory_ || !active.is_read()) {
    left.insert(left.end(), parts.begin(), parts.end());
    return;
  }
  const Group& group = active.group();
  const auto asked = Clock::now();
  RouteBytes bytes;
  const auto files = std::span(part_files_).first(parts.size());
  active.error = page_cache_.serve(parts, files, group.request().conversion, group.past_caches(), left, bytes);
  active.bytes += bytes;
  if (const uint64_t copied = bytes.total(); copied > 0) spans_.add(Work::kPageCache, asked, Clock::now(), copied);
  if (active.error) left.clear();
}

// `left` is parts of the first `asked` ones, in their order.
void RoundReader::keep_files(ActiveSegment& active, std::span<const Transfer> parts, size_t asked,
                             std::span<const Transfer> left) {
  kept_.clear();
  const auto keep = [&](size_t i) {
    if (kept_.empty() || kept_.back().first != parts[i].file) kept_.emplace_back(parts[i].file, part_files_[i]);
  };
  size_t part = 0;
  for (const Transfer& transfer : left) {
    while (parts[part].file != transfer.file) ++part;
    keep(part);
  }
  for (part = asked; part < parts.size(); ++part) keep(part);
  std::sort(kept_.begin(), kept_.end());
  for (const auto& [index, file] : kept_) active.files.add(index, file->shared_from_this());
}

void RoundReader::serve_all(ActiveSegment& active, std::span<const Transfer> parts, std::vector<Transfer>& left) {
  while (!parts.empty() && !active.error) {
    const size_t count = read(active, parts, parts.size(), WhenTaken::kGiveUp, left);
    if (active.error) break;
    if (count == 0) {
      left.insert(left.end(), parts.begin(), parts.end());
      return;
    }
    parts = parts.subspan(count);
  }
  if (active.error) left.clear();
}

}  // namespace gdsdata
