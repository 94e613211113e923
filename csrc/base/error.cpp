#include "base/error.h"

#include <cerrno>
#include <cstring>

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
    case EIO:
      return "; the device reported a failure, see the kernel's log";
    default:
      return "";
  }
}

}  // namespace

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
