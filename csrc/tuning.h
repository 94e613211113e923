// Every constant that a measurement chose, with its figure, its machine and what shows that it is
// wrong.
//
// "Two cores" is a virtual machine with 2 cores (AMD EPYC), ext4 on a virtio disk, kernel 6.18.
// "H200" is one NVIDIA H200, 16 cores of a virtual machine, driver 580, CUDA 13.0. All figures are
// of November 2026. Constants that follow from a format, a page, a cache line or an interface stand
// beside the code that uses them. docs/design-decisions.md says more about each measurement.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace gdsdata::tuning {

// --- engine: how work is shared. Shown by `python -m gdsdata.bench case=io` and `case=loader` ----

// The longest segment of a read into host memory. Two cores, cold 1 MiB reads: 0.926 of fio, with 8
// MiB 0.925, because segments are gathered (kRequestsAtOnce).
inline constexpr uint64_t kHostReadSegmentBytes = 1 << 20;
// The same for a read into a GPU's memory: what a copy costs besides its bytes is spread over 4
// MiB. H200, a file of 4 GiB: 43 GB/s at 1 MiB, 48 at 2 MiB, 49 to 51 at 4 MiB.
inline constexpr uint64_t kDeviceReadSegmentBytes = 4 << 20;
// The same for a write out of host memory: the kernel joins requests that are submitted together.
// Two cores: 1.00 and 1.01 of the raw write with 4 and 8 MiB, 0.83 to 0.85 with 2 MiB.
inline constexpr uint64_t kHostWriteSegmentBytes = 8 << 20;
// The same for a write out of a GPU's memory: staging memory has to hold more than two segments.
inline constexpr uint64_t kDeviceWriteSegmentBytes = 4 << 20;
// The workers share a batch evenly, but not in shorter segments. H200, 8 workers, batches of 8 MiB:
// 40.2 GB/s of records in segments of 1 MiB, 25.1 in segments of 4 MiB.
inline constexpr uint64_t kLeastSegmentBytes = 1 << 20;
// A segment of tiny records ends here, so that several workers share a batch. Not measured by
// itself.
inline constexpr size_t kMostSegmentParts = 1024;

// One io_uring worker keeps a disk busy; more of them copy out of the page cache. H200: 8 threads
// reach the link's rate out of the page cache, 10 are no faster. Posix workers have one request in
// flight each, so a disk wants many.
inline constexpr size_t kMostUringWorkers = 8;
inline constexpr size_t kPosixWorkers = 8;
// Two cores, cold volumes: 15, 32 and 64 requests in flight differ by less than noise. 4 KiB reads
// want 32.
inline constexpr size_t kQueueDepth = 64;
// Neighbors at most so far apart become one request: a disk reads 16 KiB in less time than it takes
// for one more request. Not measured by itself.
inline constexpr uint64_t kCoalesceGapBytes = 16384;

// Bounce memory of all workers together, and of one at least. Two cores, one worker: with 16 MiB,
// saves take an eighth to a third longer than with 64 MiB, and cold loads an eighth; 128 MiB are no
// better.
inline constexpr uint64_t kSharedBounceBytes = 64 << 20;
inline constexpr uint64_t kLeastBounceBytes = 16 << 20;
// Pinned memory of each worker: three segments. H200, 8 threads, slots of 4 MiB: two reach 51.1
// GB/s, four 45.4 and eight 35.0, because more than 64 to 100 MiB in all fall out of the
// processor's cache.
inline constexpr uint64_t kStagingBytes = 13 << 20;

// The background gets at least every ninth turn. Not measured by itself: tests/cpp/queue_test.cpp
// shows that it ends.
inline constexpr size_t kMostPassedOver = 8;
// So many requests are gathered for one submit, because the kernel joins neighbors. Two cores, 1
// MiB reads: 0.926 of fio, with segments of 8 MiB 0.925, one by one 0.80.
inline constexpr size_t kRequestsAtOnce = 8;
// A worker with many requests in flight sleeps until so many have ended, or for so long. H200,
// cold, 1 MiB requests: 0.021 cpu-s/GB, woken for each one 0.051 to 0.068. `case=io` shows it.
inline constexpr size_t kMostCompletionsAtOnce = 8;
inline constexpr std::chrono::milliseconds kFewCompletionsTimeout{1};

// --- engine: callers and consumers. Shown by `case=latency`, and `case=loader` with a warm file --

// A waiting caller serves a read of at most so many bytes, and polls for it. Into a GPU's memory, 1
// MiB: 785 us by a worker, 165 by the caller (two H200). Into host memory: 157 to 172 us, then 40
// (two cores).
inline constexpr uint64_t kShortReadBytes = 1 << 20;
// A consumer looks so long for a batch that a worker is about to finish. Two cores, batches of 131
// KB: 4.3 million records/s at 0.18 cpu-s/GB with a helping consumer, 2.6 to 2.9 at 0.25 with a
// sleeping one.
inline constexpr std::chrono::microseconds kConsumerLooks{20};
// Copies of longer groups go past the processor's caches. Two cores: batches of 32 MiB 15.5 and
// 23.0 GB/s, into the caches 8.5 and 15.6; batches of 1 MiB that are read soon 11.6 and 13.6, into
// the caches 17.7 and 19.9.
inline constexpr uint64_t kPastCachesBytes = 16 << 20;

// --- engine: the link to a GPU. Shown by `case=load device=cuda` ---------------------------------

// Batches on the link: one that is copied, one that follows it at once. H200: two 54.8 GB/s, one
// 52.6, three 54.7.
inline constexpr size_t kMostBatchesOnLink = 2;
// Copies of a batch on the link: a batch has 4.7 to 5.2 segments on an H200, so this bounds short
// ones.
inline constexpr size_t kMostCopiesOfBatch = 64;
// A waiter for the link looks so often. H200, a load of 8 GiB: 158 to 159 ms, with sleeps of up to
// 200 us 161.6.
inline constexpr std::chrono::microseconds kLinkSleep{10};
// Stretches of so many bytes lie on pages of their own in staging memory, so that storage writes
// them without a bounce. As kInPlaceBytes.
inline constexpr uint64_t kPagedBytes = 64 << 10;
// The page cache is registered in windows of so many bytes, so that an end waits for tens of
// milliseconds at most. H200: the driver holds other copies back meanwhile.
inline constexpr uint64_t kRegistrationWindowBytes = 32 << 20;
// Gathers whose addresses the GPU may not have read yet. Not measured by itself.
inline constexpr size_t kMostGathersInFlight = 32;

// --- device --------------------------------------------------------------------------------------

// A caller that waits for a short copy polls for so long: a sleep takes at least 60 us on an H200,
// a copy of 4 KiB 5. `case=latency device=cuda` shows it.
inline constexpr std::chrono::microseconds kEventPolls{100};
// Others sleep, twice as long each time: events that a thread can sleep for cost the link 1.5 to
// 2.6 us each (H200).
inline constexpr std::chrono::microseconds kShortestEventSleep{10}, kLongestEventSleep{200};
// The kernel that gathers records out of pinned page cache. H200: 32 blocks reach 44.9 to 47.4 GB/s
// and leave the other multiprocessors to the program. The row gdsdata_pinned of `case=loader
// device=cuda` shows it.
inline constexpr unsigned kGatherBlocks = 32, kGatherThreads = 512;

// --- backend: the page cache. Shown by `case=loader` with a warm file ----------------------------

// Transfers of at most so many bytes are copied from a mapping. Two cores, 2050 bytes: 2.7 million
// records/s, by preadv2 0.73. From 64 KiB on, preadv2 wins if each page has to be mapped first.
inline constexpr uint64_t kMappedTransferBytes = 64 << 10;
// Shorter files are mapped at their second transfer. Two cores, 3000 files of 64 KiB, GB/s epoch by
// epoch: 1.8, 3.4, 7.2; by preadv2 1.9, 4.9, 4.9.
inline constexpr uint64_t kMappedFileBytes = 1 << 20;
// Shorter files are mapped only when they are read for the second time. Two cores: a file of 1 MiB
// takes 40 us, mapped at once 157 to 172. With 16 or 64 MiB here, files of 16 MiB took 770 to 1020
// us in half of the runs, else 370 to 550.
inline constexpr uint64_t kLongFileBytes = 8 << 20;
// So many records ahead, the lines of a record are asked for, up to so many bytes. Two cores: 5.2
// million records/s, without 2.7; one record ahead 3.3.
inline constexpr size_t kPrefetchedRecords = 4;
inline constexpr uint64_t kPrefetchedBytes = 4096;
// Converted bytes pass through scratch memory of so many bytes, which stays in the second-level
// cache. Not measured by itself.
inline constexpr uint64_t kScratchBytes = 256 << 10;
// One page in so many bytes of a long transfer shows whether it is in the page cache. Two cores:
// asking for all of 16 MiB takes cachestat 200 us in 4 KiB folios.
inline constexpr uint64_t kResidencyStretchBytes = 512 << 10;

// --- backend: storage. Shown by `case=io` and `case=checkpoint` ----------------------------------

// Shorter reads go through bounce memory as a whole, because it is registered. Two cores, cold
// volumes: read in place 0.93 to 1.01 of the disk, through a bounce 0.85 to 0.88.
inline constexpr uint64_t kInPlaceBytes = 64 << 10;
// Checksums are taken of so many bytes that were just copied. Two cores, saves: taken behind the
// write they cost 4 %.
inline constexpr uint64_t kCheckedAtOnceBytes = 256 << 10;
// The part of bounce memory that is registered with io_uring, and touched at once. Two cores: first
// batches took 120 to 240 ms with 64 MiB, 35 to 80 with 16, because new memory costs 2.3 ms a MiB.
inline constexpr uint64_t kRegisteredBytes = 4 << 20;
// While writes are prepared, io_uring's answers are looked for after each so many bytes. With half
// of the bounce memory in flight and half copied ahead: 0.88 to 0.91 of a raw write, before 0.855
// (two cores).
inline constexpr uint64_t kLooksEveryBytes = 1 << 20;
// Pinned and bounce memory is touched so many bytes at a time: no other thread maps memory
// meanwhile. Two cores: it waits 8 to 10 ms, at 12 MiB a call 40.
inline constexpr uint64_t kTouchedAtOnceBytes = 2 << 20;
// A batch of cuFile takes no new request before all it has are done, so there are several. Not
// measured by itself: no machine with GPUDirect Storage was there.
inline constexpr size_t kCufileBatches = 4;
inline constexpr std::chrono::milliseconds kCufileLooks{1};

// --- base ----------------------------------------------------------------------------------------

// Shorter copies never go past the processor's caches: they are often in a cache already. Not
// measured by itself.
inline constexpr uint64_t kStreamedCopyBytes = 256 << 10;
// Three lanes of so many bytes are summed side by side: a step of CRC-32C takes three cycles, and
// one begins each cycle. Joining the lanes takes as long as some 256 bytes.
inline constexpr size_t kCrcLaneBytes = 2048;
// A page that takes less time to map is one of a large folio: a few nanoseconds, a page by itself
// 100 to 400 (H200). `case=load device=cuda` of a file in tmpfs shows it: 22 to 30 GB/s mapped at
// once, 45 to 50 by this rule.
inline constexpr std::chrono::nanoseconds kCheapPage{40};
// If mapping was dear, one range of so many is tried again. Not measured by itself.
inline constexpr uint32_t kMappingTriedEvery = 8;
// Longer mappings are unmapped on a thread of their own: 0.3 to 60 ms each GiB, by their folios.
// Two cores, a load of 2 GiB: 5 to 7 ms less.
inline constexpr uint64_t kLongToUnmapBytes = 256 << 20;
// A hole in an area of so many bytes that is otherwise in the page cache is filled by a page fault.
// Two cores: with 1.7 % of the records missing, the rate fell 7 times.
inline constexpr uint64_t kHoleAreaBytes = 16 << 20;
// Longer files are freed on a thread of their own when their last name goes. Two cores: replacing 2
// GiB took a quarter longer than writing a new file.
inline constexpr int64_t kLongToFreeBytes = 64 << 20;
// Descriptors of open files while caches keep idle ones: half of the process's limit, or this. Each
// file may have a mapping too, of which Linux allows 65530. Two cores, two data sets of 4096 files
// with records of 2 KiB: 2.7 GB/s, with 4096 files open 0.3.
inline constexpr size_t kMostCachedDescriptors = 24 << 10;
// A folder of up to so many entries is listed by each save, a larger one by fewer. A listing takes
// 0.3 ms per 1000 entries (two cores), so n saves into one folder would otherwise take n² steps.
inline constexpr size_t kEntriesPerSave = 1000;

}  // namespace gdsdata::tuning
