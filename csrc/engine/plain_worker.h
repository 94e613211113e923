// A worker for memory that the processor can write.
//
//   read    page cache, then backend --> memory
//   write   memory --> backend
#pragma once

#include "engine/worker.h"

namespace gdsdata {

class PlainWorker final : public Worker {
 public:
  PlainWorker(const EngineOptions& options, const Selection& selection, Device& device, SegmentQueue& queue)
      : Worker(options, selection, device, queue) {}

 private:
  bool turn() override;
  bool start(ActiveSegment& active) override;
  void request_reads(ActiveSegment& active, std::span<Transfer> to_device) override;
  void end(ActiveSegment& active) override;
  void drop_waiting() noexcept override { lane_.drop_waiting(); }
};

}  // namespace gdsdata
