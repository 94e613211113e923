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

// An http or https URL without the parameters of its query that sign it. Others stay, in their
// order, and so does everything if a signature lacks a part. URLs that differ in this name other
// objects, and those that do not name the same one: its ETag says which version.
//
// Signatures are those of S3 (also version 2), GCS, Azure and CloudFront, which the Hugging Face
// Hub has too.
std::string unsigned_url(std::string_view url);

}  // namespace gdsdata
