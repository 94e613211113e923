// Every constant that a measurement chose, with its figure, its machine and the benchmark or test
// that would show it wrong.
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

// The longest segment of a read into host memory. Two cores, cold 1 MiB reads: 0.926 of fio, and
// 0.925 with 8 MiB, because segments are gathered (kRequestsAtOnce). Sixteen cores, batches of 2048
// records of 4 KiB as int64: 20.6 GB/s, and 17.3 with 1 MiB. On two cores both are as fast.
inline constexpr uint64_t kHostReadSegmentBytes = 512 << 10;
// The same for a read into a GPU's memory. Longer segments spread the fixed cost of a copy. H200, a
// file of 4 GiB: 43 GB/s at 1 MiB, 48 at 2 MiB, 49 to 51 at 4 MiB; of 8 GiB, with less staging
// memory: as fast at 3 MiB as at 4.
inline constexpr uint64_t kDeviceReadSegmentBytes = 3 << 20;
// The same for a write from host memory: the kernel joins requests that are submitted together. Two
// cores: 1.00 and 1.01 of the raw write with 4 and 8 MiB, 0.83 to 0.85 with 2 MiB.
inline constexpr uint64_t kHostWriteSegmentBytes = 8 << 20;
// The same for a write from a GPU's memory. Saves of 2 GB to memory, H200, medians of three turns:
// 2.46 to 3.02 GB/s, and 2.27 to 2.57 with 3 MiB.
inline constexpr uint64_t kDeviceWriteSegmentBytes = 4 << 20;
// The workers share a batch evenly, but in segments of at least this length. H200, 8 workers,
// batches of 8 MiB: 40.2 GB/s of records in segments of 1 MiB, 25.1 in segments of 4 MiB.
inline constexpr uint64_t kLeastSegmentBytes = 1 << 20;
// A segment into host memory moves at least so much: 256 KiB as they are, or 102 KiB that become
// four times as many. Sixteen cores, 8 workers, records of 4 KiB, segments of 128 KiB, 256 KiB and
// 1 MiB, GB/s of batches of 512: as int64 23.0, 23.8 and 15.5, without a cast 36.9, 40.5 and 27.9.
// Batches of 64: as int64 10.4, 5.5 and 6.0, without a cast 13.0, 14.5 and 14.3. Cold records in
// order, two cores: 2.55, 3.13 and 3.14.
inline constexpr uint64_t kLeastMovedBytes = 512 << 10;
// A segment has at most so many parts, so that several workers share a batch of tiny records. Not
// measured by itself.
inline constexpr size_t kMostSegmentParts = 1024;

// One io_uring worker keeps a disk busy; more of them copy from the page cache. To a GPU from 2048
// volumes of 2 MiB, 8 have 42 to 52 GB/s and 12 have 52 to 54, the link's rate (H200). From one
// large file 8 reach it too. A posix worker has only one request in flight, so a disk needs many
// workers.
inline constexpr size_t kMostUringWorkers = 8, kMostUringWorkersOfGpu = 12;
inline constexpr size_t kPosixWorkers = 8;
// Requests in flight. Two cores, cold volumes: 15, 32 and 64 differ by noise. 4 KiB reads need 32.
inline constexpr size_t kQueueDepth = 64;
// Neighbors at most so far apart become one request, because a disk reads 16 KiB in less time than
// another request takes. Not measured by itself.
inline constexpr uint64_t kCoalesceGapBytes = 16384;

// Bounce memory of all workers together, and the least of one worker. Two cores, one worker: with
// 16 MiB, saves take an eighth to a third longer than with 64 MiB, and cold loads an eighth. 128
// MiB are no better.
inline constexpr uint64_t kSharedBounceBytes = 64 << 20;
inline constexpr uint64_t kLeastBounceBytes = 16 << 20;
// Pinned memory of each worker: three segments of a read, or two of a write. H200, 8 threads, slots
// of 4 MiB: two slots reach 51.1 GB/s, four 45.4 and eight 35.0, because memory of more than the
// processor's cache is slower. Twelve threads, shuffled records of 4 KiB: 10 MiB take 0.90 to 0.97
// of the processor time of 13.
inline constexpr uint64_t kStagingBytes = 10 << 20;

// Background work gets at least every ninth turn. Not measured by itself: tests/cpp/queue_test.cpp
// shows that it ends.
inline constexpr size_t kMostPassedOver = 8;
// So many requests are gathered for one submit, because the kernel joins neighbors. Two cores, 1
// MiB reads: 0.926 of fio, 0.925 with segments of 8 MiB, 0.80 one by one.
inline constexpr size_t kRequestsAtOnce = 8;
// A worker with many requests in flight sleeps until so many have completed, or for so long. H200,
// cold, 1 MiB requests: 0.021 cpu-s/GB, 0.051 to 0.068 if each one wakes it. `case=io` shows it.
inline constexpr size_t kMostCompletionsAtOnce = 8;
inline constexpr std::chrono::milliseconds kFewCompletionsTimeout{1};

// --- engine: callers and consumers. Shown by `case=latency`, and `case=loader` with a warm file --

// A waiting caller serves a read of at most so many bytes itself, and polls for it. Into a GPU's
// memory, 1 MiB: 785 us by a worker, 165 by the caller (two H200). Into host memory: 157 to 172 us
// by a worker, 40 by the caller (two cores).
inline constexpr uint64_t kShortReadBytes = 1 << 20;
// A future's read of at most so many bytes is served while it is submitted, if the page cache has
// it. By a worker and at once, two cores do 40 and 79 thousand reads of 4 KiB a second. An H200's
// machine does 17 to 28 and 35, and to the GPU 15 to 19 and 20 to 25. With 64 KiB these are 38 and
// 57 to 68, 19 to 22 and 29 to 35, 15 to 19 and 15 to 25. It polls so long for a copy to a GPU,
// which takes 10 us.
inline constexpr uint64_t kAtOnceBytes = 64 << 10;
inline constexpr std::chrono::microseconds kShortCopyPolls{20};
// A consumer polls so long for a batch that a worker is about to finish. Two cores, batches of 131
// KB: 4.3 million records/s at 0.18 cpu-s/GB if the consumer helps, 2.6 to 2.9 at 0.25 if it
// sleeps.
inline constexpr std::chrono::microseconds kConsumerLooks{20};
// Copies of longer groups bypass the processor's caches. Two cores: batches of 32 MiB 15.5 and 23.0
// GB/s, into the caches 8.5 and 15.6; batches of 1 MiB that are read soon 11.6 and 13.6, into the
// caches 17.7 and 19.9.
inline constexpr uint64_t kPastCachesBytes = 16 << 20;

// --- engine: the link to a GPU. Shown by `case=load device=cuda` ---------------------------------

// Batches on the link: one is copied, one follows at once. H200: two 54.8 GB/s, one 52.6, three
// 54.7.
inline constexpr size_t kMostBatchesOnLink = 2;
// Copies of a batch on the link. On an H200 a batch has 4.7 to 5.2 segments, so this limits only
// batches of short ones.
inline constexpr size_t kMostCopiesOfBatch = 64;
// A thread that waits for the link polls at this interval. H200, a load of 8 GiB: 158 to 159 ms,
// and 161.6 with sleeps of up to 200 us.
inline constexpr std::chrono::microseconds kLinkSleep{10};
// Runs of so many bytes lie on pages of their own in staging memory, so that storage writes them
// without a bounce. Chosen like kInPlaceBytes.
inline constexpr uint64_t kPagedBytes = 64 << 10;
// The page cache is registered in windows of so many bytes, because the driver delays other copies
// meanwhile: 0.2 ms for 4 MiB, 1 ms for 32 MiB (H200).
inline constexpr uint64_t kRegistrationWindowBytes = 4 << 20;
// After each window, registration pauses for so many times as long as that took. H200, records of
// 2 GiB in 1 and 1024 files, GB/s while they are registered: 47 and 44, without registration 49 and
// 45, and 2 GiB take 1 to 2 s. With 3 pauses 45 and 39, with none the first epoch has 16 and 10
// instead of 30 and 17. The row gdsdata_pinned of `case=loader device=cuda` shows it.
inline constexpr int kRegistrationPauses = 7;
// Gathers whose addresses the GPU may not have read yet: at most so many, and as many as have so
// many bytes of addresses, but at least one a stream. Not measured by itself.
inline constexpr size_t kMostGathersInFlight = 32, kMostGatherAddressBytes = 16 << 20;

// --- device --------------------------------------------------------------------------------------

// A caller that waits for a short copy polls for so long. On an H200 a sleep takes at least 60 us,
// a copy of 4 KiB 5 us. `case=latency device=cuda` shows it.
inline constexpr std::chrono::microseconds kEventPolls{100};
// Other waiters sleep, twice as long each time. Events on which a thread can sleep would cost the
// link 1.5 to 2.6 us each (H200).
inline constexpr std::chrono::microseconds kShortestEventSleep{10}, kLongestEventSleep{200};
// The kernel that gathers records from pinned page cache. H200: 32 blocks reach 44.9 to 47.4 GB/s.
// With two streams at most 64 blocks run at a time, and the other multiprocessors are left to the
// program. The row gdsdata_pinned of `case=loader device=cuda` shows it.
inline constexpr unsigned kGatherBlocks = 32, kGatherThreads = 512;
// Consecutive gathers use different streams, of so many. H200, by a script: gathers of 8 MiB have
// 49.6 to 49.7 GB/s on one and 50.4 on two, of 32 MiB 50.4 to 50.7 and 50.8 to 51.0.
inline constexpr size_t kGatherStreams = 2;

// --- backend: the page cache. Shown by `case=loader` with a warm file ----------------------------

// Transfers of at most so many bytes are copied from a mapping. Two cores, 2050 bytes: 2.7 million
// records/s, by preadv2 0.73. From 64 KiB on, preadv2 is faster if each page must be mapped first.
inline constexpr uint64_t kMappedTransferBytes = 64 << 10;
// Shorter files are mapped at their second transfer. Two cores, 3000 files of 64 KiB, GB/s of the
// first three epochs: 1.8, 3.4, 7.2; by preadv2 1.9, 4.9, 4.9.
inline constexpr uint64_t kMappedFileBytes = 1 << 20;
// Shorter files are mapped only when they are read for the second time. Two cores: a file of 1 MiB
// takes 40 us, and 157 to 172 if it is mapped at once. With 16 or 64 MiB here, files of 16 MiB took
// 770 to 1020 us in half of the runs, else 370 to 550. Into staging memory they are never mapped:
// epochs over volumes of 2 MiB had 45 to 49 GB/s by preadv2, 39 to 47 from mappings, and 31 to 35
// while they were mapped (H200).
inline constexpr uint64_t kLongFileBytes = 8 << 20;
// The cache lines of a record are prefetched so many records ahead, up to so many bytes. Two cores:
// 5.2 million records/s; 3.3 with one record ahead; 2.7 without. They come into the first-level
// cache: 20.1 GB/s in batches of 128 records of 4 KiB, and 17.5 into the second.
inline constexpr size_t kPrefetchedRecords = 4;
inline constexpr uint64_t kPrefetchedBytes = 4096;
// The rows of an index are prefetched so many samples ahead. Two cores, 4096 rows of 700 MB: 60 us,
// 70 with 16, 86 without. `python benchmarks/scale.py` shows it.
inline constexpr size_t kPrefetchedRows = 32;
// Converted bytes pass through scratch memory of this size, which fits in the second-level cache.
// Not measured by itself.
inline constexpr uint64_t kScratchBytes = 256 << 10;
// One page in so many bytes of a long transfer is checked for presence in the page cache. Two
// cores: cachestat takes 200 us for all of 16 MiB in 4 KiB folios.
inline constexpr uint64_t kResidencyStretchBytes = 512 << 10;

// --- backend: storage. Shown by `case=io` and `case=checkpoint` ----------------------------------

// Shorter reads go through bounce memory completely, because it is registered. Two cores, cold
// volumes: read in place 0.93 to 1.01 of the disk, through a bounce 0.85 to 0.88.
inline constexpr uint64_t kInPlaceBytes = 64 << 10;
// Checksums are computed for so many bytes at a time, just after they were copied. Two cores,
// saves: computed after the write they cost 4 %.
inline constexpr uint64_t kCheckedAtOnceBytes = 256 << 10;
// The part of bounce memory that is registered with io_uring, and touched at once. New memory costs
// 2.3 ms per MiB. Two cores: first batches took 120 to 240 ms with 64 MiB, 35 to 80 with 16.
inline constexpr uint64_t kRegisteredBytes = 4 << 20;
// While writes are prepared, io_uring's completions are checked after each so many bytes. Half of
// the bounce memory is then in flight while the other half is filled. Two cores: 0.88 to 0.91 of a
// raw write, 0.855 without.
inline constexpr uint64_t kLooksEveryBytes = 1 << 20;
// Pinned and bounce memory is touched so many bytes at a time, because no other thread can map
// memory meanwhile. Two cores: other threads wait 8 to 10 ms, and 40 ms at 12 MiB a call.
inline constexpr uint64_t kTouchedAtOnceBytes = 2 << 20;
// A batch of cuFile takes no new request before all of its requests have completed, so there are
// several. Not measured by itself: no machine with GPUDirect Storage was available.
inline constexpr size_t kCufileBatches = 4;
inline constexpr std::chrono::milliseconds kCufileLooks{1};

// --- base ----------------------------------------------------------------------------------------

// Shorter copies never bypass the processor's caches, because their bytes are often in a cache. Not
// measured by itself.
inline constexpr uint64_t kStreamedCopyBytes = 256 << 10;
// CRC-32C runs over three lanes of so many bytes side by side: a step takes three cycles, and one
// can begin in each cycle. Joining the lanes takes as long as about 256 bytes.
inline constexpr size_t kCrcLaneBytes = 2048;
// A page that takes less time to map belongs to a large folio: a few nanoseconds, and 100 to 400
// for a page by itself (H200). `case=load device=cuda` of a file in tmpfs shows it: 45 to 50 GB/s
// by this rule, 22 to 30 if all is mapped at once.
inline constexpr std::chrono::nanoseconds kCheapPage{40};
// A try that did not pay is made again once in so many times: to map a range, or to look for one in
// the page cache of a file whose pages Linux hides. Not measured by itself.
inline constexpr uint32_t kTriedEvery = 8;
// Longer mappings are unmapped on a thread of their own: that takes 0.3 to 60 ms per GiB, depending
// on their folios. Two cores, a load of 2 GiB: 5 to 7 ms less.
inline constexpr uint64_t kLongToUnmapBytes = 256 << 20;
// A hole in an area of so many bytes that is otherwise in the page cache is filled by a page fault.
// Two cores, with 1.7 % of the records missing: without this, the rate was a seventh.
inline constexpr uint64_t kHoleAreaBytes = 16 << 20;
// Longer files are freed on a thread of their own when they lose their last name. Two cores:
// without it, replacing 2 GiB took a quarter longer than writing a new file.
inline constexpr int64_t kLongToFreeBytes = 64 << 20;
// Each thread that reads heads has so many files open: it requests all of their heads before it
// waits for the first. Two cores, cold, one thread: the first batch of 256 files takes 28 ms with
// 64 at a time, and 40 one by one. For several threads it was not measured.
inline constexpr size_t kHeadsAtOnce = 16;
// The descriptors of open files while caches keep idle ones: half of the process's limit, and at
// most this. Each file may have a mapping too, and Linux allows 65530. Two cores, two data sets of
// 4096 files with records of 2 KiB: 2.7 GB/s, and 0.3 with only 4096 files open.
inline constexpr size_t kMostCachedDescriptors = 24 << 10;
// Place for so many descriptors is made when Python imports the engine; it takes 32 KiB. H200, a
// process's first epoch over 2048 volumes of 2 MiB: 168 to 228 ms without, 123 to 144 with it.
inline constexpr size_t kUsualDescriptors = 4 << 10;
// If there are more files than may be open or mapped, a data set keeps a half of that limit open
// (1 / kOpenPart). Another file is closed by its reader if that reads a half of it or more
// (1 / kWholePart). Neither was measured by itself.
inline constexpr size_t kOpenPart = 2;
inline constexpr uint64_t kWholePart = 2;
// Mapped files may rest while there are an eighth more mappings than Mapping::most(). With none
// more, each file that was mapped had another unmapped. Two cores, 65,536 files of 64 KiB, in
// turns: first epochs 3.9 to 4.1 GB/s, and 3.9 to 4.6; later ones are alike.
inline constexpr size_t kMoreMappingsPart = 8;
// Files that were evicted do not count while readers keep them open, up to this part of that limit
// in each cache. They close within a millisecond, unless a reader hangs. Otherwise rounds that open
// files would end at each other's pins. Not measured by itself.
inline constexpr size_t kEvictedPart = 16;
// When an epoch begins, at most so many open files are checked for changes. Two cores, tmpfs:
// 330 ns a file that has a descriptor, and 910 if it rests: 0.3 to 0.9 ms an epoch. With 20,000
// open files, half of them resting, 0.7 to 1.5 ms. Those of a network file system may each take a
// round trip, so no file is asked about after the time below.
inline constexpr size_t kCheckedAtOnce = 1024;
inline constexpr std::chrono::milliseconds kCheckedFor{10};
// Each save lists a folder of up to so many entries, and fewer saves list a larger one. A listing
// takes 0.3 ms per 1000 entries (two cores), so n saves would otherwise take n² steps.
inline constexpr size_t kEntriesPerSave = 1000;
// A full cache of blocks looks so often for objects that other processes no longer use. A listing
// takes 1 to 2 us an object. Not measured by itself.
inline constexpr std::chrono::seconds kCacheLooksAgain{1};
// The table of a process's cached objects is swept when it has so many entries, and at each
// doubling. Not measured by itself.
inline constexpr size_t kCacheEntriesSwept = 1024;

// --- Remote objects ------------------------------------------------------------------------------

// Requests to servers in flight, in a process. Not measured by itself.
inline constexpr size_t kHttpConnections = 64;
// libcurl receives so many bytes at a time, and hands them on to be copied into place. Two cores,
// ranges of 1 MiB on 64 connections, cpu-s/GB of the process: 0.37 to 0.41 with 32 to 512 KiB,
// without a trend.
inline constexpr size_t kHttpBufferBytes = 256 << 10;
// Without TLS, bytes are received where they are wanted if that memory is so long, or as long as
// the rest of the body. Others are received together, and copied. Not measured by itself.
inline constexpr uint64_t kReceivedInPlaceBytes = 64 << 10;
// Without TLS, a body's socket is ready when so many bytes wait, or all the rest of it. Two cores,
// ranges of 1 MiB, cpu-s/GB of the process: 0.166, and 0.184 if it is ready at the first byte. 1
// MiB gave 0.159, but the kernel makes a receive buffer hardly longer than this, and a far server
// has to go on sending meanwhile. `case=remote` shows it.
inline constexpr uint64_t kLeastReceivedBytes = 256 << 10;
// The same for the shortest bodies, or rests, that it is set for. Not measured by itself.
inline constexpr uint64_t kShortestBodyToGather = 64 << 10;
// One thread for so many processors, and at most so many. Without TLS, a thread takes 0.3 to 0.37
// cpu-s/GB (see above), and 1.8 for scattered records of 64 KiB. Not measured with TLS.
inline constexpr size_t kProcessorsOfReactor = 2, kMostHttpReactors = 8;
// The longest request for a range. A request takes a round trip beside its bytes: at 50 ms and 25
// MB/s a connection, 8 MiB use 87 % of the connection, and 1 MiB 46 %.
inline constexpr uint64_t kRemoteRequestBytes = 8 << 20;
// A group is shared by so many requests, if they have kLeastSegmentBytes at least.
inline constexpr size_t kRequestsOfRemoteGroup = 32;
// Neighbors in an object that are at most so far apart become one request. Requests are in flight
// side by side, so a round trip costs less than its bytes. With 512 KiB, small pieces of a lane's
// window over an object of 6 MB read it 12 times an epoch.
inline constexpr uint64_t kRemoteCoalesceGapBytes = 64 << 10;
// Memory of one worker for blocks on their way into the local cache. Not measured by itself.
inline constexpr uint64_t kCacheFillBytes = 64 << 20;
// Requests for objects that one worker has in flight.
inline constexpr size_t kRemoteQueueDepth = 64;

}  // namespace gdsdata::tuning
