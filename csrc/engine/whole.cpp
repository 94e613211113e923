#include "engine/whole.h"

#include <atomic>
#include <cstdio>
#include <utility>

namespace gdsdata {

namespace {

void transfer(Engine& engine, Direction direction, std::shared_ptr<File> file, uint64_t offset, uint64_t length,
              const Caller& caller) {
  auto group = std::make_shared<Group>();
  group->files = std::make_shared<FileTable>(std::move(file));
  group->direction = direction;
  group->priority = caller.priority;
  group->before = caller.before;
  group->transfers.push_back({0, offset, length, caller.memory});
  engine.run(group, caller.poll);
}

// Beside its target, because a rename works within one file system only.
std::string temporary_name(const std::string& path) {
  static std::atomic<uint64_t> count{0};
  return path + "." + std::to_string(process_id()) + "-" + std::to_string(count++) + ".tmp";
}

}  // namespace

void read_range(Engine& engine, const std::string& path, uint64_t offset, uint64_t length, const Caller& caller) {
  transfer(engine, Direction::kRead, File::open_for_reading(path), offset, length, caller);
}

std::vector<uint32_t> read_many(Engine& engine, std::shared_ptr<FileTable> files, std::vector<Transfer> transfers,
                                bool with_checksums, const Caller& caller) {
  auto group = std::make_shared<Group>();
  group->files = std::move(files);
  group->transfers = std::move(transfers);
  group->with_checksums = with_checksums;
  group->priority = caller.priority;
  group->before = caller.before;
  engine.run(group, caller.poll);
  return with_checksums ? group->checksums() : std::vector<uint32_t>();
}

void write_range(Engine& engine, const std::string& path, uint64_t offset, uint64_t length, const Caller& caller) {
  const auto file = File::open_for_writing(path, /*create=*/true);
  transfer(engine, Direction::kWrite, file, offset, length, caller);
  sync_file(*file);
  sync_folder_of(path);
}

void write_whole(Engine& engine, const std::string& path, uint64_t length, const Caller& caller) {
  const std::string temporary = temporary_name(path);
  try {
    const auto file = File::open_for_writing(temporary, /*create=*/true);
    preallocate(*file, length);  // no space is an error before the first byte
    transfer(engine, Direction::kWrite, file, 0, length, caller);
    sync_file(*file);
    replace(temporary, path);
  } catch (...) {
    std::remove(temporary.c_str());
    throw;
  }
}

}  // namespace gdsdata
