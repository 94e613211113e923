// Shared by the engine's tests: files with known bytes, random choices, and the thrown error.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace gdsdata::testing {

using Bytes = std::vector<std::byte>;

inline Bytes random_bytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// A temporary folder on a disk-backed file system (in TMPDIR), removed with the object.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "gdsdata-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) std::abort();
    path_ = name;
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  std::string write(const std::string& name, const Bytes& bytes) const {
    std::ofstream stream(file(name), std::ios::binary);
    stream.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    return file(name);
  }
  size_t entries() const { return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(path_), {})); }

 private:
  std::string path_;
};

// The files that this process has open.
inline size_t count_descriptors() {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {})) - 1;
}

// The limit of open files, as long as this lives.
class DescriptorLimit {
 public:
  explicit DescriptorLimit(size_t limit) {
    ::getrlimit(RLIMIT_NOFILE, &usual_);
    const rlimit now{limit, usual_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &now), 0);
  }
  ~DescriptorLimit() { ::setrlimit(RLIMIT_NOFILE, &usual_); }
  DescriptorLimit(const DescriptorLimit&) = delete;
  DescriptorLimit& operator=(const DescriptorLimit&) = delete;

 private:
  rlimit usual_{};
};

inline Bytes read_file(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(stream)), {});
  Bytes bytes(text.size());
  if (!text.empty()) std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

inline std::shared_ptr<FileTable> table_of(std::vector<std::string> paths) {
  return std::make_shared<FileTable>(std::move(paths), std::vector<FileIdentity>{});
}

// As many mappings of a file as this library makes at most, and one more.
inline std::vector<std::unique_ptr<Mapping>> take_mappings(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY));
  std::vector<std::unique_ptr<Mapping>> taken;
  while (Mapping::count() <= Mapping::most()) {
    taken.push_back(Mapping::make(file.get(), 1));
    if (taken.back() == nullptr) throw std::runtime_error("no mapping is left");
  }
  return taken;
}

// They take a moment and 10 MB by default. Some systems allow far more.
inline bool can_take_mappings() { return Mapping::most() <= 40'000; }

inline void drop_from_page_cache(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY);
  ::fsync(fd);
  ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  ::close(fd);
}

inline bool sleeps(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  const std::string stat(std::istreambuf_iterator<char>(file), {});
  return stat.substr(stat.rfind(')') + 2, 1) == "S";
}

// Returns the error that a call throws. Fails the test if it throws none.
template <typename Call>
Error error_of(Call call) {
  try {
    call();
  } catch (const Failure& failure) {
    return failure.error();
  }
  ADD_FAILURE() << "no Failure was thrown";
  return {};
}

}  // namespace gdsdata::testing
