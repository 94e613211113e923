#include "base/url.h"

#include <gtest/gtest.h>

#include "base/remote_object.h"

namespace gdsdata {
namespace {

TEST(Url, AnOriginIsSchemeHostAndPort) {
  EXPECT_EQ(origin_of("HTTP://Host:80/a/b"), "http://host");
  EXPECT_EQ(origin_of("https://host:443?x"), "https://host");
  EXPECT_EQ(origin_of("https://host:80"), "https://host:80");
  EXPECT_EQ(origin_of("http://[::1]:81/"), "http://[::1]:81");
  EXPECT_NE(origin_of("http://host@other/"), origin_of("http://host/"));
  EXPECT_NE(origin_of("http://host#@other/"), origin_of("http://other/"));
  for (const char* other : {"s3://bucket/key", "ftp://host/", "/a/path", ""}) EXPECT_EQ(origin_of(other), "") << other;
}

TEST(Url, NoSecretOfAUrlIsShown) {
  EXPECT_EQ(shown_url("https://user:word@host:81/a@b?sig=x#y"), "https://host:81/a@b");
  EXPECT_EQ(shown_url("http://host?sig=x"), "http://host");
  EXPECT_EQ(shown_url("s3://bucket/why?"), "s3://bucket/why?");
  EXPECT_EQ(shown_url("/a/path?"), "/a/path?");
}

TEST(Url, WordsOfAnAccessAreHidden) {
  const ObjectAccess access{"http://host/x?X-Amz-Expires=900&sig=ab%2Fcd%3Defgh&flag",
                            {"Authorization: Bearer the-token", "x-empty:", "Range: short"},
                            {}};
  const auto words = secret_words(access);
  EXPECT_EQ(without_words("Bearer the-token the-token ab/cd=efgh ab%2Fcd%3Defgh 900 short", words),
            "... ... ... ... 900 short");
  EXPECT_EQ(without_words("nothing", {}), "nothing");
}

}  // namespace
}  // namespace gdsdata
