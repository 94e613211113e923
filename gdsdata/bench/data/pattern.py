"""Bytes that follow from their place in a file: case=io writes and expects them."""

import os

import numpy as np
import torch

from gdsdata.bench.data.pieces import read_exactly

PAGE_BYTES, SECTOR_BYTES, WORD_BYTES = 4096, 512, 8
PIECE_BYTES = 16 * 2**20
ODD = np.uint64(0x9E3779B97F4A7C15)  # times this, the numbers of sectors stay apart, and look random


class Pattern:
    """Pages of the same random words; the first word of each sector says its place.

    So few words change when memory is written elsewhere, which costs a run's writes little. Bytes
    that are wrong, and right ones in a wrong place, both show.
    """

    def __init__(self, seed):
        generator = np.random.default_rng(seed)
        shape = (PAGE_BYTES // SECTOR_BYTES, SECTOR_BYTES // WORD_BYTES)
        self.page = generator.integers(0, 2**64, shape, np.uint64)
        self.mask = generator.integers(0, 2**64, dtype=np.uint64)

    def stamps(self, offsets, size_bytes):
        """Return the sectors' first words: uint64, (ranges, size_bytes / 512)."""
        first = (np.asarray(offsets) // SECTOR_BYTES).astype(np.uint64)
        return (first[:, None] + np.arange(size_bytes // SECTOR_BYTES, dtype=np.uint64)) * ODD ^ self.mask

    def fill(self, memory):
        """Write pages without the right stamps into uint8 memory of whole pages."""
        memory.view(np.uint64).reshape(-1, *self.page.shape)[:] = self.page

    def stamp(self, memory, offsets):
        """Make `memory` (uint8, filled) what is at these offsets: as many equal ranges."""
        sectors = memory.view(np.uint64).reshape(len(offsets), -1, SECTOR_BYTES // WORD_BYTES)
        sectors[:, :, 0] = self.stamps(offsets, len(memory) // len(offsets))

    def check(self, memory, offsets, path, due=None):
        """Raise ValueError at the first byte of `memory` (uint8) that is not due there.

        Args:
            offsets: of as many equal ranges of whole pages, which `memory` is made of.
            due: bool for each range: only these are compared.
        """
        right = np.empty_like(memory)
        self.fill(right)
        self.stamp(right, offsets)
        wrong = (memory != right).reshape(len(offsets), -1)
        if due is not None:
            wrong[~due] = False
        if not wrong.any():
            return
        place = int(wrong.argmax())
        index, inside = divmod(place, wrong.shape[1])
        raise ValueError(
            f"{path}: the byte at offset {offsets[index] + inside:,} is {memory[place]:#04x}, {right[place]:#04x} was "
            f"due; {int(wrong[index].sum()):,} of the {wrong.shape[1]:,} bytes from offset {offsets[index]:,} on differ"
        )

    def write_file(self, path, size_bytes, progress=lambda count: None):
        """Write a file of whole pages, which is on storage when this returns."""
        piece = np.empty(min(PIECE_BYTES, size_bytes), np.uint8)
        self.fill(piece)
        with open(path, "wb", buffering=0) as file:
            for offset in range(0, size_bytes, len(piece)):
                part = piece[: min(len(piece), size_bytes - offset)]
                self.stamp(part, [offset])
                file.write(part.data)
                progress(len(part))
            os.fsync(file.fileno())

    def check_file(self, path, io_bytes, due):
        """Compare each `io_bytes` that are `due` (bool); return how many bytes that is."""
        parts = max(1, PIECE_BYTES // io_bytes)
        buffer = torch.empty(parts * io_bytes, dtype=torch.uint8)
        with open(path, "rb", buffering=0) as file:
            for first in range(0, len(due), parts):
                wanted = due[first : first + parts]
                if not wanted.any():
                    continue
                memory = buffer[: len(wanted) * io_bytes]
                offset = first * io_bytes
                file.seek(offset)
                read_exactly(file, memory)
                self.check(memory.numpy(), offset + np.arange(len(wanted)) * io_bytes, path, wanted)
        return int(due.sum()) * io_bytes
