#include "base/url.h"

#include <algorithm>
#include <vector>

#include "base/ascii.h"

namespace gdsdata {

namespace {

// The parameters of a signature. It is one if all of `needed` are there.
struct Signature {
  std::vector<std::string_view> needed, others;
};

// Sources: "Authenticating Requests: Using Query Parameters" (S3), "Signed URLs" (GCS), "Create a
// user delegation SAS", "Create a service SAS" and "Create an account SAS" (Azure), "Create a
// signed URL using a custom policy" (CloudFront).
const std::vector<Signature>& signatures() {
  static const std::vector<Signature> all{
      {{"X-Amz-Signature", "X-Amz-Credential", "X-Amz-Date"},
       {"X-Amz-Algorithm", "X-Amz-Expires", "X-Amz-SignedHeaders", "X-Amz-Security-Token", "X-Amz-Content-Sha256"}},
      {{"AWSAccessKeyId", "Signature", "Expires"}, {"x-amz-security-token"}},
      {{"X-Goog-Signature", "X-Goog-Credential", "X-Goog-Date"},
       {"X-Goog-Algorithm", "X-Goog-Expires", "X-Goog-SignedHeaders"}},
      {{"GoogleAccessId", "Signature", "Expires"}, {}},
      {{"sig", "sv", "se"},
       {"st", "sp", "sr", "ss", "srt", "si", "sip", "spr", "ses", "sdd", "skoid", "sktid", "skt", "ske", "sks", "skv",
        "saoid", "suoid", "scid"}},
      {{"sig", "sv", "si"}, {"sr", "sip", "spr"}},
      {{"Signature", "Key-Pair-Id", "Expires"}, {"Hash-Algorithm"}},
      {{"Signature", "Key-Pair-Id", "Policy"}, {"Expires", "Hash-Algorithm"}},
  };
  return all;
}

bool is_in(const std::vector<std::string_view>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

std::vector<std::string_view> parameters_of(std::string_view query) {
  std::vector<std::string_view> parameters;
  for (size_t begin = 0; begin <= query.size();) {
    const size_t end = std::min(query.find('&', begin), query.size());
    parameters.push_back(query.substr(begin, end - begin));
    begin = end + 1;
  }
  return parameters;
}

std::string_view name_of(std::string_view parameter) { return parameter.substr(0, parameter.find('=')); }

}  // namespace

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

std::string unsigned_url(std::string_view url) {
  const size_t fragment = std::min(url.find('#'), url.size());
  const size_t query = url.find('?');
  if (query >= fragment || origin_of(url).empty()) return std::string(url);
  std::vector<std::string_view> parameters = parameters_of(url.substr(query + 1, fragment - query - 1));
  const auto has = [&](std::string_view name) {
    return std::any_of(parameters.begin(), parameters.end(), [&](auto one) { return name_of(one) == name; });
  };
  const auto found = std::find_if(signatures().begin(), signatures().end(), [&](const Signature& one) {
    return std::all_of(one.needed.begin(), one.needed.end(), has);
  });
  if (found == signatures().end()) return std::string(url);
  std::string kept(url.substr(0, query));
  char separator = '?';
  for (const std::string_view parameter : parameters) {
    if (is_in(found->needed, name_of(parameter)) || is_in(found->others, name_of(parameter))) continue;
    kept += separator;
    kept += parameter;
    separator = '&';
  }
  return kept.append(url.substr(fragment));
}

}  // namespace gdsdata
