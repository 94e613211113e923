// Copies bytes that are in the page cache, and leaves the rest to a backend.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/file.h"
#include "base/types.h"
#include "tuning.h"

namespace gdsdata {

// One thread at a time may use it.
class PageCache {
 public:
  // Transfers of at most kShortBytes are copied from a mapping, without a system call for each. A
  // mapping is expensive, so a file of less than kMapFileBytes gets one only at its second
  // transfer. Longer transfers are copied from the mapping if Mapping::map_for_copying agrees, but
  // not when a file of less than kLongFileBytes is read for the first time, or into staging memory.
  // Others are read by preadv2 with RWF_NOWAIT.
  static constexpr uint64_t kShortBytes = tuning::kMappedTransferBytes;
  static constexpr uint64_t kMapFileBytes = tuning::kMappedFileBytes;
  static constexpr uint64_t kLongFileBytes = tuning::kLongFileBytes;

  // Staging memory is in the processor's caches, where preadv2 is as fast as a copy from a mapping.
  enum class Into { kResult, kStaging };
  explicit PageCache(Into into) : into_(into) {}

  // `files[i]` is the open file of `transfers[i]`, and no transfer is empty. Appends transfers or
  // parts of them that were not resident to `left`, and adds delivered bytes to `bytes`. Returns an
  // error if a file ends before a transfer does. If `past_caches`, long copies bypass the
  // processor's caches.
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
  std::optional<Error> check_size(std::span<const Copy> of_one_file);
  void read_resident(File& file, const Transfer& transfer, File::Residency whole, Conversion conversion,
                     std::vector<Transfer>& left, RouteBytes& bytes);
  void read_hidden(File& file, Mapping& mapping, const Transfer& transfer, Conversion conversion,
                   std::vector<Transfer>& left, RouteBytes& bytes);
  uint64_t read_now(File& file, const Transfer& part, Conversion conversion, bool known_resident);

  const Into into_;
  std::vector<Copy> copies_;
  std::vector<Copy> unsure_;        // copies after which the file's size must be checked
  std::vector<PageTails::Tail> seen_;  // scratch
  std::vector<std::byte> scratch_;  // for bytes to be converted
};

}  // namespace gdsdata
