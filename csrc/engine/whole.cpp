#include "engine/whole.h"

#include <atomic>
#include <cstdio>
#include <utility>

namespace gdsdata {

namespace {

std::shared_ptr<Group> group_of(Direction direction, std::shared_ptr<FileTable> files, std::vector<Transfer> transfers,
                                const Caller& caller) {
  auto group = std::make_shared<Group>();
  group->files = std::move(files);
  group->direction = direction;
  group->transfers = std::move(transfers);
  group->priority = caller.priority;
  group->before = caller.before;
  return group;
}

Moved move(Engine& engine, Direction direction, std::shared_ptr<FileTable> files, std::vector<Transfer> transfers,
           bool with_checksums, const Caller& caller) {
  const auto group = group_of(direction, std::move(files), std::move(transfers), caller);
  group->checksum = with_checksums ? Checksum::kCrc32 : Checksum::kNone;
  engine.run(group, caller.poll, caller.stall_timeout);
  return {with_checksums ? group->checksums() : std::vector<uint32_t>(), group->bytes};
}

void move_range(Engine& engine, Direction direction, std::shared_ptr<File> file, uint64_t offset, uint64_t length,
                const Caller& caller) {
  auto files = std::make_shared<FileTable>(std::move(file));
  move(engine, direction, std::move(files), {{0, offset, length, caller.memory}}, false, caller);
}

// Beside its target, because a rename works within one file system only.
std::string temporary_name(const std::string& path) {
  static std::atomic<uint64_t> count{0};
  return path + "." + std::to_string(process_id()) + "-" + std::to_string(count++) + ".tmp";
}

}  // namespace

void read_range(Engine& engine, const std::string& path, uint64_t offset, uint64_t length, const Caller& caller) {
  move_range(engine, Direction::kRead, File::open_for_reading(path), offset, length, caller);
}

Moved read_many(Engine& engine, std::shared_ptr<FileTable> files, std::vector<Transfer> transfers, bool with_checksums,
                const Caller& caller) {
  return move(engine, Direction::kRead, std::move(files), std::move(transfers), with_checksums, caller);
}

std::shared_ptr<Group> group_of_reads(std::shared_ptr<FileTable> files, std::vector<Transfer> transfers,
                                      const Caller& caller) {
  return group_of(Direction::kRead, std::move(files), std::move(transfers), caller);
}

void write_range(Engine& engine, const std::string& path, uint64_t offset, uint64_t length, const Caller& caller) {
  const auto file = File::open_for_writing(path, /*create=*/true);
  move_range(engine, Direction::kWrite, file, offset, length, caller);
  sync_file(*file);
  sync_folder_of(path);
}

Output::Output(std::string path, uint64_t length) : path_(std::move(path)), temporary_(temporary_name(path_)) {
  file_ = File::open_for_writing(temporary_, /*create=*/true);
  try {
    preallocate(*file_, length);
  } catch (...) {
    std::remove(temporary_.c_str());
    throw;
  }
}

Output::~Output() {
  if (!committed_) std::remove(temporary_.c_str());
}

std::vector<uint32_t> Output::write(Engine& engine, std::vector<Transfer> transfers, bool with_checksums,
                                    const Caller& caller) {
  return move(engine, Direction::kWrite, std::make_shared<FileTable>(file_), std::move(transfers), with_checksums,
              caller)
      .checksums;
}

void Output::commit() {
  sync_file(*file_);
  replace(temporary_, path_);
  committed_ = true;
}

void write_whole(Engine& engine, const std::string& path, uint64_t length, const Caller& caller) {
  Output output(path, length);
  output.write(engine, {{0, 0, length, caller.memory}}, false, caller);
  output.commit();
}

}  // namespace gdsdata
