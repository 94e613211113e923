// The paths of many files, in one block of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gdsdata {

// A million strings of their own would take 40 bytes each beside their characters.
class PathList {
 public:
  PathList() = default;
  explicit PathList(const std::vector<std::string>& paths);
  // `joined` contains a NUL between each two paths. Throws Failure if it has another count.
  PathList(std::string_view joined, size_t count);

  size_t size() const { return ends_.size(); }
  std::string operator[](size_t index) const { return std::string(view(index)); }
  std::string_view view(size_t index) const;

 private:
  std::string joined_;
  std::vector<uint64_t> ends_;  // of each path in `joined_`
};

}  // namespace gdsdata
