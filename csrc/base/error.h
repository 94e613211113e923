// An error as a value. It passes through completions and groups to the consumer, who gets the
// Python exception of the same meaning.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

namespace gdsdata {

enum class ErrorCode {
  kInvalidArgument,
  kNotFound,
  kUnavailable,
  kIo,
  kNotReplaceable,  // a file exists, and no new one can take its name
  kCorrupt,  // also if a file is shorter than its index says
  kDevice,
  kStalled,
  kClosed,
};

struct Error {
  ErrorCode code = ErrorCode::kIo;
  std::string message = {};  // the complete sentence for the user
  std::string path = {};
  uint64_t offset = 0;
  uint64_t length = 0;
  int system_errno = 0;
};

// An Error as an exception. Only constructors and blocking calls throw it; the data path returns
// Errors in completions.
class Failure : public std::exception {
 public:
  explicit Failure(Error error) : error_(std::move(error)) {}
  const char* what() const noexcept override { return error_.message.c_str(); }
  const Error& error() const noexcept { return error_; }

 private:
  Error error_;
};

// In a catch block: returns the exception as an Error. Never throws, even if no memory is left.
Error current_error() noexcept;

// Copies without throwing. If no memory is left for the text, the copy says that instead.
Error copy_of(const Error& error) noexcept;

// Returns an Error for a system call that failed. `operation` is a verb phrase: "open for reading",
// "read with O_DIRECT".
Error system_error(const std::string& operation, const std::string& path, int system_errno, uint64_t offset = 0,
                   uint64_t length = 0);

}  // namespace gdsdata
