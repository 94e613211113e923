"""numpy's ``.npy`` files, parsed strictly.

numpy's reader is not used: it takes a hundred microseconds a file.

Source of the format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
(versions 1.0, 2.0, 3.0).
"""

from __future__ import annotations

import ast
import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from gdsdata.errors import CorruptData
from gdsdata.formats.index import Index, first_samples
from gdsdata.formats.parsers import magics
from gdsdata.formats.sample import Sample, torch_equivalent
from gdsdata.storage.heads import read_heads

# Where the length of the dict lies, how it is packed, and how the dict is encoded.
_LAYOUTS = {b"\x01\x00": ("<H", "latin1"), b"\x02\x00": ("<I", "latin1"), b"\x03\x00": ("<I", "utf8")}
_LENGTH_AT = 8
# numpy's own limit (max_header_size): Python's parser is not safe on much longer input.
_LONGEST_DICT_BYTES = 10_000
LONGEST_HEADER_BYTES = 12 + _LONGEST_DICT_BYTES
# numpy pads to a multiple of 64, and 128 hold the header of any array of a few dimensions.
_HEAD_BYTES = 128
# Keeps every offset within int64.
_LARGEST_DATA_BYTES = 2**62


class Header:
    """The header of an npy file, whose bytes of data begin at ``data_offset``."""

    def __init__(self, dtype: np.dtype, fortran_order: bool, shape: tuple[int, ...], data_offset: int) -> None:
        self.dtype, self.fortran_order, self.shape, self.data_offset = dtype, fortran_order, shape, data_offset

    @property
    def data_bytes(self) -> int:
        """Bytes that the data takes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Npy:
    """npy files of every version, order and byte order. A batch is ``(B, *shape)``.

    Args:
        mode: ``"file"``: each file is one sample. ``"row"``: each row of each file along its first
            axis is one.

    Raises:
        ValueError: ``mode`` is neither.
    """

    mode: Literal["file", "row"] = "file"

    def __post_init__(self) -> None:
        if self.mode not in ("file", "row"):
            raise ValueError(f'{self}: mode is "file" (a file is a sample) or "row" (a row of a file is a sample)')

    def index(self, paths: list[str]) -> Index:
        """Read the headers of ``paths``. Bytes behind the data are ignored, as numpy does.

        Raises:
            CorruptData: a header lies, or a file is shorter than its header says.
            ValueError: a pickle, a dtype that torch lacks, samples of unequal shape, dtype or
                order, or rows in Fortran order (whose elements do not lie together).
            FileNotFoundError, IoError: a file is not available.
        """
        heads, size_bytes, mtime_ns = read_heads(paths, _HEAD_BYTES)
        first = read_header(heads[0], paths[0], int(size_bytes[0]))
        sample = self._sample(first, paths[0])
        base_bytes = np.full(len(paths), first.data_offset, np.int64)
        counts = np.full(len(paths), self._count(first), np.int64)
        for i in _unlike(heads, size_bytes, first):
            header = read_header(heads[i], paths[i], int(size_bytes[i]))
            if (other := self._sample(header, paths[i])) != sample:
                raise ValueError(
                    f"samples of unlike {self.mode}s: {_describe(sample)} in {paths[0]}, {_describe(other)} in "
                    f"{paths[i]}; {_remedy(sample, other)}"
                )
            base_bytes[i], counts[i] = header.data_offset, self._count(header)
        return Index(
            paths=paths,
            size_bytes=size_bytes,
            mtime_ns=mtime_ns,
            first_sample=first_samples(counts),
            base_bytes=base_bytes,
            stride_bytes=np.full(len(paths), sample.bytes, np.int64),
            sample=sample,
        )

    def _count(self, header: Header) -> int:
        """Return the samples of a file whose header `_sample` has accepted."""
        return 1 if self.mode == "file" else header.shape[0]

    def _sample(self, header: Header, path: str) -> Sample:
        """Return one sample of a file with this header."""
        if self.mode == "file":
            return Sample(header.dtype, header.shape, header.fortran_order)
        if not header.shape:
            raise ValueError(f'{path} holds a single element, which has no rows: use Npy("file")')
        if header.fortran_order:
            raise ValueError(
                f"{path} is in Fortran order, so the elements of a row of {header.shape} do not lie together: "
                f"save it with numpy.ascontiguousarray first"
            )
        return Sample(header.dtype, header.shape[1:])


def _unlike(heads: list[bytes], size_bytes: np.ndarray, first: Header) -> list[int]:
    """Return the files that lack the first one's header, or are shorter than it says."""
    header = heads[0][: first.data_offset]
    is_alike = np.fromiter((head.startswith(header) for head in heads), bool, len(heads))
    is_alike &= size_bytes >= first.data_offset + first.data_bytes
    return np.flatnonzero(~is_alike).tolist() if len(header) == first.data_offset else list(range(len(heads)))


def _remedy(sample: Sample, other: Sample) -> str:
    """Return what to do about two samples that differ."""
    differ_in_length = sample.shape[1:] == other.shape[1:] and len(sample.shape) == len(other.shape)
    if differ_in_length and sample.dtype == other.dtype and not (sample.fortran_order or other.fortran_order):
        return "save each of them by numpy.savez: arrays in npz files may differ in length, see Fields(ragged=)"
    return "save them alike, or read them as separate datasets"


def _describe(sample: Sample) -> str:
    order = " in Fortran order" if sample.fortran_order else ""
    return f"{sample.dtype.str} of shape {sample.shape}{order}"


def read_header(head: bytes, path: str, size_bytes: int) -> Header:
    """Return the header of ``path``, checked against the file's size.

    Args:
        head: the file's first 12 bytes or more.
        path: of the file.
        size_bytes: of the file.

    Raises:
        CorruptData, ValueError: as `parse_header`; also `CorruptData` for a file shorter than its
            header says.
        FileNotFoundError, IoError: a header longer than ``head`` is not available.
    """
    head_bytes = header_bytes(head, path)
    if head_bytes > len(head):
        (head,), _, _ = read_heads([path], head_bytes)
    header = parse_header(head, path)
    if header.data_offset + header.data_bytes > size_bytes:
        raise CorruptData(
            f"{path}: its npy header says {header.data_bytes} bytes of data at offset {header.data_offset}, but the "
            f"file ends at {size_bytes}; write the file again",
            path,
            header.data_offset,
            header.data_bytes,
        )
    return header


def parse_header(head: bytes, path: str) -> Header:
    """Return the header at the start of an npy file.

    Args:
        head: the file's first bytes, the whole header among them; what lies behind it is not looked
            at.
        path: named in errors.

    Raises:
        CorruptData: ``head`` is no npy header, ends within it, or the header lies or makes no
            sense.
        ValueError: the file is sound but not a tensor: a pickle, records, strings, dates.
    """
    data_offset = header_bytes(head, path)
    if len(head) < data_offset:
        raise _corrupt(path, f"it is {data_offset} bytes long, but ends after {len(head)}", len(head))
    try:
        return _parse(head[:data_offset])
    except CorruptData as reason:
        raise _corrupt(path, str(reason), data_offset) from None
    except ValueError as reason:
        raise ValueError(f"{path}: {reason}") from None


def _corrupt(path: str, reason: str, length: int) -> CorruptData:
    message = f"{path}: its npy header (bytes 0 to {length}) is damaged: {reason}; write the file again"
    return CorruptData(message, path, 0, length)


def header_bytes(head: bytes, path: str) -> int:
    """Return the length of the whole header, which is the offset of the data.

    ``head`` has the file's first 12 bytes.
    """
    if not head.startswith(magics.NPY):
        raise _corrupt(path, f"it starts with {head[:6]!r}, not with {magics.NPY!r}", len(magics.NPY))
    version = head[6:_LENGTH_AT]
    if version not in _LAYOUTS:
        raise _corrupt(path, f"version bytes {version!r} are none of 1.0, 2.0 and 3.0", _LENGTH_AT)
    length_format, _ = _LAYOUTS[version]
    dict_at = _LENGTH_AT + struct.calcsize(length_format)
    if len(head) < dict_at:
        raise _corrupt(path, f"its length takes bytes {_LENGTH_AT} to {dict_at}, but the file ends before", dict_at)
    (dict_bytes,) = struct.unpack_from(length_format, head, _LENGTH_AT)
    if dict_bytes > _LONGEST_DICT_BYTES:
        raise _corrupt(path, f"a length of {dict_bytes} bytes (more than {_LONGEST_DICT_BYTES}) is absurd", dict_at)
    return dict_at + dict_bytes


@lru_cache(maxsize=4096)
def _parse(header: bytes) -> Header:
    """Parse a whole header, whose length is sound.

    Errors lack the path, because a thousand files may share one header.
    """
    length_format, encoding = _LAYOUTS[header[6:_LENGTH_AT]]
    text = header[_LENGTH_AT + struct.calcsize(length_format) :]
    if not text.endswith(b"\n"):
        raise CorruptData("it does not end with a newline")
    try:
        fields = ast.literal_eval(text.decode(encoding))
    # literal_eval raises these on bad text; the last two by deep nesting.
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise CorruptData("it is no Python literal") from None
    if not isinstance(fields, dict) or fields.keys() != {"descr", "fortran_order", "shape"}:
        raise CorruptData("it is no dict of descr, fortran_order and shape")

    dtype = _parse_descr(fields["descr"])
    fortran_order, shape = fields["fortran_order"], fields["shape"]
    if not isinstance(fortran_order, bool):
        raise CorruptData(f"fortran_order is {fortran_order!r}, neither True nor False")
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise CorruptData(f"shape {shape!r} is no tuple of sizes")
    if math.prod(max(size, 1) for size in shape) * dtype.itemsize > _LARGEST_DATA_BYTES:
        raise CorruptData(f"shape {shape} of {dtype} is absurd")
    # Up to one axis the two orders are the same bytes.
    return Header(dtype, fortran_order and len(shape) > 1, shape, len(header))


def _parse_descr(descr: object) -> np.dtype:
    if isinstance(descr, list):
        raise ValueError(f"it holds records ({descr}): save each field as an array of its own")
    if not isinstance(descr, str):
        raise CorruptData(f"descr {descr!r} is no dtype")
    try:
        dtype = np.dtype(descr)
    except (TypeError, ValueError, SyntaxError):
        raise CorruptData(f"descr {descr!r} is no dtype") from None
    if dtype.hasobject:
        raise ValueError("it holds Python objects, a pickle that may run any code when read: save numbers instead")
    torch_equivalent(dtype)
    return dtype
