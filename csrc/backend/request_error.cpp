#include "backend/request_error.h"

#include <string>

#include "base/file.h"

namespace gdsdata {

Error truncated_error(const File& file, uint64_t offset, uint64_t length) {
  return {ErrorCode::kCorrupt,
          "'" + file.path() + "' ends at " + std::to_string(file.current_size_bytes()) + " bytes, before offset " +
              std::to_string(offset) + " + length " + std::to_string(length) +
              " that was to be read; it was truncated, or its index is of another file",
          file.path(), offset, length};
}

Error closed_error(const Request& request) {
  return {ErrorCode::kCorrupt,
          "could not open '" + request.file->path() + "' again (offset " + std::to_string(request.offset) +
              ", length " + std::to_string(request.length) +
              " bytes): it was replaced or removed since it was indexed, or the process has no descriptor left; "
              "iterate again to index it anew, or raise the limit of open files (ulimit -n)",
          request.file->path(), request.offset, request.length};
}

Error direct_refused_error(const Request& request) {
  Error error = request.file->why_not_direct();
  error.offset = request.offset;
  error.length = request.length;
  return error;
}

}  // namespace gdsdata
