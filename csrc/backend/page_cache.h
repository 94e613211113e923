// Serves from the page cache what is already there, by copying; the rest is left to a backend.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/file.h"
#include "base/types.h"
#include "tuning.h"

namespace gdsdata {

// Used by one thread at a time.
class PageCache {
 public:
  // Transfers of at most kShortBytes are copied from a mapping (no system call each): out of files
  // of at least kMapFileBytes at once, out of smaller ones from their second transfer on, because
  // a mapping has its price. Longer transfers are copied from it where Mapping::map_for_copying
  // says so, but not when a file of less than kLongFileBytes is read for the first time. Others are
  // read by preadv2 with RWF_NOWAIT.
  static constexpr uint64_t kShortBytes = tuning::kMappedTransferBytes;
  static constexpr uint64_t kMapFileBytes = tuning::kMappedFileBytes;
  static constexpr uint64_t kLongFileBytes = tuning::kLongFileBytes;

  // `files[i]` is the open file of `transfers[i]`. Appends what was not resident to `left`, as
  // whole transfers or parts of them, and counts what was delivered in `bytes`. An error where a
  // file ends before a transfer does. `past_caches`: long copies leave the processor's caches
  // alone.
  std::optional<Error> serve(std::span<const Transfer> transfers, std::span<File* const> files, Conversion conversion,
                             bool past_caches, std::vector<Transfer>& left, RouteBytes& bytes);

 private:
  struct Copy {
    const Transfer* transfer;
    File* file;
    Mapping* mapping;
    Route route;
  };
  std::optional<Error> copy_mapped(Conversion conversion, bool past_caches, RouteBytes& bytes);
  std::optional<Error> first_truncated();
  void read_resident(File& file, const Transfer& transfer, File::Residency whole, Conversion conversion,
                     std::vector<Transfer>& left, RouteBytes& bytes);
  uint64_t read_now(File& file, const Transfer& part, Conversion conversion, bool known_resident);

  std::vector<Copy> copies_;
  std::vector<Copy> unsure_;        // of these, for which the file's size has to be asked
  std::vector<std::byte> scratch_;  // where bytes that are converted land first
};

}  // namespace gdsdata
