#include "base/remote_object.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <new>
#include <thread>
#include <utility>

#include "base/per_process.h"

namespace gdsdata {

namespace {

// An access that expires within this time is not used for a new request.
constexpr std::chrono::seconds kAccessMargin{60};

// A redirect is used again for so long. Signed URLs of the Hugging Face Hub live for an hour.
constexpr std::chrono::seconds kRedirectLife{300};
// After so many that were refused, redirects of an object are taken to serve one request each.
constexpr unsigned kMostRedirectsRefused = 3;

constexpr std::array<std::string_view, 5> kSchemes = {"s3://", "gs://", "az://", "http://", "https://"};

// Shorter words, such as a number of seconds, are parts of other ones.
constexpr size_t kLeastHidden = 8;

std::string percent_decoded(std::string_view text) {
  std::string decoded;
  for (size_t i = 0; i < text.size(); ++i) {
    unsigned code = 0;
    const char* const digits = text.data() + i + 1;
    if (text[i] == '%' && i + 2 < text.size() && std::from_chars(digits, digits + 2, code, 16).ptr == digits + 2) {
      decoded += static_cast<char>(code);
      i += 2;
    } else {
      decoded += text[i];
    }
  }
  return decoded;
}

// If there is no memory, tries again, because nobody else answers.
void answer_one(const RemoteObject::Use& use, const std::shared_ptr<const ObjectAccess>& access,
                const std::optional<Error>& error) {
  constexpr std::chrono::milliseconds kPause{1};
  while (true) {
    try {
      return use(access, error);
    } catch (const std::bad_alloc&) {
      std::this_thread::sleep_for(kPause);
    }
  }
}

}  // namespace

std::vector<std::string> secret_words(const ObjectAccess& access) {
  std::vector<std::string> words;
  const auto add = [&](std::string word) {
    if (word.size() >= kLeastHidden) words.push_back(std::move(word));
  };
  for (const std::string_view line : access.headers) {
    const size_t begin = line.find_first_not_of(' ', line.find(':') + 1);
    if (begin == std::string_view::npos) continue;
    const std::string_view value = line.substr(begin);
    add(std::string(value));
    add(std::string(value.substr(value.rfind(' ') + 1)));  // of "Bearer TOKEN", the token
  }
  const size_t query = std::min(access.url.find('?'), access.url.size());
  for (size_t begin = query; begin < access.url.size();) {
    const size_t end = std::min(access.url.find('&', begin), access.url.size());
    const std::string_view pair = std::string_view(access.url).substr(begin, end - begin);
    const std::string_view value = pair.substr(std::min(pair.find('='), pair.size() - 1) + 1);
    add(std::string(value));
    add(percent_decoded(value));
    begin = end + 1;
  }
  std::sort(words.begin(), words.end(), [](const auto& a, const auto& b) { return a.size() > b.size(); });
  return words;
}

std::string without_words(std::string text, const std::vector<std::string>& words) {
  constexpr std::string_view kShown = "...";
  for (const std::string& word : words) {
    for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + kShown.size())) {
      text.replace(at, word.size(), kShown);
    }
  }
  return text;
}

bool is_url(std::string_view path) {
  if (path.starts_with('/')) return false;  // as nearly all paths do
  return std::any_of(kSchemes.begin(), kSchemes.end(),
                     [&](std::string_view scheme) { return path.starts_with(scheme); });
}

// FNV-1a, 64 bits (G. Fowler, L. C. Noll, K.-P. Vo), without its sign.
int64_t object_version(std::string_view tag) {
  if (tag.starts_with("W/")) tag.remove_prefix(2);
  if (tag.size() >= 2 && tag.front() == '"' && tag.back() == '"') tag = tag.substr(1, tag.size() - 2);
  uint64_t hash = 0xcbf29ce484222325;
  for (const char character : tag) hash = (hash ^ static_cast<unsigned char>(character)) * 0x100000001b3;
  return static_cast<int64_t>(hash >> 1);
}

std::shared_ptr<const ObjectAccess> RemoteObject::access_or_request(Use use) {
  {
    std::lock_guard lock(mutex_);
    if (access_ != nullptr && access_->expires > std::chrono::steady_clock::now() + kAccessMargin) return access_;
    waiting_.push_back(std::move(use));
    if (waiting_.size() > 1) return nullptr;  // it was asked for already
  }
  try {
    access_desk().ask(shared_from_this());
  } catch (...) {
    refuse(current_error());  // no memory: nobody will answer
  }
  return nullptr;
}

void RemoteObject::drop_access(const ObjectAccess* refused) {
  std::lock_guard lock(mutex_);
  if (refused == nullptr || access_.get() != refused) return;
  is_refused_ = access_->expires > std::chrono::steady_clock::now();
  access_ = nullptr;
}

std::optional<std::chrono::steady_clock::time_point> RemoteObject::refused_grant() const {
  std::lock_guard lock(mutex_);
  return is_refused_ ? std::optional(granted_) : std::nullopt;
}

void RemoteObject::grant(ObjectAccess access) {
  auto granted = std::make_shared<const ObjectAccess>(std::move(access));
  {
    std::lock_guard lock(mutex_);
    access_ = granted;
    granted_ = std::chrono::steady_clock::now();
    is_refused_ = false;
    redirect_.clear();
  }
  answer(granted, std::nullopt);
}

void RemoteObject::refuse(const Error& error) { answer(nullptr, error); }

void RemoteObject::answer(const std::shared_ptr<const ObjectAccess>& access, const std::optional<Error>& error) {
  std::vector<Use> waiting;
  {
    std::lock_guard lock(mutex_);
    waiting.swap(waiting_);
  }
  for (const Use& use : waiting) answer_one(use, access, error);
}

std::string RemoteObject::etag() const {
  std::lock_guard lock(mutex_);
  return etag_;
}

void RemoteObject::set_etag(std::string_view etag) {
  std::lock_guard lock(mutex_);
  if (etag_.empty()) etag_ = etag;
}

std::string RemoteObject::redirect() const {
  std::lock_guard lock(mutex_);
  return redirect_.empty() || std::chrono::steady_clock::now() >= redirect_ends_ ? std::string() : redirect_;
}

void RemoteObject::keep_redirect(std::string url) {
  std::lock_guard lock(mutex_);
  if (redirects_refused_ >= kMostRedirectsRefused) return;
  redirect_ = std::move(url);
  redirect_ends_ = std::chrono::steady_clock::now() + kRedirectLife;
}

void RemoteObject::drop_redirect(std::string_view url, bool is_refused) {
  std::lock_guard lock(mutex_);
  if (redirect_.empty() || redirect_ != url) return;  // another range has dropped it, or has a newer one
  if (is_refused) ++redirects_refused_;
  redirect_.clear();
}

void AccessDesk::ask(std::shared_ptr<RemoteObject> object) {
  {
    std::lock_guard lock(mutex_);
    objects_.push_back(std::move(object));
  }
  asked_.notify_one();
}

std::vector<std::shared_ptr<RemoteObject>> AccessDesk::take(size_t most, std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  asked_.wait_for(lock, timeout, [this] { return !objects_.empty(); });
  std::vector<std::shared_ptr<RemoteObject>> taken;
  while (taken.size() < most && !objects_.empty()) {
    taken.push_back(std::move(objects_.front()));
    objects_.pop_front();
  }
  return taken;
}

AccessDesk& access_desk() { return of_this_process<AccessDesk>(); }

}  // namespace gdsdata
