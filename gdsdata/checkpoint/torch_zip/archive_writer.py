"""Archives as `torch.save` writes them, with storages on whole pages.

They are laid out before the first byte is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gdsdata.checkpoint.file_writer import Extent, reached
from gdsdata.checkpoint.partial_pages import PAGE_BYTES
from gdsdata.checkpoint.stored import bytes_of_storage
from gdsdata.checkpoint.tensor_kinds import check_not_freed
from gdsdata.checkpoint.torch_zip import torch_config
from gdsdata.checkpoint.torch_zip.gathering import IMAGE_BYTES, SHORT_BYTES, gathered
from gdsdata.checkpoint.torch_zip.pickling import Pickled, pickle_with_storages
from gdsdata.checkpoint.torch_zip.state_layout import Checksums, StateLayout
from gdsdata.checkpoint.writers import Writer, writer_of
from gdsdata.io import engine
from gdsdata.io.options import EngineOptions


def save(value: Any, path: str, options: EngineOptions) -> None:
    """Write what `torch.save` would write, with its storages at multiples of a page.

    Raises:
        ValueError: the memory of a tensor was freed.
        RuntimeError: storages that share memory are counted in different dtypes, which the format
            cannot express.
        IoError: the file or object cannot be written, or the disk is full.
        pickle.PicklingError, TypeError, AttributeError: a value cannot be pickled.
    """
    pickled = pickle_with_storages(value)
    if not pickled.sizes_bytes.all():
        check_not_freed(value)
    _write(pickled, lambda size_bytes: writer_of(path, size_bytes, options))


def write(value: Any, writer_for: Callable[[int], Writer]) -> int:
    """Write what `torch.save` would write, also where `save` refuses it.

    Args:
        value: the value.
        writer_for: returns the writer of a file of so many bytes.

    Returns:
        The archive's size in bytes.
    """
    return _write(pickle_with_storages(value), writer_for)


def _write(pickled: Pickled, writer_for: Callable[[int], Writer]) -> int:
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

    with writer_for(layout.end) as writer:
        writer.write_bytes(layout.contents())
        places = [(one.begin, one.end - one.begin) for one in stretches]
        with closing(writer.write_in_batches(extents(), places)) as written:
            for one, crc32 in zip(stretches, written, strict=True):
                if not one.is_of_short_ones:
                    checksums[one.first] = crc32
                    writer.write_bytes([layout.header(one.first, crc32)])
        writer.write_bytes([layout.directory(checksums)])
        writer.commit()
    return layout.end


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
                fits = int(np.searchsorted(ends, begin + IMAGE_BYTES, side="right"))
                end = max(min(fits, last), first + 1)
                yield _Stretch(first, end, begin, int(ends[end - 1]), True)
            else:
                end = first + 1
                yield _Stretch(first, end, int(records.offsets[first]), int(ends[first]), False)
            first = end


def _with_headers(layout: StateLayout, pickled: Pickled, stretch: _Stretch, checksums: Checksums) -> Extent:
    """Return short storages with their headers in memory, and note their checksums."""
    first, last, begin, end, _ = stretch
    addresses, sizes_bytes = pickled.addresses[first:last], pickled.sizes_bytes[first:last]
    places = layout.storages.offsets[first:last] - begin
    on_gpu = np.flatnonzero(pickled.devices[first:last] >= 0).tolist()
    elsewhere = {row: bytes_of_storage(pickled.storages[first + row]) for row in on_gpu}
    image = gathered(end - begin, addresses, sizes_bytes, places, elsewhere)
    checksums[first:last] = engine.crc32_of_parts(image, places, sizes_bytes)
    layout.stamp(image, begin, first, last, checksums)
    return begin, torch.from_numpy(image)
