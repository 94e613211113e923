// What libfakecufile.so offers its tests besides cuFile's functions: faults, by a seed, and counts.
#pragma once

#include <cstddef>
#include <cstdint>

struct FakeCufileCounts {
  uint64_t opens, handles, buffers, batches;          // opens: of the driver, ever; the others: live now
  uint64_t reads, writes, entries;                    // ever
  uint64_t longest_entry, most_entries_in_flight;     // since the last reset
  uint64_t registered_bases;                          // transfers that named registered memory by its begin
};

extern "C" {
FakeCufileCounts fake_cufile_counts();
// The next call of a function does nothing and returns `code`: of cuFileRead and cuFileWrite, -1
// and errno where it is below 5000. "entry": the next entry of a batch fails so.
void fake_cufile_fail_next(const char* name, int code);
void fake_cufile_fail_after(const char* name, uint64_t calls, int code);
// The next entry ends with this status (CUFILE_TIMEOUT ...) and no result.
void fake_cufile_end_next_entry(int status);
// Probabilities of transfers that move a part only, and of those that are interrupted.
void fake_cufile_set_trouble(double shorten, double interrupt);
// Entries end up to so late, in any order.
void fake_cufile_set_late_us(uint64_t most);
void fake_cufile_set_seed(uint64_t seed);
// Which way the statistics say that transfers go: 0 posix, 1 nvidia-fs, 2 P2PDMA, 3 by turns, 4
// none is counted.
void fake_cufile_set_route(int route);
// Faults and trouble end, the route is P2PDMA.
void fake_cufile_reset();
}
