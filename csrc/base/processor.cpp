// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, 14.3 and 15.2,
// and volume 2, CPUID: the bits of its leaves 1 and 7, and of the register XCR0.
#include "base/processor.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace gdsdata {

namespace {

#if defined(__x86_64__)

// The system saves these registers when it switches threads.
constexpr unsigned kSavesAvx = 0x6, kSavesAvx512 = 0xE6;

constexpr bool has(unsigned bits, unsigned bit) { return (bits >> bit & 1) != 0; }

[[gnu::target("xsave")]] unsigned saved_registers() { return static_cast<unsigned>(_xgetbv(0)); }

// __builtin_cpu_supports is of no use: its answers are all "no" with the compiler of the wheels.
Processor ask_processor() {
  Processor found;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return found;
  found.pclmul = has(ecx, 1) && has(ecx, 19);
  found.crc32c = has(ecx, 20);
  const unsigned saved = has(ecx, 27) ? saved_registers() : 0;
  found.avx = has(ecx, 28) && (saved & kSavesAvx) == kSavesAvx;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return found;
  found.avx2 = found.avx && has(ebx, 5);
  const bool has_all = has(ebx, 16) && has(ebx, 17) && has(ebx, 30) && has(ebx, 31);
  found.avx512 = found.avx2 && has_all && (saved & kSavesAvx512) == kSavesAvx512;
  return found;
}

#elif defined(__aarch64__)

Processor ask_processor() { return {.crc32c = (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0}; }

#else

Processor ask_processor() { return {}; }

#endif

}  // namespace

const Processor& processor() {
  static const Processor found = ask_processor();
  return found;
}

std::vector<std::string> names_of(const Processor& processor) {
  std::vector<std::string> names;
  if (processor.avx) names.emplace_back("avx");
  if (processor.avx2) names.emplace_back("avx2");
  if (processor.avx512) names.emplace_back("avx512");
  if (processor.pclmul) names.emplace_back("pclmul");
  if (processor.crc32c) names.emplace_back("crc32c");
  return names;
}

}  // namespace gdsdata
