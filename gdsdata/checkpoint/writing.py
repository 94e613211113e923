"""From tensors into one file, that is there whole when all is done and not at all before."""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import zlib
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from gdsdata import engine
from gdsdata.checkpoint.pause import collector_resumed
from gdsdata.options import EngineOptions

PAGE_BYTES = 4096  # what begins at a multiple of it is written from where it lies

Extent = tuple[int, torch.Tensor]  # where it goes in the file, and its bytes: uint8, one dimension, contiguous


def get_ready(options: EngineOptions) -> None:
    """A file is about to be written: the engine takes its memory while it is still laid out."""
    engine.kept_engine(options, torch.device("cpu")).prepare()  # of a file's headers, where all tensors are on a GPU


class Writing:
    """A file in the making; see csrc/engine/whole.h. Used by ``with``: it leaves nothing where it was not committed.

    Args:
        path: its name, under which is what was there before until `commit`.
        size_bytes: that it will have.
        options: of the engine.

    Raises:
        IoError: it cannot be made, or the disk has not so much space.
    """

    def __init__(self, path: str, size_bytes: int, options: EngineOptions) -> None:
        self._output: engine.Output | None = engine.Output(path, size_bytes)
        self._size_bytes, self._options = size_bytes, options
        self._rest: list[tuple[int, bytes]] = []  # what does not fill a page, and where it goes

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, *_: object) -> None:
        self._output = None  # now, and not when an error's traceback goes

    def write(self, extents: Sequence[Extent], with_checksums: bool = False) -> list[int]:
        """Each extent, and with checksums the CRC-32 of each. On a GPU it comes behind the current stream's work.

        Whole pages of the file are written now. The rest is remembered, and `commit` writes its pages whole: parts of
        pages would go through the page cache, and to storage one by one when the file is synced.
        """
        checksums = [0] * len(extents)
        for device in dict.fromkeys(tensor.device for _, tensor in extents):
            places = [i for i, (_, tensor) in enumerate(extents) if tensor.device == device]
            found = self._write_from(device, [extents[i] for i in places], with_checksums)
            for i, checksum in zip(places, found, strict=False):
                checksums[i] = checksum
        return checksums

    def write_bytes(self, parts: Iterable[tuple[int, bytes]]) -> None:
        """Parts, and where they go in the file."""
        long = []
        for offset, content in parts:
            if len(content) >= PAGE_BYTES:
                long.append((offset, torch.frombuffer(bytearray(content), dtype=torch.uint8)))
            elif content:
                self._rest.append((offset, content))
        self.write(long)

    def commit(self) -> None:
        """Puts it on storage, and then under its name."""
        self._write_rest()
        with collector_resumed():
            self._output.commit()

    def _write_from(self, device: torch.device, extents: Sequence[Extent], with_checksums: bool) -> list[int]:
        cuts = [_whole_pages(offset, tensor.nbytes) for offset, tensor in extents]
        ends = [  # what fills no page: of which extent, and from where to where in it
            (i, begin, end)
            for i, ((_, tensor), cut) in enumerate(zip(extents, cuts, strict=True))
            for begin, end in ((0, cut[0]), (cut[1], tensor.nbytes))
            if begin < end
        ]
        contents = _contents_of([extents[i][1][begin:end] for i, begin, end in ends])
        self._rest += [(extents[i][0] + begin, content) for (i, begin, _), content in zip(ends, contents, strict=True)]
        checksums = self._write_where_it_lies(
            device,
            [offset + begin for (offset, _), (begin, _) in zip(extents, cuts, strict=True)],
            [end - begin for begin, end in cuts],
            [tensor.data_ptr() + begin for (_, tensor), (begin, _) in zip(extents, cuts, strict=True)],
            with_checksums,
        )
        if not with_checksums:
            return []
        parts = [[(checksum, end - begin)] for checksum, (begin, end) in zip(checksums, cuts, strict=True)]
        for (i, begin, _), content in zip(ends, contents, strict=True):
            parts[i].insert(0 if begin == 0 else len(parts[i]), (zlib.crc32(content), len(content)))
        return [crc32_of_all(*one) for one in parts]

    def _write_where_it_lies(
        self,
        device: torch.device,
        offsets: Sequence[int],
        sizes_bytes: Sequence[int],
        addresses: Sequence[int],
        with_checksums: bool,
    ) -> list[int]:
        shared = engine.kept_engine(self._options, device)
        wanted = np.array(offsets, np.int64), np.array(sizes_bytes, np.int64), np.array(addresses, np.uint64)
        before = shared.mark(engine.stream_of(device))
        with collector_resumed():
            checksums = self._output.write(shared, *wanted, with_checksums, before, True)
        return checksums.tolist()

    def _write_rest(self) -> None:
        """What was remembered, in whole pages, whose other bytes are zeros."""
        places: dict[int, int] = {}  # of each page, in the memory that it is written from
        for offset, content in sorted(self._rest):
            for page in range(offset // PAGE_BYTES, -(-(offset + len(content)) // PAGE_BYTES)):
                places.setdefault(page, len(places) * PAGE_BYTES)
        if not places:
            return
        memory = mmap.mmap(-1, len(places) * PAGE_BYTES)
        for offset, content in self._rest:
            begin = places[offset // PAGE_BYTES] + offset % PAGE_BYTES
            memory[begin : begin + len(content)] = content
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        runs = []
        for _, run in itertools.groupby(places, key=lambda page: page * PAGE_BYTES - places[page]):
            pages = list(run)
            offset, end = pages[0] * PAGE_BYTES, min((pages[-1] + 1) * PAGE_BYTES, self._size_bytes)
            runs.append((offset, end - offset, flat.data_ptr() + places[pages[0]]))
        self._write_where_it_lies(flat.device, *zip(*runs, strict=True), with_checksums=False)


def _whole_pages(offset: int, size_bytes: int) -> tuple[int, int]:
    """Where in an extent the first whole page of the file begins and the last one ends; without one, its end twice."""
    begin = -offset % PAGE_BYTES
    end = (offset + size_bytes) // PAGE_BYTES * PAGE_BYTES - offset
    return (begin, end) if begin < end else (size_bytes, size_bytes)


def _contents_of(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Of short tensors of one device (uint8, one dimension), in one copy."""
    ends = list(itertools.accumulate(tensor.nbytes for tensor in tensors))
    joined = torch.cat(list(tensors)).cpu().numpy().tobytes() if tensors else b""
    return [joined[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def crc32_of_all(*parts: tuple[int, int]) -> int:
    """The CRC-32 of what follows one another, from that and the length of each."""
    if len(parts) == 1:
        return parts[0][0]
    return functools.reduce(lambda joined, part: engine.crc32_joined(joined, *part), parts, 0)


def reached(flat: torch.Tensor) -> torch.Tensor:
    """On a device that the engine works on: torch brings what is elsewhere to the CPU."""
    return flat if engine.reaches(flat.device) else flat.cpu()


def make_folder(path: str) -> None:
    """The folder and those above it, on storage."""
    if os.path.isdir(path):
        return
    above = os.path.dirname(os.path.abspath(path))
    make_folder(above)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    sync_folder(above)


def sync_folder(path: str) -> None:
    """The names in it are on storage when this returns."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
