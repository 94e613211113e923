"""Archives of one tensor each, one after another in a file, as `torch.save` writes them."""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gdsdata.checkpoint.file_writer import Extent, reached
from gdsdata.checkpoint.partial_pages import PAGE_BYTES
from gdsdata.checkpoint.stored import bytes_of, contiguous_stride
from gdsdata.checkpoint.torch_zip import torch_config, zip_layout
from gdsdata.checkpoint.torch_zip.gathering import IMAGE_BYTES, SHORT_BYTES, gathered
from gdsdata.checkpoint.torch_zip.pickling import pickle_tensor
from gdsdata.checkpoint.torch_zip.state_layout import FORMAT_VERSION, PREFIX
from gdsdata.checkpoint.writers import writer_of
from gdsdata.io import engine
from gdsdata.io.options import EngineOptions


class _Form(NamedTuple):
    """Everything of an archive but the tensor's bytes. Tensors that are alike have the same.

    Attributes:
        size_bytes: of the tensor.
        stride: of its elements in the file.
        head, tail: the archive before and after the tensor's bytes, with zeros for their CRC-32.
        crc32_in_head, crc32_in_tail: where that goes.
    """

    size_bytes: int
    stride: tuple[int, ...]
    head: bytes
    tail: bytes
    crc32_in_head: int
    crc32_in_tail: int


class TensorArchive(NamedTuple):
    """An archive.

    Attributes:
        begin: where it begins in the file.
        tensor: its tensor, which may have gaps between its elements.
        form: the rest of it.
    """

    begin: int
    tensor: torch.Tensor
    form: _Form

    @property
    def offset(self) -> int:
        """Where the tensor's bytes lie in the file: at a whole page, if they fill one."""
        return self.begin + len(self.form.head)

    @property
    def stride(self) -> tuple[int, ...]:
        """The stride of the elements in the file, which has no gaps."""
        return self.form.stride

    @property
    def end(self) -> int:
        """Where the archive ends in the file."""
        return self.begin + len(self.form.head) + self.form.size_bytes + len(self.form.tail)

    @property
    def is_short(self) -> bool:
        # The engine copies whole pages from a GPU, and torch shorter tensors.
        return self.form.size_bytes < (SHORT_BYTES if self.tensor.is_cpu else PAGE_BYTES)

    def without_gaps(self) -> torch.Tensor:
        """Return the tensor if its memory is as in the file, else a copy."""
        tensor = self.tensor
        if tensor.stride() == self.stride and not (tensor.is_conj() or tensor.is_neg()):
            return tensor
        return torch.empty_strided(tensor.shape, self.stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

    def frame(self, crc32: int) -> tuple[bytes, bytes]:
        """Return what comes before and after the tensor's bytes."""
        _, _, head, tail, in_head, in_tail = self.form
        noted = crc32.to_bytes(4, "little")
        return head[:in_head] + noted + head[in_head + 4 :], tail[:in_tail] + noted + tail[in_tail + 4 :]


def archive_of(tensor: torch.Tensor, begin: int) -> TensorArchive:
    """Return the archive of a tensor that begins at an offset of its file.

    A tensor without gaps keeps its order of dimensions. Another one is contiguous in the file.
    """
    stride = tensor.stride() if _is_dense(tensor) else contiguous_stride(tensor.shape)
    return TensorArchive(begin, tensor, _form_of(tensor.dtype, tensor.shape, stride, tensor.nbytes, begin % PAGE_BYTES))


def _is_dense(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


@functools.lru_cache(maxsize=4096)  # layers repeat, and archives begin at multiples of few bytes
def _form_of(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...], size_bytes: int, begin: int) -> _Form:
    contents = [pickle_tensor(dtype, tuple(shape), stride), sys.byteorder.encode(), FORMAT_VERSION]
    small = torch_config.SMALL_ALIGNMENT
    records = [
        (PREFIX + name, len(content), small)
        for name, content in zip(("data.pkl", "byteorder", "version"), contents, strict=True)
    ]
    records.append((f"{PREFIX}data/0", size_bytes, PAGE_BYTES if size_bytes >= PAGE_BYTES else small))
    placed = zip_layout.place(records, begin)
    crc32s = [*map(zlib.crc32, contents), 0]
    headers = [record.header(crc32) for record, crc32 in zip(placed, crc32s, strict=True)]
    head = b"".join(header + content for header, content in zip(headers, [*contents, b""], strict=True))
    entries_before = sum(record.entry_bytes for record in placed[:-1])
    return _Form(
        size_bytes,
        stride,
        head,
        zip_layout.directory(placed, crc32s),
        placed[-1].header_offset + zip_layout.CRC32_IN_HEADER,
        entries_before + zip_layout.CRC32_IN_ENTRY,
    )


def write_archives(
    path: str, archives: Sequence[TensorArchive], others: Sequence[Extent], options: EngineOptions
) -> list[int]:
    """Write one file of archives and of other bytes.

    Args:
        path: of the file.
        archives: the archives, in the order of the file.
        others: the other bytes.
        options: of the engine.

    Returns:
        The CRC-32 of each tensor.

    Raises:
        IoError: the file cannot be written, or the disk is full.
    """
    ends = [*(one.end for one in archives[-1:]), *(offset + content.nbytes for offset, content in others)]
    # In the order of the file, so that an object is sent as it grows.
    parts: list[list[TensorArchive] | Extent] = sorted([*_groups(archives), *others], key=lambda one: _place_of(one)[0])
    checksums: list[int] = []
    of_groups: list[list[int]] = []  # noted when a group is gathered

    def extents() -> Iterator[Extent]:
        for part in parts:
            if isinstance(part, tuple):
                yield part
            elif part[0].is_short:
                image, found = _image_of(part)
                of_groups.append(found)
                yield part[0].begin, torch.from_numpy(image)
            else:
                yield part[0].offset, reached(bytes_of(part[0].without_gaps()))

    with writer_of(path, max(ends, default=0), options) as writer:
        with closing(writer.write_in_batches(extents(), [_place_of(part) for part in parts])) as written:
            for part, crc32 in zip(parts, written, strict=True):
                if isinstance(part, tuple):
                    continue  # these need no checksum
                if part[0].is_short:
                    checksums += of_groups.pop(0)
                    continue
                (one,) = part
                head, tail = one.frame(crc32)
                writer.write_bytes([(one.begin, head), (one.end - len(tail), tail)])
                checksums.append(crc32)
        writer.commit()
    return checksums


def _groups(archives: Iterable[TensorArchive]) -> Iterator[list[TensorArchive]]:
    """Divide archives into groups that are written as one: short ones that touch, or one other."""
    group: list[TensorArchive] = []
    for one in archives:
        touches = bool(group) and group[-1].end == one.begin and one.end - group[0].begin <= IMAGE_BYTES
        if group and not (touches and one.is_short and group[0].is_short):
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _place_of(part: list[TensorArchive] | Extent) -> tuple[int, int]:
    """Return where a group or other bytes go in the file, and their size in bytes."""
    if isinstance(part, tuple):
        return part[0], part[1].nbytes
    first = part[0]
    return (first.begin, part[-1].end - first.begin) if first.is_short else (first.offset, first.form.size_bytes)


def _image_of(group: list[TensorArchive]) -> tuple[NDArray[np.uint8], list[int]]:
    """Return the bytes of short archives that touch, and the CRC-32 of each tensor."""
    begin = group[0].begin
    sizes_bytes = np.array([one.form.size_bytes for one in group], np.int64)
    places = np.array([one.offset for one in group], np.int64) - begin
    tensors = [one.without_gaps() for one in group]
    addresses = np.array([one.data_ptr() for one in tensors], np.uint64)
    elsewhere = {i: bytes_of(one) for i, one in enumerate(tensors) if not one.is_cpu}
    image = gathered(group[-1].end - begin, addresses, sizes_bytes, places, elsewhere)
    checksums = engine.crc32_of_parts(image, places, sizes_bytes).tolist()
    octets = image.data
    for one, crc32 in zip(group, checksums, strict=True):
        head, tail = one.frame(crc32)
        octets[one.begin - begin : one.begin - begin + len(head)] = head
        octets[one.end - begin - len(tail) : one.end - begin] = tail
    return image, checksums
