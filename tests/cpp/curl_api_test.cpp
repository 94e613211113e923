// The numbers that are used with libcurl are those of its header.
#include "backend/curl_api.h"

#include <cstddef>

#include "testing.h"

#if __has_include(<curl/curl.h>)
#include <curl/curl.h>
#define GDSDATA_HAS_CURL_HEADER 1
#endif

namespace gdsdata::testing {
namespace {

#ifdef GDSDATA_HAS_CURL_HEADER

TEST(CurlApi, OptionsAreThoseOfTheHeader) {
  EXPECT_EQ(int{CurlApi::kWriteData}, CURLOPT_WRITEDATA);
  EXPECT_EQ(int{CurlApi::kUrl}, CURLOPT_URL);
  EXPECT_EQ(int{CurlApi::kReadData}, CURLOPT_READDATA);
  EXPECT_EQ(int{CurlApi::kErrorBuffer}, CURLOPT_ERRORBUFFER);
  EXPECT_EQ(int{CurlApi::kHttpHeader}, CURLOPT_HTTPHEADER);
  EXPECT_EQ(int{CurlApi::kHeaderData}, CURLOPT_HEADERDATA);
  EXPECT_EQ(int{CurlApi::kCustomRequest}, CURLOPT_CUSTOMREQUEST);
  EXPECT_EQ(int{CurlApi::kCaInfo}, CURLOPT_CAINFO);
  EXPECT_EQ(int{CurlApi::kCaPath}, CURLOPT_CAPATH);
  EXPECT_EQ(int{CurlApi::kPrivate}, CURLOPT_PRIVATE);
  EXPECT_EQ(int{CurlApi::kOpenSocketData}, CURLOPT_OPENSOCKETDATA);
  EXPECT_EQ(int{CurlApi::kSeekData}, CURLOPT_SEEKDATA);
  EXPECT_EQ(int{CurlApi::kWriteFunction}, CURLOPT_WRITEFUNCTION);
  EXPECT_EQ(int{CurlApi::kReadFunction}, CURLOPT_READFUNCTION);
  EXPECT_EQ(int{CurlApi::kHeaderFunction}, CURLOPT_HEADERFUNCTION);
  EXPECT_EQ(int{CurlApi::kOpenSocketFunction}, CURLOPT_OPENSOCKETFUNCTION);
  EXPECT_EQ(int{CurlApi::kSeekFunction}, CURLOPT_SEEKFUNCTION);
  EXPECT_EQ(int{CurlApi::kUpload}, CURLOPT_UPLOAD);
  EXPECT_EQ(int{CurlApi::kNoBody}, CURLOPT_NOBODY);
  EXPECT_EQ(int{CurlApi::kFreshConnect}, CURLOPT_FRESH_CONNECT);
  EXPECT_EQ(int{CurlApi::kHttpVersion}, CURLOPT_HTTP_VERSION);
  EXPECT_EQ(int{CurlApi::kBufferSize}, CURLOPT_BUFFERSIZE);
  EXPECT_EQ(int{CurlApi::kNoSignal}, CURLOPT_NOSIGNAL);
  EXPECT_EQ(int{CurlApi::kConnectOnly}, CURLOPT_CONNECT_ONLY);
  EXPECT_EQ(int{CurlApi::kTimeoutMs}, CURLOPT_TIMEOUT_MS);
  EXPECT_EQ(int{CurlApi::kConnectTimeoutMs}, CURLOPT_CONNECTTIMEOUT_MS);
  EXPECT_EQ(int{CurlApi::kHttpContentDecoding}, CURLOPT_HTTP_CONTENT_DECODING);
  // Deprecated since 7.85, so the header's own name warns.
  EXPECT_EQ(int{CurlApi::kProtocols}, 181);
  EXPECT_EQ(int{CurlApi::kTcpKeepAlive}, CURLOPT_TCP_KEEPALIVE);
  EXPECT_EQ(int{CurlApi::kPathAsIs}, CURLOPT_PATH_AS_IS);
  EXPECT_EQ(int{CurlApi::kDnsShuffleAddresses}, CURLOPT_DNS_SHUFFLE_ADDRESSES);
  EXPECT_EQ(int{CurlApi::kUploadBufferSize}, CURLOPT_UPLOAD_BUFFERSIZE);
#if LIBCURL_VERSION_NUM >= 0x075700
  EXPECT_EQ(int{CurlApi::kQuickExit}, CURLOPT_QUICK_EXIT);
#endif
  EXPECT_EQ(int{CurlApi::kInFileSize}, CURLOPT_INFILESIZE_LARGE);
  EXPECT_EQ(int{CurlApi::kMaxConnects}, CURLMOPT_MAXCONNECTS);
  EXPECT_EQ(int{CurlApi::kSocketData}, CURLMOPT_SOCKETDATA);
  EXPECT_EQ(int{CurlApi::kTimerData}, CURLMOPT_TIMERDATA);
  EXPECT_EQ(int{CurlApi::kSocketFunction}, CURLMOPT_SOCKETFUNCTION);
  EXPECT_EQ(int{CurlApi::kTimerFunction}, CURLMOPT_TIMERFUNCTION);
  EXPECT_EQ(int{CurlApi::kWatchIn}, CURL_POLL_IN);
  EXPECT_EQ(int{CurlApi::kWatchOut}, CURL_POLL_OUT);
  EXPECT_EQ(int{CurlApi::kWatchIn} | int{CurlApi::kWatchOut}, CURL_POLL_INOUT);
  EXPECT_EQ(int{CurlApi::kForget}, CURL_POLL_REMOVE);
  EXPECT_EQ(int{CurlApi::kReadable}, CURL_CSELECT_IN);
  EXPECT_EQ(int{CurlApi::kWritable}, CURL_CSELECT_OUT);
  EXPECT_EQ(int{CurlApi::kFailed}, CURL_CSELECT_ERR);
  EXPECT_EQ(int{CurlApi::kNoSocket}, CURL_SOCKET_TIMEOUT);
  EXPECT_EQ(int{CurlApi::kConnectionsMade}, CURLINFO_NUM_CONNECTS);
  EXPECT_EQ(int{CurlApi::kPrivateData}, CURLINFO_PRIVATE);
  EXPECT_EQ(int{CurlApi::kRedirectUrl}, CURLINFO_REDIRECT_URL);
  EXPECT_EQ(int{CurlApi::kOsErrno}, CURLINFO_OS_ERRNO);
  EXPECT_EQ(int{CurlApi::kActiveSocket}, CURLINFO_ACTIVESOCKET);
}

TEST(CurlApi, CodesAndValuesAreThoseOfTheHeader) {
  EXPECT_EQ(int{CurlApi::kOk}, CURLE_OK);
  EXPECT_EQ(int{CurlApi::kUnsupportedProtocol}, CURLE_UNSUPPORTED_PROTOCOL);
  EXPECT_EQ(int{CurlApi::kMalformedUrl}, CURLE_URL_MALFORMAT);
  EXPECT_EQ(int{CurlApi::kNoProxyAddress}, CURLE_COULDNT_RESOLVE_PROXY);
  EXPECT_EQ(int{CurlApi::kNoAddress}, CURLE_COULDNT_RESOLVE_HOST);
  EXPECT_EQ(int{CurlApi::kNotConnected}, CURLE_COULDNT_CONNECT);
  EXPECT_EQ(int{CurlApi::kWeirdReply}, CURLE_WEIRD_SERVER_REPLY);
  EXPECT_EQ(int{CurlApi::kPartial}, CURLE_PARTIAL_FILE);
  EXPECT_EQ(int{CurlApi::kWriteError}, CURLE_WRITE_ERROR);
  EXPECT_EQ(int{CurlApi::kTimeout}, CURLE_OPERATION_TIMEDOUT);
  EXPECT_EQ(int{CurlApi::kTlsConnect}, CURLE_SSL_CONNECT_ERROR);
  EXPECT_EQ(int{CurlApi::kGotNothing}, CURLE_GOT_NOTHING);
  EXPECT_EQ(int{CurlApi::kSendError}, CURLE_SEND_ERROR);
  EXPECT_EQ(int{CurlApi::kReceiveError}, CURLE_RECV_ERROR);
  EXPECT_EQ(int{CurlApi::kBadOwnCertificate}, CURLE_SSL_CERTPROBLEM);
  EXPECT_EQ(int{CurlApi::kCertificateRefused}, CURLE_PEER_FAILED_VERIFICATION);
  EXPECT_EQ(int{CurlApi::kBadCertificateFile}, CURLE_SSL_CACERT_BADFILE);
  EXPECT_EQ(CurlApi::kHttp, CURLPROTO_HTTP);
  EXPECT_EQ(CurlApi::kHttps, CURLPROTO_HTTPS);
  EXPECT_EQ(CurlApi::kHttp11, CURL_HTTP_VERSION_1_1);
  EXPECT_EQ(CurlApi::kDone, CURLMSG_DONE);
  EXPECT_EQ(CurlApi::kErrorBytes, CURL_ERROR_SIZE);
}

TEST(CurlApi, AMessageHasTheLayoutOfTheHeaders) {
  EXPECT_EQ(sizeof(CurlApi::Message), sizeof(CURLMsg));
  EXPECT_EQ(offsetof(CurlApi::Message, easy), offsetof(CURLMsg, easy_handle));
  EXPECT_EQ(offsetof(CurlApi::Message, result), offsetof(CURLMsg, data.result));
}

TEST(CurlApi, AnAddressHasTheLayoutOfTheHeaders) {
  EXPECT_EQ(sizeof(CurlApi::Address), sizeof(curl_sockaddr));
  EXPECT_EQ(offsetof(CurlApi::Address, type), offsetof(curl_sockaddr, socktype));
  EXPECT_EQ(offsetof(CurlApi::Address, protocol), offsetof(curl_sockaddr, protocol));
}
#else
TEST(CurlApi, OptionsAreThoseOfTheHeader) { GTEST_SKIP() << "curl/curl.h is not installed (libcurl4-openssl-dev)"; }
#endif

TEST(CurlApi, ALibraryThatIsFoundHasNoRefusal) {
  if (CurlApi::get() != nullptr) {
    EXPECT_EQ(CurlApi::refusal(), "");
  } else {
    EXPECT_NE(CurlApi::refusal().find("install"), std::string::npos);
  }
}

}  // namespace
}  // namespace gdsdata::testing
