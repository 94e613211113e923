#include "base/path_list.h"

#include <algorithm>

#include "base/error.h"

namespace gdsdata {

PathList::PathList(const std::vector<std::string>& paths) {
  for (const std::string& path : paths) {
    if (!ends_.empty()) joined_.push_back('\0');
    joined_ += path;
    ends_.push_back(joined_.size());
  }
}

PathList::PathList(std::string_view joined, size_t count) : joined_(joined) {
  ends_.reserve(count);
  for (size_t end = 0; count > 0 && end <= joined_.size(); ++end) {
    end = std::min(joined_.find('\0', end), joined_.size());
    ends_.push_back(end);
  }
  if (ends_.size() != count) {
    throw Failure({ErrorCode::kInvalidArgument, "a list of " + std::to_string(count) + " paths has " +
                                                    std::to_string(ends_.size()) + " between NULs"});
  }
}

std::string_view PathList::view(size_t index) const {
  const uint64_t begin = index == 0 ? 0 : ends_[index - 1] + 1;
  return std::string_view(joined_).substr(begin, ends_[index] - begin);
}

}  // namespace gdsdata
