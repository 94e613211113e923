"""From tensors into one file, that is there whole when all is done and not at all before."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from gdsdata.checkpoint.pages import PAGE_BYTES, Pages
from gdsdata.checkpoint.pause import collector_resumed
from gdsdata.checkpoint.threads import submit_or_call
from gdsdata.io import engine
from gdsdata.io.options import EngineOptions

Extent = tuple[int, torch.Tensor]  # where it goes in the file, and its bytes: uint8, one dimension, contiguous

# What csrc/base/replacement adds to a name that is not too long for it, and what versions up to 0.1 added.
TEMPORARY = r"\.([0-9a-f]{16}-[0-9a-f]{8}|[0-9]+-[0-9]+)\.tmp"

# So much is written in one go, and two of those at a time, so that storage always has the next.
_BATCH_BYTES = 64 << 20
_BATCHES_AT_A_TIME = 2
_LONG_BYTES = 1 << 20  # of `write_bytes`: what is shorter goes by way of pages
# Between two extents, such a gap is written with them, whatever of it is known: a break costs a disk 0.1 ms.
_SHORT_GAP_BYTES = 64 << 10
# When so many bytes of pages are whole that no extent fills by itself, they are written.
_PAGES_BYTES = 16 << 20


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
        self._pages = Pages()  # still to be written
        self._long: list[Extent] = []  # whole pages of `write_bytes`

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, *_: object) -> None:
        self._output = None  # now, and not when an error's traceback goes

    def write(self, extents: Sequence[Extent]) -> list[int]:
        """Each extent; the CRC-32 of each. On a GPU it comes behind the current stream's work.

        Whole pages of the file are written now. The rest is remembered, and `commit` writes its pages whole: parts of
        pages would go through the page cache, and to storage one by one when the file is synced. From the CPU's memory,
        what lies between two extents is written too, so that all is in one piece: once more by `commit`, where a part
        of a page came later. So nobody else's extent may lie there.
        """
        with collector_resumed():
            gaps = self._held_gaps(extents)
            checksums = self._writer_of(extents, gaps)()
            self._release_gaps(extents, gaps)
            self._write_whole_pages()
            return checksums

    def written(self, extents: Sequence[Extent]) -> Iterator[int]:
        """The same, one CRC-32 after the other: what the caller does with them is done while others are written.

        When it is closed, no more is written than has been begun, and that is waited for.
        """
        gaps = self._held_gaps(extents)
        begun: deque[tuple[list[Extent], Future[list[int]]]] = deque()

        def checksums_of_first() -> list[int]:
            batch, writing = begun.popleft()
            with collector_resumed():
                checksums = writing.result()
                self._release_gaps(batch, gaps)
                self._write_whole_pages()
            return checksums

        with ThreadPoolExecutor(_BATCHES_AT_A_TIME, thread_name_prefix="gdsdata-write") as threads:
            try:
                for batch in _batches(extents):  # what is begun has its short extents in memory once more
                    begun.append((batch, submit_or_call(threads, self._writer_of(batch, gaps))))
                    if len(begun) > _BATCHES_AT_A_TIME:
                        yield from checksums_of_first()
                while begun:
                    yield from checksums_of_first()
            finally:
                for _, writing in begun:
                    writing.cancel()

    def write_bytes(self, parts: Iterable[tuple[int, bytes]]) -> None:
        """Parts, and where they go in the file. `commit` writes them."""
        for offset, content in parts:
            begin, end = _whole_pages(offset, len(content)) if len(content) >= _LONG_BYTES else (0, 0)
            if begin < end:
                whole = torch.frombuffer(bytearray(content[begin:end]), dtype=torch.uint8)
                self._long.append((offset + begin, whole))
            self._pages.add(offset, content[:begin])
            self._pages.add(offset + end, content[end:])
            if self._pages.whole_bytes >= _PAGES_BYTES:
                self._write_whole_pages()

    def commit(self) -> None:
        """Puts it on storage, and then under its name."""
        with collector_resumed():
            self._write_remembered()
            self._output.commit()

    def _writer_of(self, extents: Sequence[Extent], gaps: Mapping[int, int]) -> Callable[[], list[int]]:
        """What writes them, in any thread, behind what the current stream of this one has been given."""
        by_device = []
        for device in dict.fromkeys(tensor.device for _, tensor in extents):
            places = [i for i, (_, tensor) in enumerate(extents) if tensor.device == device]
            by_device.append((places, self._writer_from(device, [extents[i] for i in places], gaps)))

        def write() -> list[int]:
            checksums = [0] * len(extents)
            for places, writer in by_device:
                for i, checksum in zip(places, writer(), strict=True):
                    checksums[i] = checksum
            return checksums

        return write

    def _writer_from(
        self, device: torch.device, extents: Sequence[Extent], gaps: Mapping[int, int]
    ) -> Callable[[], list[int]]:
        cuts = [_whole_pages(offset, tensor.nbytes) for offset, tensor in extents]
        ends = [  # what fills no page: of which extent, and from where to where in it
            (i, begin, end)
            for i, ((_, tensor), cut) in enumerate(zip(extents, cuts, strict=True))
            for begin, end in ((0, cut[0]), (cut[1], tensor.nbytes))
            if begin < end
        ]
        crc32_of_ends = []
        for (i, begin, _), content in zip(
            ends, _contents_of([extents[i][1][begin:end] for i, begin, end in ends]), strict=True
        ):
            self._pages.add(extents[i][0] + begin, content)
            crc32_of_ends.append(zlib.crc32(content))
        whole: list[Extent] = []
        places = []  # of the extents in it; what lies between them is in it too
        for (offset, tensor), (begin, end) in zip(extents, cuts, strict=True):
            gap = gaps.get(offset + begin) if device.type == "cpu" and begin < end else None
            if gap is not None:
                whole.append((gap, torch.frombuffer(self._pages.take(gap, offset + begin), dtype=torch.uint8)))
            places.append(len(whole))
            whole.append((offset + begin, tensor[begin:end]))
        write = self._writer_where_it_lies(device, whole, with_checksums=True)

        def write_and_join() -> list[int]:
            checksums = write()
            parts = [[(checksums[i], end - begin)] for i, (begin, end) in zip(places, cuts, strict=True)]
            for (i, begin, end), crc32 in zip(ends, crc32_of_ends, strict=True):
                parts[i].insert(0 if begin == 0 else len(parts[i]), (crc32, end - begin))
            return [crc32_of_all(*one) for one in parts]

        return write_and_join

    def _held_gaps(self, extents: Sequence[Extent]) -> dict[int, int]:
        """`_short_gaps`, whose pages nobody else writes until `_release_gaps`: they are written with the extents."""
        gaps = _short_gaps(extents)
        for end, begin in gaps.items():
            self._pages.hold(begin, end)
        return gaps

    def _release_gaps(self, extents: Sequence[Extent], gaps: Mapping[int, int]) -> None:
        for offset, tensor in extents:
            begin, end = _whole_pages(offset, tensor.nbytes)
            if begin < end and offset + begin in gaps:
                self._pages.release(gaps[offset + begin], offset + begin)

    def _write_whole_pages(self) -> None:
        """If there are enough of them."""
        if self._pages.whole_bytes >= _PAGES_BYTES:
            runs = [(offset, torch.frombuffer(pages, dtype=torch.uint8)) for offset, pages in self._pages.take_whole()]
            self._writer_where_it_lies(torch.device("cpu"), runs, with_checksums=False)()

    def _write_remembered(self) -> None:
        extents = list(self._long)
        for offset, pages in self._pages.take_runs():
            extents.append((offset, torch.frombuffer(pages, dtype=torch.uint8)[: self._size_bytes - offset]))
        if extents:
            self._writer_where_it_lies(torch.device("cpu"), extents, with_checksums=False)()

    def _writer_where_it_lies(
        self, device: torch.device, extents: Sequence[Extent], with_checksums: bool
    ) -> Callable[[], list[int]]:
        shared = engine.kept_engine(self._options, device)
        before = shared.mark(engine.stream_of(device))

        def write() -> list[int]:
            offsets = np.array([offset for offset, _ in extents], np.int64)
            sizes_bytes = np.array([tensor.nbytes for _, tensor in extents], np.int64)
            return self._output.write(
                *(shared, offsets, sizes_bytes, [tensor for _, tensor in extents], np.zeros_like(offsets)),
                *(with_checksums, before, True),
                stall_timeout_s=self._options.stall_timeout_s,
            ).tolist()

        return write


def _batches(extents: Iterable[Extent]) -> Iterator[list[Extent]]:
    batch: list[Extent] = []
    size_bytes = 0
    for extent in extents:
        batch.append(extent)
        size_bytes += extent[1].nbytes
        if size_bytes >= _BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _short_gaps(extents: Sequence[Extent]) -> dict[int, int]:
    """Those between whole pages of the extents: where they end in the file, and begin. Nothing else has whole pages."""
    cuts = [(offset, *_whole_pages(offset, tensor.nbytes)) for offset, tensor in extents]
    whole = sorted((offset + begin, offset + end) for offset, begin, end in cuts if begin < end)
    return {begin: end for (_, end), (begin, _) in itertools.pairwise(whole) if 0 < begin - end <= _SHORT_GAP_BYTES}


def _whole_pages(offset: int, size_bytes: int) -> tuple[int, int]:
    """Where in an extent the first whole page of the file begins and the last one ends; without one, its end twice."""
    begin = -offset % PAGE_BYTES
    end = (offset + size_bytes) // PAGE_BYTES * PAGE_BYTES - offset
    return (begin, end) if begin < end else (size_bytes, size_bytes)


def _contents_of(tensors: Sequence[torch.Tensor]) -> list[memoryview]:
    """Of short tensors of one device (uint8, one dimension), in one copy."""
    ends = list(itertools.accumulate(tensor.nbytes for tensor in tensors))
    joined = memoryview(torch.cat(list(tensors)).cpu().numpy()) if tensors else memoryview(b"")
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
