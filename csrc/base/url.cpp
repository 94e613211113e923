#include "base/url.h"

#include <algorithm>

#include "base/ascii.h"

namespace gdsdata {

std::string origin_of(std::string_view url) {
  const size_t scheme = url.find("://");
  if (scheme == std::string_view::npos) return "";
  const size_t path = url.find_first_of("/?#", scheme + 3);
  std::string origin(url.substr(0, path));
  std::transform(origin.begin(), origin.end(), origin.begin(), lower);
  const bool is_http = origin.starts_with("http://");
  if (!is_http && !origin.starts_with("https://")) return "";
  const std::string_view own_port = is_http ? ":80" : ":443";
  if (origin.ends_with(own_port)) origin.resize(origin.size() - own_port.size());
  return origin;
}

std::string shown_url(std::string_view url) {
  if (origin_of(url).empty()) return std::string(url);
  url = url.substr(0, url.find_first_of("?#"));
  const size_t host = url.find("://") + 3;
  const std::string_view authority = url.substr(host, url.find('/', host) - host);
  const size_t user = authority.rfind('@');
  return std::string(url.substr(0, host)) +
         std::string(url.substr(user == std::string_view::npos ? host : host + user + 1));
}

}  // namespace gdsdata
