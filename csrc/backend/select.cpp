#include "backend/select.h"

#include <thread>

#include "backend/cufile_memory.h"
#include "backend/faulty.h"
#include "backend/remote.h"

namespace gdsdata {

Selection select_backend(const std::string& asked, const BackendOptions& options, const Device& device) {
  if (asked == "posix") return {"posix", "", ""};
  if (asked != "auto" && asked != "uring" && asked != "cufile") {
    throw Failure(
        {ErrorCode::kInvalidArgument, "no backend is called '" + asked + "'; there are auto, uring, posix, cufile"});
  }
  Selection selection;
  if (asked == "cufile") {
    if (options.direct == DirectMode::kNever) {
      throw Failure({ErrorCode::kInvalidArgument,
                     "backend=\"cufile\" goes past the page cache, and direct=\"never\" through it: choose one"});
    }
    const std::string refusal = cufile_refusal(device);
    if (!refusal.empty()) throw Failure({ErrorCode::kUnavailable, refusal});
    selection.device_backend = "cufile";
  }
  const std::string refusal = uring_refusal();
  if (refusal.empty()) {
    selection.name = "uring";
    return selection;
  }
  if (asked == "uring" || options.strict) throw Failure({ErrorCode::kUnavailable, refusal});
  selection.name = "posix";
  selection.reason = refusal + "; using posix threads instead";
  return selection;
}

std::shared_ptr<void> announce_memory(const std::string& backend, const std::shared_ptr<Device>& device,
                                      std::span<std::byte> memory) {
  if (backend != "cufile") return nullptr;
  // On separate threads, because the caller's current device may be another one.
  std::shared_ptr<void> known;
  std::thread([&] {
    try {
      device->bind_thread();
      known = register_cufile_memory(memory);
    } catch (const Failure&) {  // unregistered memory works too
    }
  }).join();
  if (known == nullptr) return nullptr;
  return {known.get(), [device, owner = known](void*) mutable {
            std::thread([&] {
              try {
                device->bind_thread();
              } catch (const Failure&) {
              }
              owner.reset();
            }).join();
          }};
}

std::unique_ptr<Backend> make_backend(const std::string& name, const BackendOptions& options, Device& device) {
  auto backend = name == "uring"    ? make_uring_backend(options)
                 : name == "cufile" ? make_cufile_backend(options, device)
                                    : make_posix_backend(options);
  if (!options.faults.empty()) {
    backend = std::make_unique<FaultyBackend>(std::move(backend), FaultPlan::parse(options.faults));
  }
  return name == "cufile" ? std::move(backend) : make_remote_backend(std::move(backend));
}

}  // namespace gdsdata
