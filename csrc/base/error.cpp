#include "base/error.h"

#include <cerrno>
#include <cstring>
#include <new>

namespace gdsdata {

namespace {

ErrorCode code_of(int system_errno) { return system_errno == ENOENT ? ErrorCode::kNotFound : ErrorCode::kIo; }

const char* remedy(int system_errno) {
  switch (system_errno) {
    case ENOENT:
      return "; was it, or its folder, moved or deleted?";
    case EACCES:
    case EPERM:
      return "; check the permissions of the file and its folders";
    case EMFILE:
      return "; raise the limit of open files (ulimit -n)";
    case ENOSPC:
      return "; free space on the file system or choose another";
    case EDQUOT:
      return "; free space of this user or project, or have the quota raised";
    case EFBIG:
      return "; raise the limit of file sizes (ulimit -f), or choose a file system that has such long files";
    case EROFS:
      return "; choose another file system, or mount this one for writing";
    case EIO:
      return "; the device reported a failure, see the kernel's log";
    case ECANCELED:  // io_uring gives requests to a thread of the kernel, which counts as the user's
      return "; the kernel could not start a thread for it: raise the limit of processes (ulimit -u, or pids.max of "
             "the container), or choose backend=\"posix\"";
    default:
      return "";
  }
}

Error translate_current() {
  try {
    throw;
  } catch (const Failure& failure) {
    return failure.error();
  } catch (const std::bad_alloc&) {
    return {ErrorCode::kDevice,
            "no memory is left for a read or write; use a smaller batch_size, prefetch or bounce_bytes"};
  } catch (const std::exception& exception) {
    return {ErrorCode::kIo, std::string("a read or write failed inside the engine: ") + exception.what()};
  } catch (...) {
    return {ErrorCode::kIo, "a read or write failed inside the engine, which does not know why"};
  }
}

}  // namespace

Error current_error() noexcept {
  try {
    return translate_current();
  } catch (...) {
    Error error;
    error.code = ErrorCode::kDevice;
    error.message = "no memory left";  // short enough to need no allocation
    return error;
  }
}

Error copy_of(const Error& error) noexcept {
  try {
    return error;
  } catch (...) {
    return current_error();
  }
}

Error system_error(const std::string& operation, const std::string& path, int system_errno, uint64_t offset,
                   uint64_t length) {
  Error error{code_of(system_errno), "", path, offset, length, system_errno};
  error.message = "could not " + operation + " '" + path + "'";
  if (length != 0) {
    error.message += " (offset " + std::to_string(offset) + ", length " + std::to_string(length) + " bytes)";
  }
  error.message += std::string(": ") + std::strerror(system_errno) + remedy(system_errno);
  return error;
}

}  // namespace gdsdata
