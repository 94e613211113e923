#include "base/pickle.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace gdsdata {

namespace {

// The argument that follows an instruction. `size` is the number of its bytes (kFixed), of the
// bytes of a count that precedes the data (kCounted), or of its lines (kLines).
enum class Kind : uint8_t { kNone, kFixed, kCounted, kLines };
struct Argument {
  Kind kind = Kind::kNone;
  uint8_t size = 0;
};

constexpr std::array<Argument, 256> arguments() {
  std::array<Argument, 256> found{};
  const auto say = [&](std::string_view codes, Kind kind, uint8_t size) {
    for (const char code : codes) found[static_cast<uint8_t>(code)] = {kind, size};
  };
  say("(012NQR]abdelostu})\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x97\x98", Kind::kFixed, 0);
  say("Khq\x80\x82", Kind::kFixed, 1);
  say("M\x83", Kind::kFixed, 2);
  say("Jjr\x84", Kind::kFixed, 4);
  say("G\x95", Kind::kFixed, 8);
  say("CU\x8a\x8c", Kind::kCounted, 1);
  say("BTX\x8b", Kind::kCounted, 4);
  say("\x8d\x8e\x96", Kind::kCounted, 8);
  say("FILSVPgp", Kind::kLines, 1);
  say("ic", Kind::kLines, 2);
  return found;
}
constexpr std::array<Argument, 256> kArguments = arguments();
constexpr uint8_t kPut = 'p', kLongPut = 'r';

uint64_t little_endian(std::span<const uint8_t> bytes) {
  uint64_t value = 0;
  for (size_t i = bytes.size(); i > 0; --i) value = value << 8 | bytes[i - 1];
  return value;
}

size_t digits(uint64_t value) { return value < 10 ? 1 : 1 + digits(value / 10); }

}  // namespace

bool pickle_claims_too_much(std::span<const uint8_t> pickle) {
  auto rest = pickle;
  while (!rest.empty()) {
    const uint8_t code = rest.front();
    const auto [kind, size] = kArguments[code];
    rest = rest.subspan(1);
    if (kind == Kind::kNone) return false;  // the pickle ends here, or this is none
    if (kind == Kind::kLines) {
      for (uint8_t line = 0; line < size; ++line) {
        const auto end = std::find(rest.begin(), rest.end(), '\n');
        if (end == rest.end()) return false;
        const auto length = static_cast<size_t>(end - rest.begin());
        if (code == kPut && length > digits(pickle.size())) return true;
        rest = rest.subspan(length + 1);
      }
      continue;
    }
    const bool cut = rest.size() < size;
    if (cut && kind == Kind::kFixed) return false;
    const uint64_t value = cut ? pickle.size() : little_endian(rest.first(size));
    if (code == kLongPut && value > pickle.size()) return true;
    if (!cut) rest = rest.subspan(size);
    if (kind == Kind::kCounted) {
      if (value > rest.size()) return true;
      rest = rest.subspan(value);
    }
  }
  return false;
}

}  // namespace gdsdata
