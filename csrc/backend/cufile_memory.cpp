#include "backend/cufile_memory.h"

#include <map>
#include <mutex>
#include <string>

#include "backend/cufile_api.h"
#include "base/fallbacks.h"
#include "base/file.h"

namespace gdsdata {

namespace {

struct Registered {
  uint64_t bytes = 0;
  size_t users = 0;
};

struct Registry {
  std::mutex mutex;
  std::map<std::byte*, Registered> memory;
  uint64_t bytes = 0;
};

Registry& registry() {
  static auto* instance = new Registry;  // never destroyed: buffers may outlive static destructors
  return *instance;
}

class User {
 public:
  User() : process_(process_id()) {}
  // Counts as one of the memory's users from now on. The caller has the lock.
  void use(std::map<std::byte*, Registered>::iterator entry) {
    memory_ = entry->first;
    ++entry->second.users;
  }
  ~User() {
    if (memory_ == nullptr || process_ != process_id()) return;  // a forked child has nothing registered
    std::lock_guard lock(registry().mutex);
    const auto entry = registry().memory.find(memory_);
    if (--entry->second.users != 0) return;
    CufileApi::get().memory_deregister(memory_);
    registry().bytes -= entry->second.bytes;
    registry().memory.erase(entry);
  }
  User(const User&) = delete;
  User& operator=(const User&) = delete;

 private:
  std::byte* memory_ = nullptr;
  const int64_t process_;
};

}  // namespace

std::shared_ptr<void> register_cufile_memory(std::span<std::byte> memory) {
  const CufileApi* api = nullptr;
  try {
    api = &CufileApi::get();
  } catch (const Failure&) {
    return nullptr;
  }
  auto user = std::make_shared<User>();  // nothing may fail once the memory is registered
  std::lock_guard lock(registry().mutex);
  const auto known = registry().memory.find(memory.data());
  if (known != registry().memory.end()) {
    if (known->second.bytes < memory.size()) return nullptr;
    user->use(known);
    return user;
  }
  const uint64_t most_bytes = uint64_t{api->properties.max_device_pinned_kib} * 1024;
  if (memory.empty() || registry().bytes + memory.size() > most_bytes) return nullptr;
  const auto entry = registry().memory.emplace(memory.data(), Registered{memory.size()}).first;
  const CufileApi::Status status = api->memory_register(memory.data(), memory.size(), 0);
  if (status.code != 0) {
    registry().memory.erase(entry);
    note_fallback("cuFile could not register memory of the GPU and goes by way of buffers of its own: " +
                  CufileApi::describe(status));
    return nullptr;
  }
  registry().bytes += memory.size();
  user->use(entry);
  return user;
}

CufilePlace find_cufile_place(std::byte* memory, uint64_t bytes) {
  std::lock_guard lock(registry().mutex);
  auto next = registry().memory.upper_bound(memory);
  if (next != registry().memory.begin()) {
    --next;
    const auto offset_bytes = static_cast<uint64_t>(memory - next->first);
    if (offset_bytes + bytes <= next->second.bytes) return {next->first, offset_bytes};
  }
  return {memory, 0};
}

}  // namespace gdsdata
