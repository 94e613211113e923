// Gathers records from memory that the device can read (registered page cache) into consecutive
// rows. compile_gather.py generates gather_kernel.cpp from this file.
//
// The link is the limit. So reads are aligned words of 16 bytes, 512 bytes per warp and
// instruction, with eight words of each thread in flight. If a record and its row are not aligned
// to each other, the words are split on the device, whose memory is seventy times faster than the
// link.

typedef unsigned long long u64;

struct alignas(16) Word {
  u64 low, high;
};

template <typename Unit>
__device__ void store(unsigned char* target, u64 source, u64 source_end, u64 word_begin, Word word) {
  const u64 begin = word_begin < source ? source : word_begin;
  const u64 end = word_begin + sizeof(Word) > source_end ? source_end : word_begin + sizeof(Word);
#pragma unroll
  for (unsigned i = 0; i < sizeof(Word) / sizeof(Unit); ++i) {
    const u64 at = word_begin + i * sizeof(Unit);
    const u64 half = i * sizeof(Unit) < 8 ? word.low : word.high;
    const Unit unit = static_cast<Unit>(half >> (i * sizeof(Unit) % 8 * 8));
    if (at >= begin && at < end) *reinterpret_cast<Unit*>(target + (at - source)) = unit;
  }
}

// The grid may have any size: each warp takes pieces of 4 KiB until none is left. `unit_bytes`
// divides every source, the target and `bytes`.
extern "C" __global__ void gdsdata_gather(unsigned char* target, const u64* sources, u64 count, u64 bytes,
                                          unsigned unit_bytes) {
  constexpr unsigned kWords = 8;
  constexpr u64 kPieceBytes = 32 * kWords * sizeof(Word);
  const unsigned lane = threadIdx.x % 32;
  const u64 warps = static_cast<u64>(gridDim.x) * (blockDim.x / 32);
  const u64 warp = static_cast<u64>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  // A record that is not aligned to words touches one more.
  const u64 pieces = (bytes + (unit_bytes == sizeof(Word) ? 0 : sizeof(Word)) + kPieceBytes - 1) / kPieceBytes;
  for (u64 item = warp; item < count * pieces; item += warps) {
    const u64 record = item / pieces;
    const u64 source = sources[record], source_end = source + bytes;
    const u64 first = source / sizeof(Word) * sizeof(Word) + item % pieces * kPieceBytes + lane * sizeof(Word);
    unsigned char* row = target + record * bytes;
    Word words[kWords];
#pragma unroll
    for (unsigned i = 0; i < kWords; ++i) {
      const u64 at = first + i * 32 * sizeof(Word);
      if (at < source_end) words[i] = *reinterpret_cast<const Word*>(at);
    }
#pragma unroll
    for (unsigned i = 0; i < kWords; ++i) {
      const u64 at = first + i * 32 * sizeof(Word);
      if (at >= source_end) continue;
      if (unit_bytes == 16) {
        *reinterpret_cast<Word*>(row + (at - source)) = words[i];
      } else if (unit_bytes % 2 == 0) {
        store<unsigned short>(row, source, source_end, at, words[i]);
      } else {
        store<unsigned char>(row, source, source_end, at, words[i]);
      }
    }
  }
}
