// What went wrong, as a value that travels: through completions and groups to the consumer, who
// gets it as the Python exception of the same meaning.
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
  kNotReplaceable,  // a file is there, and no new one can take its name
  kCorrupt,  // also: a file shorter than its index says
  kDevice,
  kStalled,
  kClosed,
};

struct Error {
  ErrorCode code = ErrorCode::kIo;
  std::string message = {};  // the whole sentence a user reads
  std::string path = {};
  uint64_t offset = 0;
  uint64_t length = 0;
  int system_errno = 0;
};

// The form an Error takes while it unwinds the stack. Only constructors and blocking calls throw
// it; the data path returns Errors in completions.
class Failure : public std::exception {
 public:
  explicit Failure(Error error) : error_(std::move(error)) {}
  const char* what() const noexcept override { return error_.message.c_str(); }
  const Error& error() const noexcept { return error_; }

 private:
  Error error_;
};

// In a catch block: what was caught, as an Error. Never throws, not even without memory.
Error current_error() noexcept;

// A copy that never throws: without memory for its text, an Error that says so.
Error copy_of(const Error& error) noexcept;

// An Error for a refused system call. `operation` is a verb phrase: "open for reading", "read with
// O_DIRECT".
Error system_error(const std::string& operation, const std::string& path, int system_errno, uint64_t offset = 0,
                   uint64_t length = 0);

}  // namespace gdsdata
