#include "backend/curl_api.h"

#include <dlfcn.h>

#include <array>

namespace gdsdata {

namespace {

// Debian and its like name the builds for GnuTLS and NSS so.
constexpr std::array kFileNames = {"libcurl.so.4", "libcurl-gnutls.so.4", "libcurl-nss.so.4", "libcurl.so"};
constexpr long kGlobalAll = 3;

// Older ones keep a connection of CURLOPT_CONNECT_ONLY open after its handle has left.
constexpr unsigned kFirstThatCloses = 0x075500;  // 7.85.0

// The beginning of curl_version_info_data.
struct VersionInfo {
  int age;
  const char* version;
  unsigned number;
};

struct Loaded {
  CurlApi api{};
  std::string refusal;
};

template <typename Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

}  // namespace

// Returns why not, or nothing.
std::string CurlApi::load() {
  void* library = nullptr;
  for (const char* name : kFileNames) {
    library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) break;
  }
  if (library == nullptr) {
    return "URLs are read with libcurl, and none is installed; install it (apt-get install libcurl4, or dnf install "
           "libcurl)";
  }
  int (*global_init)(long) = nullptr;
  const VersionInfo* (*version_info)(int) = nullptr;
  const bool has_all =
      find(library, "curl_global_init", global_init) && find(library, "curl_easy_init", easy_init) &&
      find(library, "curl_easy_cleanup", easy_cleanup) && find(library, "curl_easy_reset", easy_reset) &&
      find(library, "curl_easy_setopt", easy_setopt) && find(library, "curl_easy_getinfo", easy_getinfo) &&
      find(library, "curl_easy_strerror", easy_strerror) && find(library, "curl_multi_init", multi_init) &&
      find(library, "curl_multi_cleanup", multi_cleanup) && find(library, "curl_multi_setopt", multi_setopt) &&
      find(library, "curl_multi_add_handle", multi_add_handle) &&
      find(library, "curl_multi_remove_handle", multi_remove_handle) &&
      find(library, "curl_multi_socket_action", multi_socket_action) &&
      find(library, "curl_multi_info_read", multi_info_read) && find(library, "curl_slist_append", slist_append) &&
      find(library, "curl_slist_free_all", slist_free_all) && find(library, "curl_version_info", version_info);
  if (!has_all) return "this machine's libcurl is older than 7.68; install a newer one to read URLs";
  closes_with_handle = version_info(0)->number >= kFirstThatCloses;
  if (global_init(kGlobalAll) != 0) return "libcurl's TLS library could not be initialized";
  return "";
}

namespace {

const Loaded& loaded() {
  static const Loaded* const once = [] {
    auto* made = new Loaded;
    made->refusal = made->api.load();
    return made;
  }();
  return *once;
}

}  // namespace

const CurlApi* CurlApi::get() { return loaded().refusal.empty() ? &loaded().api : nullptr; }

std::string CurlApi::refusal() { return loaded().refusal; }

}  // namespace gdsdata
