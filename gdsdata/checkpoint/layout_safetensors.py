"""safetensors: u64 N, JSON of N bytes, data. One file, or many and a ``*.index.json`` that names each tensor's file.

Source: the format's own description, github.com/huggingface/safetensors. Checksums are gdsdata's addition, as JSON
under ``gdsdata_crc32`` in the header's metadata, which other readers pass over.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping
from typing import Any

import torch

from gdsdata.checkpoint.reading import Record, Seen, Stored, bytes_of, seen
from gdsdata.checkpoint.writing import PAGE_BYTES, Writing, reached
from gdsdata.errors import CorruptData
from gdsdata.options import EngineOptions

CHECKSUMS = "gdsdata_crc32"
LONGEST_HEADER_BYTES = 100_000_000  # as the reference implementation has it
_MOST_AXES = 64  # more than any tensor has, and few enough to multiply
_LARGEST_SIZE = 2**63 - 1  # torch's

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def recognises(head: bytes) -> bool:
    """Whether a file that begins so can be one."""
    return len(head) >= 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= LONGEST_HEADER_BYTES


def save(tensors: Mapping[str, torch.Tensor], path: str, options: EngineOptions) -> None:
    """Write a dict of tensors, each contiguous, with their checksums in the header's metadata.

    Raises:
        ValueError: what the format cannot say: values that are no plain tensors, complex128, memory shared by two.
        IoError: the file cannot be written, or space is lacking.
    """
    _check(tensors)
    # Those of large elements first, so that all lie at multiples of theirs.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    flat = [reached(bytes_of(tensors[name].detach().contiguous())) for name in names]

    def header(checksums: list[int]) -> bytes:
        said = json.dumps(dict(zip(names, checksums, strict=True)))
        about: dict[str, Any] = {"__metadata__": {"format": "pt", CHECKSUMS: said}}
        begin = 0
        for name, one in zip(names, flat, strict=True):
            tensor = tensors[name]
            offsets = [begin, begin + one.nbytes]
            about[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
            begin += one.nbytes
        return json.dumps(about, separators=(",", ":")).encode()

    longest = len(header([2**32 - 1] * len(names)))
    data_begin = -(-(8 + longest) // PAGE_BYTES) * PAGE_BYTES
    extents, end = [], data_begin
    for one in flat:
        extents.append((end, one))
        end += one.nbytes
    with Writing(path, end, options) as writing:
        text = header(writing.write(extents, with_checksums=True)).ljust(data_begin - 8)
        writing.write_bytes([(0, len(text).to_bytes(8, "little") + text)])
        writing.commit()


def _check(tensors: Mapping[str, torch.Tensor]) -> None:
    instead = "save it to a .pt file"
    if not isinstance(tensors, Mapping):
        raise ValueError(f"a safetensors file holds a dict of tensors, and no {type(tensors).__name__}: {instead}")
    used: list[tuple[str, int, int, str]] = []
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == "__metadata__":
            raise ValueError(f"{name!r} is no name for a tensor in a safetensors file: {instead}")
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
            kind = type(tensor).__name__
            raise ValueError(f"{name} is a {kind} and no plain tensor, which is what safetensors files hold: {instead}")
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name} is of {tensor.dtype}, which safetensors files do not have: {instead}")
        if tensor.numel() > 0:
            steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            first = tensor.data_ptr()
            used.append((str(tensor.device), first, first + (steps + 1) * tensor.dtype.itemsize, name))
    for (device, _, end, name), (next_device, first, _, next_name) in itertools.pairwise(sorted(used)):
        if device == next_device and first < end:
            raise ValueError(
                f"{name} and {next_name} share memory, which a safetensors file cannot say: {instead}, or clone one"
            )


def read_index(path: str) -> dict[str, Stored]:
    """The tensors of the files that an index names.

    Raises:
        CorruptData: the index is not one, or a file has not the tensor that it is named for.
        FileNotFoundError: a file is missing.
    """
    try:
        with open(path, encoding="utf-8") as file:
            of_tensor = json.load(file)["weight_map"]
        files = {name: os.path.join(os.path.dirname(path), of_tensor[name]) for name in of_tensor}
        if any(os.path.basename(file) != file or file in ("", ".", "..") for file in of_tensor.values()):
            raise ValueError("it names files outside its folder")
        if not all(file.isprintable() for file in of_tensor.values()):  # as no zero byte and no half of a character is
            raise ValueError("it names files by what is no name")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptData(f"'{path}' is no index of safetensors files: {error!r}", path) from error
    headers = {file: read_header(file) for file in dict.fromkeys(files.values())}
    for name, file in files.items():
        if name not in headers[file]:
            raise CorruptData(f"'{file}' has no tensor {name!r}, which '{path}' says it has", file)
    return {name: headers[file][name] for name, file in files.items()}


def read_header(path: str, begin: int = 0) -> dict[str, Stored]:
    """The tensors of one file, or of what begins at ``begin`` in it, in its order.

    Raises:
        CorruptData: the header is not one, or the tensors do not lie one behind the other up to the file's end.
        FileNotFoundError, OSError: the file is not to be had.
    """
    with open(path, "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        file.seek(begin)
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > min(LONGEST_HEADER_BYTES, size_bytes - begin - 8):
            raise CorruptData(f"'{path}' of {size_bytes} bytes says that its header has {length}", path, begin, 8)
        text = file.read(length)
        return parse_header(text, path, begin + 8 + length, size_bytes, seen(file.fileno()))


def parse_header(
    text: bytes, path: str, data_begin: int, size_bytes: int, of_file: Seen | None = None
) -> dict[str, Stored]:
    """What `read_header` does once it has the header's bytes; ``data_begin`` is where the data begins in the file."""
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        checksums = json.loads(metadata.get(CHECKSUMS, "{}"))
        tensors = {
            name: _stored(name, said, path, data_begin, checksums.get(name), of_file) for name, said in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptData(f"'{path}': its header is not one of safetensors: {error!r}", path, 8, len(text)) from error
    end = data_begin
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].record.offset, item[1].record.size_bytes)):
        if stored.record.offset != end:
            raise CorruptData(f"'{path}': tensor {name!r} does not begin where the one before ends", path, end)
        end += stored.record.size_bytes
    if end != size_bytes:
        raise CorruptData(f"'{path}' has {size_bytes} bytes, and its tensors end at {end}", path, end)
    return tensors


def _stored(
    name: str, said: dict[str, Any], path: str, data_begin: int, crc32: Any, of_file: Seen | None
) -> Stored:
    dtype, shape, (begin, end) = DTYPES.get(said["dtype"]), said["shape"], said["data_offsets"]
    if dtype is None:
        raise ValueError(f"tensor {name!r} is of dtype {said['dtype']!r}, which torch does not have")
    if len(shape) > _MOST_AXES:
        raise ValueError(f"tensor {name!r} has {len(shape)} axes, more than {_MOST_AXES}")
    if not all(type(size) is int and 0 <= size <= _LARGEST_SIZE for size in (begin, end, *shape)):
        raise ValueError(f"tensor {name!r} has a size or an offset that is none")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"tensor {name!r} of shape {shape} and dtype {said['dtype']} has {end - begin} bytes")
    if crc32 is not None and not isinstance(crc32, int):
        raise ValueError(f"tensor {name!r} has a checksum that is none")
    stride = tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))
    if math.prod(max(size, 1) for size in shape) > _LARGEST_SIZE:  # also of one without elements
        raise ValueError(f"tensor {name!r} of shape {shape} is absurd")
    return Stored(Record(path, data_begin + begin, end - begin, crc32, of_file), 0, dtype, tuple(shape), stride)
