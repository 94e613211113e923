// Functions of libfakecufile.so for tests, besides cuFile's: faults, by a seed, and counts.
#pragma once

#include <cstddef>
#include <cstdint>

struct FakeCufileCounts {
  uint64_t opens, handles, buffers, batches;          // opens: of the driver, ever; the others: live now
  uint64_t reads, writes, entries;                    // ever
  uint64_t longest_entry, most_entries_in_flight;     // since the last reset
  uint64_t registered_bases;                          // transfers that named registered memory by its start
};

extern "C" {
FakeCufileCounts fake_cufile_counts();
// The next call of a function does nothing and returns `code`. cuFileRead and cuFileWrite return -1
// and set errno if `code` is below 5000. "entry" fails the next entry of a batch.
void fake_cufile_fail_next(const char* name, int code);
void fake_cufile_fail_after(const char* name, uint64_t calls, int code);
// The next entry ends with this status (CUFILE_TIMEOUT ...) and no result.
void fake_cufile_end_next_entry(int status);
// Probabilities that a transfer is short, and that it is interrupted.
void fake_cufile_set_trouble(double shorten, double interrupt);
// Entries complete up to so late, in any order.
void fake_cufile_set_late_us(uint64_t most);
void fake_cufile_set_seed(uint64_t seed);
// The route in the statistics: 0 posix, 1 nvidia-fs, 2 P2PDMA, 3 alternating, 4 none is counted.
void fake_cufile_set_route(int route);
// Ends faults and trouble, and sets the route to P2PDMA.
void fake_cufile_reset();
}
