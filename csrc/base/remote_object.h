// An object on a server: its name, its identity, and how it may be requested.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/condition.h"
#include "base/error.h"

namespace gdsdata {

// True for s3://, gs://, az://, http:// and https://, as gdsdata/storage/location.py has it.
bool is_url(std::string_view path);

// 63 bits that identify a version of an object. `tag` is an ETag as it is in a header or a listing,
// or the value of Last-Modified if the server has no ETags. A weak tag has the value of the strong
// one.
int64_t object_version(std::string_view tag);

// Everything a request for an object needs. Never shown to users: it may contain secrets.
struct ObjectAccess {
  std::string url;                   // percent-encoded, http or https
  std::vector<std::string> headers;  // "Name: value"
  std::chrono::steady_clock::time_point expires;
};

// The words of an access that no text may show, even if a server repeats them: values of its
// headers and its query, the longest ones first.
std::vector<std::string> secret_words(const ObjectAccess& access);
// Returns a text with "..." in the place of each word.
std::string without_words(std::string text, const std::vector<std::string>& words);

// Thread-safe.
class RemoteObject : public std::enable_shared_from_this<RemoteObject> {
 public:
  RemoteObject(std::string location, uint64_t size_bytes, int64_t version)
      : location_(std::move(location)), size_bytes_(size_bytes), version_(version) {}

  const std::string& location() const { return location_; }  // as users wrote it, for errors
  uint64_t size_bytes() const { return size_bytes_; }
  int64_t version() const { return version_; }
  bool has_version() const { return version_ != kAnyVersion; }
  // Returns false if the server has no tag. Another version of the same size then looks like this
  // one.
  bool has_tag() const { return has_version() && version_ != object_version(""); }
  static constexpr int64_t kAnyVersion = -1;

  // Returns an access that is still valid for some time. If there is none, returns null and
  // requests one. `use` is then called with it, or with the reason why there is none, on another
  // thread and perhaps at once. It must not block. If it throws std::bad_alloc, it is called again.
  using Use = std::function<void(std::shared_ptr<const ObjectAccess>, std::optional<Error>)>;
  std::shared_ptr<const ObjectAccess> access_or_request(Use use);
  // Forgets the access, because the server refused it. Does nothing if there is a newer one.
  void drop_access(const ObjectAccess* refused);
  // When the access was granted that the server refused before its end. Empty: it was not, or there
  // is a newer one.
  std::optional<std::chrono::steady_clock::time_point> refused_grant() const;

  // The answer to an AccessRequest.
  void grant(ObjectAccess access);
  void refuse(const Error& error);

  // The ETag of this version as a server sent it, for If-Match. Empty: not known.
  std::string etag() const;
  void set_etag(std::string_view etag);

  // Where a redirect of this access led, so that not each range asks for it: the Hugging Face Hub
  // counts them. Empty: nowhere, or it is too old.
  std::string redirect() const;
  void keep_redirect(std::string url);
  // Forgets it if it led to `url`, because a request there was refused, or failed otherwise.
  void drop_redirect(std::string_view url, bool is_refused);

 private:
  void answer(const std::shared_ptr<const ObjectAccess>& access, const std::optional<Error>& error);

  const std::string location_;
  const uint64_t size_bytes_;
  const int64_t version_;
  mutable std::mutex mutex_;  // guards the members that follow
  std::shared_ptr<const ObjectAccess> access_;
  std::vector<Use> waiting_;  // for an answer; not empty: it was asked for
  std::string etag_;
  std::chrono::steady_clock::time_point granted_;  // access_, or the one before
  bool is_refused_ = false;
  std::string redirect_;
  std::chrono::steady_clock::time_point redirect_ends_;
  unsigned redirects_refused_ = 0;
};

// Objects whose access somebody waits for. A thread of Python takes them and answers.
class AccessDesk {
 public:
  // Each ends with grant or refuse.
  void ask(std::shared_ptr<RemoteObject> object);
  // Waits for objects up to `timeout`. Returns at most `most`.
  std::vector<std::shared_ptr<RemoteObject>> take(size_t most, std::chrono::milliseconds timeout);

 private:
  std::mutex mutex_;
  Condition asked_;
  std::deque<std::shared_ptr<RemoteObject>> objects_;
};

AccessDesk& access_desk();  // of this process

}  // namespace gdsdata
