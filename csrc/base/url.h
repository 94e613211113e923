// Parts of URLs.
#pragma once

#include <string>
#include <string_view>

namespace gdsdata {

// "scheme://host:port" of an http or https URL, in lower case and without the scheme's own port.
// Empty for anything else. A user and a password stay in it, so URLs that differ in them have
// different origins.
std::string origin_of(std::string_view url);

// A URL as errors and files show it. One of http or https loses what may be a secret: its query,
// its fragment, and a user with a password. Keys of other schemes may have these characters.
std::string shown_url(std::string_view url);

}  // namespace gdsdata
