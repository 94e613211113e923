"""`FileWriter`: writes tensors into a file that appears when it is complete."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future

import numpy as np
import torch

from gdsdata.checkpoint.gc_pause import collector_resumed
from gdsdata.checkpoint.partial_pages import PAGE_BYTES, PartialPages
from gdsdata.checkpoint.threads import CallThreads
from gdsdata.io import engine
from gdsdata.io.options import EngineOptions
from gdsdata.progress_bars import current

Extent = tuple[int, torch.Tensor]  # where it goes in the file, and its bytes: uint8, one dimension, contiguous

# Matches what csrc/base/replacement adds to the name of a temporary file, and what versions up to
# 0.1 added.
TEMPORARY = r"\.([0-9a-f]{16}-[0-9a-f]{8}|[0-9]+-[0-9]+)\.tmp"

# Written in one call. Two calls at a time, so that storage always has the next batch.
_BATCH_BYTES = 64 << 20
_BATCHES_AT_A_TIME = 2
_LONG_BYTES = 1 << 20  # shorter contents of `write_bytes` pass through `PartialPages`
# A gap of at most this size is written with the extents around it, whatever is known of it: two
# separate writes cost a disk 0.1 ms.
_SHORT_GAP_BYTES = 64 << 10
_PAGES_BYTES = 16 << 20  # partial pages are written when so many bytes of them are whole


def prepare_engine(options: EngineOptions) -> None:
    """Have the engine allocate its memory while the caller still lays out a file."""
    # That of the CPU writes the headers even if all tensors are on a GPU.
    engine.kept_engine(options, torch.device("cpu")).prepare()


class FileWriter:
    """Writes a file that replaces another one when it is complete.

    See csrc/engine/whole.h.

    Used by ``with``. Until `commit`, the name has what was there before; without `commit`, nothing
    is left. Several threads may call `write`; the other methods belong to one thread. It owns the
    temporary file.

    Args:
        path: the file's name.
        size_bytes: the size that the file will have.
        options: of the engine.
        descriptor: of an open file, which is written in place; ``path`` is for messages. None: a
            new file.

    Raises:
        IoError: the file cannot be created, or the disk is full.
    """

    def __init__(self, path: str, size_bytes: int, options: EngineOptions, descriptor: int | None = None) -> None:
        if descriptor is None:
            self._output = engine.Output(path, size_bytes)
        else:
            self._output = engine.Output(descriptor, path, size_bytes)
        self._size_bytes, self._options = size_bytes, options
        self._pages = PartialPages()  # to be written later
        self._long: list[Extent] = []  # whole pages of `write_bytes`, written by `commit`
        self._bar = current()
        self._bar.expect(size_bytes)

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        del self._output  # now: an error's traceback may live longer

    def write(self, extents: Sequence[Extent]) -> list[int]:
        """Write extents.

        No other call may write into a gap of 64 KiB or less between two of them.

        Whole pages of the file are written now; `commit` writes the rest, as whole pages. Parts of
        pages would go through the page cache, and to storage one by one when the file is synced.
        From the CPU's memory, short gaps are written together with the extents around them, and by
        `commit` again if a part of such a page arrived later.

        Args:
            extents: where each goes, and its bytes.

        Returns:
            The CRC-32 of each extent.

        Stream semantics: bytes on a GPU are read after the current work of its current stream.
        """
        with collector_resumed():
            gaps = self._held_gaps([(offset, tensor.nbytes) for offset, tensor in extents])
            checksums = self._writer_of(extents, gaps)()
            self._release_gaps(extents, gaps)
            self._write_whole_pages()
            return checksums

    def write_in_batches(
        self, extents: Iterable[Extent], places: Sequence[tuple[int, int]] | None = None
    ) -> Generator[int, None, None]:
        """Write extents as `write` does, and yield the CRC-32 of each.

        The caller handles one CRC-32 while later extents are written.

        Args:
            extents: each is asked for when it is due.
            places: where each extent goes, and its size in bytes; None: ``extents`` is a sequence.

        Closing the generator cancels batches that have not begun, and waits for those that have.
        """
        if places is None:
            extents = list(extents)
            places = [(offset, tensor.nbytes) for offset, tensor in extents]
        gaps = self._held_gaps(places)
        begun: deque[tuple[list[Extent], Future[list[int]]]] = deque()

        def checksums_of_first() -> list[int]:
            batch, writing = begun.popleft()
            with collector_resumed():
                try:
                    checksums = writing.result()
                finally:
                    del writing  # it keeps its error, whose traceback keeps this frame, and so the state
                self._release_gaps(batch, gaps)
                self._write_whole_pages()
            self._bar.add(sum(tensor.nbytes for _, tensor in batch))
            return checksums

        threads = CallThreads(_BATCHES_AT_A_TIME, "gdsdata-write")
        try:
            for batch in _batches(extents):  # a batch in progress holds copies of its short extents
                begun.append((batch, threads.submit(self._writer_of(batch, gaps))))
                if len(begun) > _BATCHES_AT_A_TIME:
                    yield from checksums_of_first()
            while begun:
                yield from checksums_of_first()
        finally:
            threads.shutdown()

    def write_bytes(self, parts: Iterable[tuple[int, bytes]]) -> None:
        """Take bytes that `commit` writes.

        Args:
            parts: the offset in the file, and the bytes.
        """
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
        """Write what is left, sync the file, and rename it.

        The file is on storage under its name when this returns.

        Raises:
            IoError: the file cannot be written, or the disk is full.
        """
        with collector_resumed():
            self._write_remembered()
            self._output.commit()

    def _writer_of(self, extents: Sequence[Extent], gaps: Mapping[int, int]) -> Callable[[], list[int]]:
        """Return a call that writes extents, and that any thread may make.

        The bytes are read after the current work of this thread's streams.

        The call returns the CRC-32 of each extent.
        """
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
        ends = [  # what fills no page: the index of the extent, and where the part begins and ends in it
            (i, begin, end)
            for i, ((_, tensor), cut) in enumerate(zip(extents, cuts, strict=True))
            for begin, end in ((0, cut[0]), (cut[1], tensor.nbytes))
            if begin < end
        ]
        crc32_of_ends = []
        for (i, begin, _), content in zip(
            ends, _contents_of([_part_of(extents[i][1], begin, end) for i, begin, end in ends]), strict=True
        ):
            self._pages.add(extents[i][0] + begin, content)
            crc32_of_ends.append(zlib.crc32(content))
        whole: list[Extent] = []
        places = []  # of each extent with whole pages: its index, and that in ``whole``, which has gaps too
        for i, ((offset, tensor), (begin, end)) in enumerate(zip(extents, cuts, strict=True)):
            if begin == end:
                continue
            gap = gaps.get(offset + begin) if device.type == "cpu" else None
            if gap is not None:
                whole.append((gap, torch.frombuffer(self._pages.take(gap, offset + begin), dtype=torch.uint8)))
            places.append((i, len(whole)))
            whole.append((offset + begin, _part_of(tensor, begin, end)))
        write = self._writer_where_it_lies(device, whole, with_checksums=True) if whole else list

        def write_and_join() -> list[int]:
            checksums = write()
            parts: list[list[tuple[int, int]]] = [[] for _ in extents]
            for i, place in places:
                parts[i].append((checksums[place], cuts[i][1] - cuts[i][0]))
            for (i, begin, end), crc32 in zip(ends, crc32_of_ends, strict=True):
                parts[i].insert(0 if begin == 0 else len(parts[i]), (crc32, end - begin))
            return [crc32_of_all(*one) for one in parts]

        return write_and_join

    def _held_gaps(self, places: Sequence[tuple[int, int]]) -> dict[int, int]:
        """Return `_short_gaps`, and hold their pages until `_release_gaps`.

        These pages are written with the extents.
        """
        gaps = _short_gaps(places)
        for end, begin in gaps.items():
            self._pages.hold(begin, end)
        return gaps

    def _release_gaps(self, extents: Sequence[Extent], gaps: Mapping[int, int]) -> None:
        for offset, tensor in extents:
            begin, end = _whole_pages(offset, tensor.nbytes)
            if begin < end and offset + begin in gaps:
                self._pages.release(gaps[offset + begin], offset + begin)

    def _write_whole_pages(self) -> None:
        """Write the partial pages that are whole, if there are enough of them."""
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
            checksums = self._output.write(
                engine=shared,
                offset=offsets,
                length=sizes_bytes,
                memory=[tensor for _, tensor in extents],
                place=np.zeros_like(offsets),
                with_checksums=with_checksums,
                before=before,
                background=True,
                stall_timeout_s=self._options.stall_timeout_s,
            )
            return checksums.tolist()

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


def _short_gaps(places: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Return the short gaps between whole pages of extents.

    For each, the key is where it ends in the file, and the value where it begins.
    """
    cuts = [(offset, *_whole_pages(offset, size_bytes)) for offset, size_bytes in places]
    whole = sorted((offset + begin, offset + end) for offset, begin, end in cuts if begin < end)
    return {begin: end for (_, end), (begin, _) in itertools.pairwise(whole) if 0 < begin - end <= _SHORT_GAP_BYTES}


def _part_of(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return ``tensor[begin:end]``, of uint8: itself if that is all, because a view takes time."""
    return tensor if end - begin == tensor.nbytes else tensor[begin:end]


def _whole_pages(offset: int, size_bytes: int) -> tuple[int, int]:
    """Return where an extent's first whole page begins and its last one ends.

    Offsets are counted in the extent; the pages are those of the file.

    Without a whole page, both are the end of the extent.
    """
    begin = -offset % PAGE_BYTES
    end = (offset + size_bytes) // PAGE_BYTES * PAGE_BYTES - offset
    return (begin, end) if begin < end else (size_bytes, size_bytes)


def _contents_of(tensors: Sequence[torch.Tensor]) -> list[memoryview]:
    """Return the bytes of short tensors on one device, by one copy.

    The tensors are uint8, of one dimension.
    """
    ends = list(itertools.accumulate(tensor.nbytes for tensor in tensors))
    joined = torch.cat(list(tensors)).cpu().numpy().data if tensors else memoryview(b"")
    return [joined[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def crc32_of_all(*parts: tuple[int, int]) -> int:
    """Return the CRC-32 of joined parts.

    For each part, the CRC-32 and the length in bytes are given.
    """
    if len(parts) == 1:
        return parts[0][0]
    return functools.reduce(lambda joined, part: engine.crc32_joined(joined, *part), parts, 0)


def reached(flat: torch.Tensor) -> torch.Tensor:
    """Return a tensor where the engine can read it.

    That is the CPU, if the engine does not reach the tensor's device.
    """
    return flat if engine.reaches(flat.device) else flat.cpu()
