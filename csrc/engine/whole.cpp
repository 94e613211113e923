#include "engine/whole.h"

#include <utility>

#include "base/durable.h"

namespace gdsdata {

namespace {

std::shared_ptr<Group> group_of(Direction direction, std::shared_ptr<FileTable> files, std::vector<Transfer> transfers,
                                const Caller& caller) {
  GroupRequest request;
  request.files = std::move(files);
  request.direction = direction;
  request.transfers = std::move(transfers);
  request.priority = caller.priority;
  request.before = caller.before;
  return std::make_shared<Group>(std::move(request));
}

Moved move(Engine& engine, Direction direction, std::shared_ptr<FileTable> files, std::vector<Transfer> transfers,
           Conversion conversion, bool with_checksums, const Caller& caller) {
  const auto group = group_of(direction, std::move(files), std::move(transfers), caller);
  group->edit().conversion = conversion;
  group->edit().checksum = with_checksums ? Checksum::kCrc32 : Checksum::kNone;
  engine.run(group, caller.poll, caller.stall_timeout);
  return {with_checksums ? group->checksums() : std::vector<uint32_t>(), group->result().bytes};
}

void move_range(Engine& engine, Direction direction, std::shared_ptr<File> file, uint64_t offset, uint64_t length,
                const Caller& caller) {
  auto files = std::make_shared<FileTable>(std::move(file));
  move(engine, direction, std::move(files), {{0, offset, length, caller.memory}}, Conversion::kNone, false, caller);
}

}  // namespace

void read_range(Engine& engine, const std::string& path, uint64_t offset, uint64_t length, const Caller& caller) {
  move_range(engine, Direction::kRead, File::open_for_reading(path), offset, length, caller);
}

Moved read_many(Engine& engine, std::shared_ptr<FileTable> files, std::vector<Transfer> transfers,
                Conversion conversion, bool with_checksums, const Caller& caller) {
  return move(engine, Direction::kRead, std::move(files), std::move(transfers), conversion, with_checksums, caller);
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

Output::Output(int descriptor, const std::string& path, uint64_t length)
    : file_(File::open_again_for_writing(descriptor, path)) {
  set_size(*file_, length);
  preallocate(*file_, length);
}

std::vector<uint32_t> Output::write(Engine& engine, std::vector<Transfer> transfers, bool with_checksums,
                                    const Caller& caller) {
  return move(engine, Direction::kWrite, std::make_shared<FileTable>(file_), std::move(transfers), Conversion::kNone,
              with_checksums, caller)
      .checksums;
}

void write_whole(Engine& engine, const std::string& path, uint64_t length, const Caller& caller) {
  Output output(path, length);
  output.write(engine, {{0, 0, length, caller.memory}}, false, caller);
  output.commit();
}

}  // namespace gdsdata
