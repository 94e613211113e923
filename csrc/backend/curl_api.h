// libcurl, found at run time. Only curl_api.cpp knows its file names, and nothing of it is loaded
// before the first call of get(). 7.68 or later has everything that is used.
//
// Source: libcurl's manual pages; numbers as in curl/curl.h, whose ABI has not changed since 7.16.
// tests/cpp/curl_api_test.cpp compares them with the header, where there is one.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>

namespace gdsdata {

struct CurlApi {
  using Easy = void*;
  using Multi = void*;
  struct List;  // curl_slist

  enum Option : int {
    kWriteData = 10001,
    kUrl = 10002,
    kReadData = 10009,
    kErrorBuffer = 10010,
    kHttpHeader = 10023,
    kHeaderData = 10029,
    kCustomRequest = 10036,
    kCaInfo = 10065,
    kCaPath = 10097,
    kPrivate = 10103,
    kOpenSocketData = 10164,
    kSeekData = 10168,
    kWriteFunction = 20011,
    kReadFunction = 20012,
    kHeaderFunction = 20079,
    kOpenSocketFunction = 20163,
    kSeekFunction = 20167,
    kUpload = 46,
    kNoBody = 44,
    kFreshConnect = 74,
    kHttpVersion = 84,
    kBufferSize = 98,
    kNoSignal = 99,
    kConnectOnly = 141,
    kTimeoutMs = 155,
    kConnectTimeoutMs = 156,
    kHttpContentDecoding = 158,
    kProtocols = 181,
    kTcpKeepAlive = 213,
    kPathAsIs = 234,
    kDnsShuffleAddresses = 275,
    kUploadBufferSize = 280,
    kQuickExit = 322,
    kInFileSize = 30115,
  };
  enum MultiOption : int {
    kMaxConnects = 6,
    kSocketData = 10002,
    kTimerData = 10005,
    kSocketFunction = 20001,
    kTimerFunction = 20004,
  };
  // Arguments of kSocketFunction: events to watch a socket for.
  enum Watch : int { kWatchIn = 1, kWatchOut = 2, kForget = 4 };
  // Arguments of multi_socket_action: events that a socket has.
  enum Event : int { kReadable = 1, kWritable = 2, kFailed = 4 };
  static constexpr int kNoSocket = -1;  // the time that kTimerFunction asked for has come
  enum Info : int {
    kConnectionsMade = 0x20001a,
    kPrivateData = 0x100015,
    kRedirectUrl = 0x10001f,
    kOsErrno = 0x200019,
    kActiveSocket = 0x50002c,
  };
  // Results of a transfer that the client, judge_failure or their tests name.
  enum Code : int {
    kOk = 0,
    kUnsupportedProtocol = 1,
    kMalformedUrl = 3,
    kNoProxyAddress = 5,
    kNoAddress = 6,
    kNotConnected = 7,
    kWeirdReply = 8,
    kPartial = 18,
    kWriteError = 23,
    kTimeout = 28,
    kTlsConnect = 35,
    kGotNothing = 52,
    kSendError = 55,
    kReceiveError = 56,
    kBadOwnCertificate = 58,
    kCertificateRefused = 60,
    kBadCertificateFile = 77,
  };
  static constexpr long kHttp = 1, kHttps = 2;    // bits of kProtocols
  static constexpr long kHttp11 = 2;              // a value of kHttpVersion
  static constexpr int kDone = 1;                 // Message::what
  static constexpr size_t kErrorBytes = 256;      // of kErrorBuffer

  struct Address {  // curl_sockaddr, an argument of kOpenSocketFunction
    int family;
    int type;
    int protocol;
    unsigned length;
    sockaddr address;
  };

  struct Message {  // CURLMsg
    int what;
    Easy easy;
    union {
      void* whatever;
      int result;
    };
  };

  // Null if there is no libcurl, or one that is too old: see `refusal`. Thread-safe.
  static const CurlApi* get();
  static std::string refusal();  // with a remedy; empty if there is one

  Easy (*easy_init)();
  void (*easy_cleanup)(Easy);
  void (*easy_reset)(Easy);
  int (*easy_setopt)(Easy, int, ...);
  int (*easy_getinfo)(Easy, int, ...);
  const char* (*easy_strerror)(int);
  Multi (*multi_init)();
  int (*multi_cleanup)(Multi);
  int (*multi_setopt)(Multi, int, ...);
  int (*multi_add_handle)(Multi, Easy);
  int (*multi_remove_handle)(Multi, Easy);
  int (*multi_socket_action)(Multi, int, int, int*);
  Message* (*multi_info_read)(Multi, int*);
  List* (*slist_append)(List*, const char*);
  void (*slist_free_all)(List*);
  // A connection that libcurl opened (kConnectOnly) is closed when its handle is removed: from 7.85
  // on.
  bool closes_with_handle = false;

  std::string load();  // for `get`; returns why it failed
};

}  // namespace gdsdata
