// The options of an engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "backend/backend.h"
#include "tuning.h"

namespace gdsdata {

struct EngineOptions {
  std::string backend = "auto";
  size_t workers = 0;                   // threads; 0: the best number for the backend, with these cores
  size_t cores = 0;                     // that threads of this process are to keep busy; 0: those of the machine
  uint64_t segment_bytes = 0;           // the longest segment that a worker takes; 0: the best for the device
  uint64_t staging_bytes =
      tuning::kStagingBytes;    // pinned memory of each worker, if the processor cannot write the device
  uint64_t coalesce_gap_bytes = tuning::kCoalesceGapBytes;  // neighbors at most so far apart become one request
  BackendOptions io;                    // of each worker's backend
};

}  // namespace gdsdata
