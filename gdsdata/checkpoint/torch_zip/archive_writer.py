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
from typing import Any

import torch

from gdsdata.checkpoint.file_writer import Extent, FileWriter, reached
from gdsdata.checkpoint.partial_pages import PAGE_BYTES
from gdsdata.checkpoint.stored import bytes_of_storage
from gdsdata.checkpoint.torch_zip import torch_config, zip_layout
from gdsdata.checkpoint.torch_zip.pickling import pickle_with_storages
from gdsdata.io.options import EngineOptions

_PREFIX = "archive/"
_FORMAT_VERSION = b"3\n"  # as torch.save writes it


def save(value: Any, path: str, options: EngineOptions) -> None:
    """Write what `torch.save` would write, with its storages at multiples of a page.

    Raises:
        RuntimeError: storages that share memory are counted in different dtypes, which the format
            cannot express.
        IoError: the file cannot be written, or the disk is full.
        pickle.PicklingError, TypeError, AttributeError: a value cannot be pickled.
    """
    pickled, storages = pickle_with_storages(value)
    flat = [reached(bytes_of_storage(storage)) for storage in storages]
    sizes_bytes = [one.nbytes for one in flat]
    alignment, has_checksums = torch_config.alignment_bytes(), torch_config.has_checksums()
    layout = Layout(pickled, sizes_bytes, alignment=alignment, has_checksums=has_checksums)
    write_archives(path, [(layout, flat)], [], options)


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
        self._contents = {"data.pkl": pickled, "byteorder": sys.byteorder.encode(), "version": _FORMAT_VERSION}
        records = [(f"{_PREFIX}{name}", len(content), alignment) for name, content in self._contents.items()]
        for key, size_bytes in enumerate(sizes_bytes):
            records.append((f"{_PREFIX}data/{key}", size_bytes, PAGE_BYTES if size_bytes >= PAGE_BYTES else alignment))
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
