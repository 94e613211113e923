// Heads, bodies and URLs that were damaged at random: no answer is taken but the right range.
#include <algorithm>
#include <array>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "backend/http_head.h"
#include "backend/range_verdict.h"
#include "base/url.h"
#include "testing.h"

namespace gdsdata::testing {
namespace {

constexpr int kRounds = 30'000;
constexpr uint64_t kSize = 1000;
constexpr ObjectRange kAsked{100, 200};
constexpr std::string_view kTag = "\"v1\"";

const std::vector<std::string> kLines = {"HTTP/1.1 206 Partial Content\r\n",
                                         "Content-Range: bytes 100-199/1000\r\n",
                                         "Content-Length: 100\r\n",
                                         "ETag: \"v1\"\r\n",
                                         "Retry-After: 3\r\n",
                                         "x-amz-request-id: one\r\n",
                                         "Location: https://u:p@host/a?b\r\n",
                                         "\r\n"};
const std::vector<std::string> kTokens = {
    "18446744073709551615", "18446744073709551616", "-1",   "bytes */0", "*", "/", "-", ":", "\r", "\n",
    std::string(1, '\0'),   "HTTP/1.1 200",         "\xff", "://",       "@", "?"};

class Damage {
 public:
  std::string operator()(std::string text) {
    for (uint32_t changes = pick(4); changes > 0; --changes) {
      const size_t at = pick(text.size() + 1), length = std::min<size_t>(pick(8), text.size() - at);
      switch (pick(4)) {
        case 0:
          text.erase(at, length);
          break;
        case 1:
          text.insert(at, kTokens[pick(kTokens.size())]);
          break;
        case 2:
          text.insert(at, std::string(pick(3) == 0 ? 9000 : 2, static_cast<char>(pick(256))));
          break;
        default:
          if (at < text.size()) text[at] = static_cast<char>(pick(256));
      }
    }
    return text;
  }
  uint32_t pick(size_t below) { return static_cast<uint32_t>(dice_() % below); }

 private:
  std::mt19937 dice_{31};
};

TEST(HostileAnswers, AreTakenOnlyIfTheirRangeIsTheOneThatWasAskedFor) {
  Damage damage;
  size_t taken = 0, refused = 0;
  for (int round = 0; round < kRounds; ++round) {
    HttpHead head;
    for (const std::string& line : kLines) {
      if (damage.pick(8) != 0) head.add_line(damage.pick(3) == 0 ? damage(line) : line);
    }
    ASSERT_LE(head.headers.size(), HttpHead::kMostHeaders);
    const RemoteObject object{"https://host/a", kSize, object_version(kTag)};
    const auto range = head.content_range();
    ASSERT_TRUE(!range || range->first <= range->last);
    const Verdict verdict = judge_content(head, object, kAsked);
    if (verdict.action == Verdict::Action::kTake) {
      ++taken;
      ASSERT_TRUE(range ? range->first == kAsked.begin && range->last < kAsked.end
                        : head.content_length() == kAsked.length());
      ASSERT_TRUE(!range || range->last + 1 == kAsked.end || head.content_length() == range->last - range->first + 1);
      ASSERT_TRUE(head.version_tag().empty() || object_version(head.version_tag()) == object.version());
    } else {
      ++refused;
      ASSERT_FALSE(verdict.reason.empty());
    }
    const std::string body = damage("<Error><Code>SlowDown</Code><Message>Slower</Message></Error>");
    const Verdict refusal = judge_refusal(head, body);
    ASSERT_FALSE(refusal.reason.empty());
    ASSERT_LT(refusal.reason.size(), 2000u);
    ASSERT_TRUE(std::none_of(refusal.reason.begin(), refusal.reason.end(),
                             [](unsigned char sign) { return sign < 32 || sign == 127; }));
  }
  EXPECT_GT(taken, kRounds / 100u);
  EXPECT_GT(refused, kRounds / 4u);
}

TEST(HostileAnswers, LeadNowhereButToHttpAndShowNoSecretOfAUrl) {
  Damage damage;
  for (int round = 0; round < kRounds; ++round) {
    const std::string url = damage("https://user:sEcReT@host:443/a?sig=sEcReT#sEcReT");
    const std::string origin = origin_of(url);
    ASSERT_TRUE(origin.empty() || origin.starts_with("http://") || origin.starts_with("https://"));
    const Verdict verdict = judge_redirect("https://host/a", url, damage.pick(8));
    if (verdict.action == Verdict::Action::kTake) {
      ASSERT_TRUE(origin.starts_with("https://")) << url;
    }
    if (!origin.empty()) {
      ASSERT_EQ(shown_url(url).find_first_of("?#"), std::string::npos) << url;
    }
  }
}

}  // namespace
}  // namespace gdsdata::testing
