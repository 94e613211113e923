"""safetensors: u64 N, JSON of N bytes, data. One file, or many and a ``*.index.json`` that names each tensor's file.

The header is `formats.safetensors_header`'s. Checksums are gdsdata's addition, as JSON
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

from gdsdata.checkpoint.pages import PAGE_BYTES
from gdsdata.checkpoint.reading import Record, Stored, bytes_of, opened, seen
from gdsdata.checkpoint.writing import Writing, reached
from gdsdata.errors import CorruptData
from gdsdata.formats import safetensors_header
from gdsdata.formats.safetensors_header import DTYPES, LENGTH_BYTES, Tensor
from gdsdata.options import EngineOptions

CHECKSUMS = "gdsdata_crc32"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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
        text = header(list(writing.written(extents))).ljust(data_begin - 8)
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
        FileNotFoundError, IoError: a file is not to be had.
    """
    try:
        with opened(path) as file:
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
        FileNotFoundError, IoError: the file is not to be had.
    """
    with opened(path) as file:
        of_file = seen(file.fileno())
        file.seek(begin)
        data_begin = safetensors_header.data_offset(file.read(LENGTH_BYTES), path, of_file[0], begin)
        text = file.read(data_begin - begin - LENGTH_BYTES)
    header = safetensors_header.parse(text, path, data_begin, of_file[0])
    checksums = _checksums(header.metadata, path)
    return {
        name: _stored(
            tensor, Record(path, data_begin + tensor.begin_bytes, tensor.length_bytes, checksums.get(name), of_file)
        )
        for name, tensor in header.tensors.items()
    }


def _checksums(metadata: Any, path: str) -> dict[str, int]:
    """By tensor.

    Raises:
        CorruptData: what stands there are none.
    """
    try:
        checksums = json.loads(metadata.get(CHECKSUMS, "{}"))
        lost = [name for name, crc32 in checksums.items() if type(crc32) is not int]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptData(f"'{path}': its header is not one of safetensors: {error!r}", path) from error
    if lost:
        raise CorruptData(f"'{path}': tensor {lost[0]!r} has a checksum that is none", path)
    return checksums


def _stored(tensor: Tensor, record: Record) -> Stored:
    shape = tensor.shape
    stride = tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))
    return Stored(record, 0, tensor.dtype, shape, stride)
