"""Archives as `torch.save` writes them, with storages on whole pages.

They are laid out before the first byte is written.
"""

from __future__ import annotations

import collections
import itertools
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gdsdata.checkpoint.file_writer import Extent, FileWriter, reached
from gdsdata.checkpoint.partial_pages import PAGE_BYTES
from gdsdata.checkpoint.stored import bytes_of_storage
from gdsdata.checkpoint.torch_zip import torch_config, zip_layout
from gdsdata.checkpoint.torch_zip.pickling import Pickled, pickle_with_storages
from gdsdata.checkpoint.torch_zip.state_layout import FORMAT_VERSION, PREFIX, SHORT_BYTES, Checksums, StateLayout
from gdsdata.io import engine
from gdsdata.io.options import EngineOptions

# Several are in memory at a time.
_STRETCH_BYTES = 4 << 20


def save(value: Any, path: str, options: EngineOptions) -> None:
    """Write what `torch.save` would write, with its storages at multiples of a page.

    Raises:
        RuntimeError: storages that share memory are counted in different dtypes, which the format
            cannot express.
        IoError: the file cannot be written, or the disk is full.
        pickle.PicklingError, TypeError, AttributeError: a value cannot be pickled.
    """
    pickled = pickle_with_storages(value)
    storages = pickled.storages
    alignment, has_checksums = torch_config.alignment_bytes(), torch_config.has_checksums()
    layout = StateLayout(pickled.pickle, pickled.sizes_bytes, alignment, has_checksums)
    checksums = np.zeros(len(storages), np.uint32)
    stretches = list(_stretches(layout, pickled.devices < 0))

    def extents() -> Iterator[Extent]:
        for one in stretches:
            if one.is_of_short_ones:
                yield _with_headers(layout, pickled, one, checksums)
            else:
                yield one.begin, reached(bytes_of_storage(storages[one.first]))

    with FileWriter(path, layout.end, options) as writer:
        writer.write_bytes(layout.contents())
        places = [(one.begin, one.end - one.begin) for one in stretches]
        with closing(writer.write_in_batches(extents(), places)) as written:
            for one, crc32 in zip(stretches, written, strict=True):
                if not one.is_of_short_ones:
                    checksums[one.first] = crc32
                    writer.write_bytes([layout.header(one.first, crc32)])
        writer.write_bytes([layout.directory(checksums)])
        writer.commit()


class _Stretch(NamedTuple):
    """Bytes of a state's archive that are written as one.

    Attributes:
        first, last: the storages that they contain, from ``first`` to ``last - 1``.
        begin, end: where they lie in the file. Those of short storages begin with a header.
        is_of_short_ones: whether they are short storages with their headers, or one other storage.
    """

    first: int
    last: int
    begin: int
    end: int
    is_of_short_ones: bool


def _stretches(layout: StateLayout, is_on_cpu: NDArray[np.bool_]) -> Iterator[_Stretch]:
    """Divide an archive's storages into stretches, in the order of the file."""
    records = layout.storages
    # The engine copies whole pages from a GPU, and torch shorter storages.
    is_short = records.sizes_bytes < np.where(is_on_cpu, SHORT_BYTES, PAGE_BYTES)
    ends = records.offsets + records.sizes_bytes
    first = 0
    for last in [*(np.flatnonzero(np.diff(is_short)) + 1).tolist(), len(records)]:
        while first < last:
            if is_short[first]:
                begin = int(records.header_offsets[first])
                fits = int(np.searchsorted(ends, begin + _STRETCH_BYTES, side="right"))
                end = max(min(fits, last), first + 1)
                yield _Stretch(first, end, begin, int(ends[end - 1]), True)
            else:
                end = first + 1
                yield _Stretch(first, end, int(records.offsets[first]), int(ends[first]), False)
            first = end


def _with_headers(layout: StateLayout, pickled: Pickled, stretch: _Stretch, checksums: Checksums) -> Extent:
    """Return short storages with their headers in memory, and note their checksums."""
    first, last, begin, end, _ = stretch
    image = np.empty(end - begin, np.uint8)
    sizes_bytes, places = layout.storages.sizes_bytes[first:last], layout.storages.offsets[first:last] - begin
    addresses, copies = _on_cpu(pickled, first, last)
    engine.copy_parts(addresses, sizes_bytes, image, places)
    del copies
    checksums[first:last] = engine.crc32_of_parts(image, places, sizes_bytes)
    layout.stamp(image, begin, first, last, checksums)
    return begin, torch.from_numpy(image)


def _on_cpu(pickled: Pickled, first: int, last: int) -> tuple[NDArray[np.uint64], list[torch.Tensor]]:
    """Return where some storages lie on the CPU, and the memory of those that were copied there."""
    addresses, sizes_bytes = pickled.addresses[first:last].copy(), pickled.sizes_bytes[first:last]
    elsewhere = np.flatnonzero(pickled.devices[first:last] >= 0)
    storages = {int(row): pickled.storages[first + int(row)] for row in elsewhere}
    copies = []
    for device in dict.fromkeys(one.device for one in storages.values()):
        rows = [row for row, one in storages.items() if one.device == device]
        copies.append(torch.cat([bytes_of_storage(storages[row]) for row in rows]).cpu())
        begins = np.cumsum(sizes_bytes[rows]) - sizes_bytes[rows]
        addresses[rows] = copies[-1].data_ptr() + begins
    return addresses, copies


class Layout:
    """Where the parts of an archive go in its file.

    Args:
        pickled: the content of "data.pkl".
        sizes_bytes: the sizes of the storages that it refers to as "0", "1" and so on.
        begin: the offset in the file at which the archive begins, in bytes.
        alignment: of every record, in bytes; records of a page and more lie on whole pages.
        has_checksums: False writes zeros in the place of every CRC-32, as torch does.

    Attributes:
        begin, end: where the archive lies in its file.
        offsets: where its storages lie in the file: on whole pages, but for those shorter than a
            page.
    """

    def __init__(
        self,
        pickled: bytes,
        sizes_bytes: Sequence[int],
        begin: int = 0,
        alignment: int = torch_config.SMALL_ALIGNMENT,
        has_checksums: bool = True,
    ) -> None:
        self._has_checksums = has_checksums
        self._contents = {"data.pkl": pickled, "byteorder": sys.byteorder.encode(), "version": FORMAT_VERSION}
        records = [(f"{PREFIX}{name}", len(content), alignment) for name, content in self._contents.items()]
        for key, size_bytes in enumerate(sizes_bytes):
            records.append((f"{PREFIX}data/{key}", size_bytes, PAGE_BYTES if size_bytes >= PAGE_BYTES else alignment))
        self._placed = zip_layout.place(records, begin)
        self.begin = begin
        self.end = begin + self._placed[-1].end + zip_layout.directory_bytes(self._placed)
        self.offsets = [begin + record.offset for record in self._placed[len(self._contents) :]]

    def frame(self, checksums: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """Yield everything but the storages: offsets in the file, and bytes.

        Args:
            checksums: the CRC-32 of each storage. Each is asked for when the header that holds it
                is due.
        """
        contents = itertools.chain(self._contents.values(), itertools.repeat(b""))
        all_checksums: list[int] = []
        for crc32 in itertools.chain(map(zlib.crc32, self._contents.values()), checksums):
            record = self._placed[len(all_checksums)]
            all_checksums.append(crc32 if self._has_checksums else 0)
            yield self.begin + record.header_offset, record.header(all_checksums[-1]) + next(contents)
        directory = zip_layout.directory(self._placed, all_checksums)
        yield self.end - len(directory), directory


def write_archives(
    path: str,
    archives: Sequence[tuple[Layout, Sequence[torch.Tensor]]],
    others: Sequence[Extent],
    options: EngineOptions,
) -> list[list[int]]:
    """Write one file of archives and of other bytes.

    Args:
        path: of the file.
        archives: the layout of each archive, and its storages (uint8, one dimension).
        others: the other bytes.
        options: of the engine.

    Returns:
        The CRC-32 of each archive's storages.

    Raises:
        IoError: the file cannot be written, or the disk is full.
    """
    ends = [layout.end for layout, _ in archives] + [offset + content.nbytes for offset, content in others]
    storages = [extent for layout, flat in archives for extent in zip(layout.offsets, flat, strict=True)]
    checksums: list[list[int]] = []
    with FileWriter(path, max(ends, default=0), options) as writer:
        with closing(writer.write_in_batches([*storages, *others])) as written:
            for layout, flat in archives:
                checksums.append([])
                writer.write_bytes(layout.frame(_noted(itertools.islice(written, len(flat)), checksums[-1])))
            collections.deque(written, maxlen=0)  # the others' checksums
        writer.commit()
    return checksums


def _noted(values: Iterable[int], noted: list[int]) -> Iterator[int]:
    for value in values:
        noted.append(value)
        yield value
