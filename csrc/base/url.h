// Parts of URLs.
#pragma once

#include <string>
#include <string_view>

namespace gdsdata {

// "scheme://host:port" of an http or https URL, in lower case and without the scheme's own port.
// Empty for anything else. A user and a password stay in it, so URLs that differ in them have
// different origins.
std::string origin_of(std::string_view url);

}  // namespace gdsdata
