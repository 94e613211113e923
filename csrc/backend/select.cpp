#include "backend/select.h"

#include "backend/faulty.h"

namespace gdsdata {

Selection select_backend(const std::string& asked, bool strict) {
  if (asked == "posix") return {"posix", ""};
  if (asked != "auto" && asked != "uring") {
    throw Failure({ErrorCode::kInvalidArgument, "no backend is called '" + asked + "'; there are auto, uring, posix"});
  }
  const std::string refusal = uring_refusal();
  if (refusal.empty()) return {"uring", ""};
  if (asked == "uring" || strict) throw Failure({ErrorCode::kUnavailable, refusal});
  return {"posix", refusal + "; using posix threads instead"};
}

std::unique_ptr<Backend> make_backend(const std::string& name, const BackendOptions& options, Device& device) {
  auto backend = name == "uring" ? make_uring_backend(options, device) : make_posix_backend(options, device);
  if (options.faults.empty()) return backend;
  return std::make_unique<FaultyBackend>(std::move(backend), FaultPlan::parse(options.faults));
}

}  // namespace gdsdata
