"""Long tensors made, changed, read and compared by pieces, on several threads.

A piece stays in the processor's caches from step to step, and nothing as long as the tensor is
allocated beside it. The arithmetic is NumPy's: torch's would start threads of its own from each of
these, which spin on when they are done.
"""

import contextlib
import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from gdsdata.bench.measure import device, system

PIECE_BYTES = 4 * 2**20
THREADS = min(8, len(os.sched_getaffinity(0)))
system.libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def each(size_bytes, work):
    """Return the list of what `work(begin, end)` gives for each piece, in order."""
    begins = range(0, size_bytes, PIECE_BYTES)
    ends = [min(begin + PIECE_BYTES, size_bytes) for begin in begins]
    if len(begins) < 2:
        return list(map(work, begins, ends))
    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(work, begins, ends))


def random_bytes(size_bytes, seed):
    made = torch.empty(size_bytes, dtype=torch.uint8)

    def fill(begin, end):
        generator = np.random.Generator(np.random.SFC64([seed, begin]))
        words = generator.integers(0, 2**64, -(-(end - begin) // 8), np.uint64)
        made.numpy()[begin:end] = words.view(np.uint8)[: end - begin]

    each(size_bytes, fill)
    return made


def add_one(tensor, path=None):
    """Add 1 to each byte of a CPU tensor; with a path, also to the file's first bytes."""
    array = tensor.numpy()
    with open(path, "r+b", buffering=0) if path else contextlib.nullcontext() as file:

        def add(begin, end):
            part = array[begin:end]
            np.add(part, np.uint8(1), out=part)
            while file and begin < end:
                begin += os.pwrite(file.fileno(), array[begin:end], begin)

        each(tensor.nbytes, add)


def read_exactly(file, tensor):
    """Fill a uint8 tensor on the CPU from an unbuffered file."""
    view, done = memoryview(tensor.numpy()), 0
    while done < len(view):
        got = file.readinto(view[done:])
        if not got:
            raise EOFError(f"{file.name}: it ends at {file.tell():,}, {len(view) - done} bytes are missing")
        done += got


def wrong_in_tensor(came, expected):
    """Return how many bytes of `came` are wrong, and where the first is, or None."""

    def wrong(begin, end):
        part = came[begin:end]
        if device.is_cuda(came.device):
            part = device.pinned((end - begin,), torch.uint8).copy_(part)
        return wrong_in_part(part, expected[begin:end], begin)

    return joined(each(expected.nbytes, wrong))


def wrong_in_file(path, expected):
    """Return the same of a file's first bytes, plainly read."""

    def wrong(begin, end):
        part = torch.empty(end - begin, dtype=torch.uint8)
        with open(path, "rb", buffering=0) as file:
            file.seek(begin)
            read_exactly(file, part)
        return wrong_in_part(part, expected[begin:end], begin)

    return joined(each(expected.nbytes, wrong))


def wrong_in_part(part, expected, begin):
    part = part.contiguous()
    if system.libc.memcmp(part.data_ptr(), expected.data_ptr(), expected.nbytes) == 0:
        return 0, None
    places = torch.nonzero(part != expected)
    return len(places), begin + int(places[0])


def joined(parts):
    return sum(count for count, _ in parts), next((place for _, place in parts if place is not None), None)
