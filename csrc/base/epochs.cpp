#include "base/epochs.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/per_process.h"

namespace gdsdata {

namespace {

// Read by all threads, written when an object is removed.
alignas(64) std::atomic<uint64_t> epoch{1};

// A forked child has none of its parent's threads, and so none of their pins.
struct Slots {
  std::mutex mutex;
  std::vector<const PinSlot*> members;  // guarded by mutex
};

Slots& slots() { return of_this_process<Slots>(); }

}  // namespace

PinSlot::PinSlot() {
  Slots& all = slots();
  std::lock_guard lock(all.mutex);
  all.members.push_back(this);
  registered_in_ = &all;
}

PinSlot::~PinSlot() {
  Slots& all = slots();
  if (registered_in_ != &all) return;  // made in the parent process
  std::lock_guard lock(all.mutex);
  std::erase(all.members, this);
}

Pin::Pin(PinSlot& slot, const Limbo& structure) : slot_(slot) {
  // A remover that finds this pin's epoch finds this structure, or that of a later pin.
  slot.structure_.store(&structure, std::memory_order_release);
  slot.since_.store(epoch.load());
}

uint64_t Limbo::next_epoch() { return epoch.fetch_add(1) + 1; }

uint64_t Limbo::oldest_pin() const {
  uint64_t oldest = UINT64_MAX;
  Slots& all = slots();
  std::lock_guard lock(all.mutex);
  for (const PinSlot* slot : all.members) {
    const uint64_t since = slot->since_.load();
    if (since != 0 && slot->structure_.load(std::memory_order_acquire) == this) oldest = std::min(oldest, since);
  }
  return oldest;
}

void Limbo::take_unused(std::vector<std::shared_ptr<void>>& unused) {
  if (removed_.empty()) return;
  unused.reserve(unused.size() + removed_.size());  // nothing may fail below
  const uint64_t oldest = oldest_pin();
  std::erase_if(removed_, [&](Removed& removed) {
    // A reader may have taken a reference while it had a pin. One that is taken later, to a whole
    // that stayed in the structure, does not find the part.
    const auto& [object, whole] = removed.removed;
    if (removed.epoch > oldest || object.use_count() > 1 || whole.use_count() > 1) return false;
    unused.push_back(std::move(removed.removed.object));
    return true;
  });
}

}  // namespace gdsdata
