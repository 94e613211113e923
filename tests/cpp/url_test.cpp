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

TEST(Url, ASignatureIsNoPartOfAName) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"?X-Amz-Algorithm=A&X-Amz-Credential=k%2F1&X-Amz-Date=d&X-Amz-Expires=9&X-Amz-SignedHeaders=host&"
       "X-Amz-Security-Token=t&X-Amz-Signature=s",
       ""},
      {"?versionId=7&X-Amz-Credential=k&X-Amz-Date=d&X-Amz-Signature=s&x-id=GetObject", "?versionId=7&x-id=GetObject"},
      {"?AWSAccessKeyId=k&Signature=s&Expires=9", ""},
      {"?generation=3&X-Goog-Credential=k&X-Goog-Date=d&X-Goog-Expires=9&X-Goog-Signature=s", "?generation=3"},
      {"?GoogleAccessId=k&Expires=9&Signature=s", ""},
      {"?snapshot=1&sv=2021&st=a&se=b&sr=b&sp=r&sig=s", "?snapshot=1"},
      {"?sv=2021&si=policy&sr=c&sig=s&rsct=text", "?rsct=text"},
      {"?Expires=9&Signature=s&Key-Pair-Id=k&id=2", "?id=2"},
      {"?Policy=p&Signature=s&Key-Pair-Id=k#part", "#part"},
  };
  for (const auto& [query, left] : cases) {
    EXPECT_EQ(unsigned_url("https://host/a%20b" + query), "https://host/a%20b" + left) << query;
  }
}

TEST(Url, AQueryThatIsNoWholeSignatureStaysInTheName) {
  for (const char* query :
       {"?id=2", "?", "?versionId=7", "?sig=s", "?sv=1&se=2", "?Expires=9", "?Signature=s&Expires=9",
        "?X-Amz-Signature=s", "?X-Amz-Date=d&X-Amz-Credential=k", "?x-amz-signature=s&x-amz-credential=k&x-amz-date=d",
        "?a=X-Amz-Signature&b=X-Amz-Credential&c=X-Amz-Date", "#?sig=s&sv=1&se=2"}) {
    const std::string url = std::string("https://host/key") + query;
    EXPECT_EQ(unsigned_url(url), url);
  }
  EXPECT_EQ(unsigned_url("s3://bucket/why?sig=s&sv=1&se=2"), "s3://bucket/why?sig=s&sv=1&se=2");
  EXPECT_EQ(unsigned_url("/a/path?sig=s&sv=1&se=2"), "/a/path?sig=s&sv=1&se=2");
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
