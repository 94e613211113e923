#include "base/fallbacks.h"

#include <algorithm>
#include <mutex>

namespace gdsdata {

namespace {

constexpr size_t kMostNoted = 16;

struct Notes {
  std::mutex mutex;
  std::vector<std::string> lines;
};

Notes& notes() {
  static auto* instance = new Notes;  // never destroyed: workers may outlive static destructors
  return *instance;
}

}  // namespace

void note_fallback(const std::string& what_and_why) {
  std::lock_guard lock(notes().mutex);
  auto& lines = notes().lines;
  if (lines.size() < kMostNoted && std::find(lines.begin(), lines.end(), what_and_why) == lines.end()) {
    lines.push_back(what_and_why);
  }
}

std::vector<std::string> noted_fallbacks() {
  std::lock_guard lock(notes().mutex);
  return notes().lines;
}

}  // namespace gdsdata
