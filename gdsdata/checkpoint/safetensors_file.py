"""safetensors files: a u64 N, a JSON header of N bytes, the tensors.

`formats.parsers.safetensors_header` parses it.

A checkpoint may have several files; its ``*.index.json`` names each tensor's file. gdsdata adds
checksums to the header's metadata, which other readers ignore. Those of the tensors are JSON under
``gdsdata_crc32``. One of the header's names, dtypes and shapes is under ``gdsdata_header_crc32``.
"""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from gdsdata.checkpoint.explanations import foreign_file
from gdsdata.checkpoint.gc_pause import collector_paused
from gdsdata.checkpoint.open_file import HEAD_BYTES, OpenFile, missing, most_kept_files
from gdsdata.checkpoint.open_object import open_path
from gdsdata.checkpoint.stored import Record, Stored, bytes_of, contiguous_stride
from gdsdata.checkpoint.tensor_kinds import check_has_values, freed, has_own_memory, is_freed, kind_in_words
from gdsdata.checkpoint.urls import is_url
from gdsdata.errors import CorruptData
from gdsdata.formats.parsers import safetensors_header
from gdsdata.formats.parsers.safetensors_header import DTYPES, LENGTH_BYTES, PACKED, Tensor
from gdsdata.io.options import EngineOptions

CHECKSUMS = "gdsdata_crc32"
HEADER_CHECKSUM = "gdsdata_header_crc32"
_OBJECTS_AT_A_TIME = 16  # whose headers are read
_LONGEST_INDEX_BYTES = 2**28  # a tensor has some 100
_PAGE_BYTES = 4096  # the data begin on a page
_PICKLED = (".bin", ".pt", ".pth")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def save(tensors: Mapping[str, torch.Tensor], path: str, options: EngineOptions) -> None:
    """Write a dict of tensors, with their checksums in the header's metadata.

    Each tensor is contiguous in the file.

    Raises:
        ValueError: the format cannot express a value: it is no plain tensor, is complex128, or
            shares memory with another one. Or the header is longer than readers accept.
        IoError: the file cannot be written, or the disk is full.
    """
    _check(tensors)
    # Tensors with large elements come first, so that each lies at a multiple of its element size.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    tensors_of_header = header_of({name: tensors[name] for name in names})
    forms = [(name, tensors[name].dtype, tuple(tensors[name].shape)) for name in names]

    def header(checksums: list[int]) -> bytes:
        by_name = dict(zip(names, checksums, strict=True))
        return with_checksums(by_name, _header_checksum(forms, by_name))

    def with_checksums(by_name: dict[str, int], of_header: str) -> bytes:
        metadata = {"format": "pt", CHECKSUMS: json.dumps(by_name), HEADER_CHECKSUM: of_header}
        about = {"__metadata__": metadata, **tensors_of_header}
        return json.dumps(about, separators=(",", ":")).encode()

    longest = len(with_checksums(dict.fromkeys(names, 2**32 - 1), "0" * 8))
    data_begin = -(-(LENGTH_BYTES + longest) // _PAGE_BYTES) * _PAGE_BYTES
    if data_begin - LENGTH_BYTES > safetensors_header.LONGEST_HEADER_BYTES:
        raise ValueError(
            f"{path}: the names and checksums of {len(names)} tensors make a header of {data_begin - LENGTH_BYTES} "
            f"bytes, and readers of safetensors files accept {safetensors_header.LONGEST_HEADER_BYTES}: save them to a "
            ".pt file, or without checksums by gdsdata.safetensors.save_file"
        )
    write([tensors[name] for name in names], path, data_begin, header, options)


def header_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what a header says of tensors that follow each other in this order."""
    about: dict[str, Any] = {}
    begin = 0
    for name, tensor in tensors.items():
        code, shape = code_of(tensor.dtype), list(tensor.shape)
        if code in PACKED:
            shape[-1] *= PACKED[code]
        about[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, begin + tensor.nbytes]}
        begin += tensor.nbytes
    return about


def code_of(dtype: torch.dtype) -> str:
    """Return a dtype's name in the format.

    Raises:
        KeyError: the format has no such dtype.
    """
    return _NAMES[dtype]


def write(
    tensors: Sequence[torch.Tensor],
    path: str,
    data_begin: int,
    header: Callable[[list[int]], bytes],
    options: EngineOptions,
) -> None:
    """Write a file, or an object.

    Args:
        tensors: plain ones, in the order of the file.
        path: of the file, or the URL of an object.
        data_begin: where the first tensor begins in the file, in bytes.
        header: called with the tensors' checksums. It returns the JSON, which is padded with
            spaces.
        options: of the engine.

    Raises:
        IoError: the file cannot be written, or the disk is full.
    """
    # So that a first load takes a millisecond less.
    from gdsdata.checkpoint.file_writer import reached
    from gdsdata.checkpoint.writers import writer_of

    def bytes_in_file(tensor: torch.Tensor) -> torch.Tensor:
        # The memory of a conjugate or negative view differs from its values.
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return reached(bytes_of(tensor))

    *begins, end = itertools.accumulate((tensor.nbytes for tensor in tensors), initial=data_begin)
    places = [(begin, tensor.nbytes) for begin, tensor in zip(begins, tensors, strict=True)]
    # Each copy is made when it is due, so few of them are in memory at a time.
    extents = ((begin, bytes_in_file(tensor)) for begin, tensor in zip(begins, tensors, strict=True))
    with writer_of(path, end, options) as writer:
        text = header(list(writer.write_in_batches(extents, places))).ljust(data_begin - LENGTH_BYTES)
        writer.write_bytes([(0, len(text).to_bytes(LENGTH_BYTES, "little") + text)])
        writer.commit()


def _check(tensors: Mapping[str, torch.Tensor]) -> None:
    instead = "save it to a .pt file"
    if isinstance(tensors, torch.nn.Module):
        kind = type(tensors).__name__
        raise ValueError(f"a safetensors file holds a dict of tensors, and no {kind}: save its state_dict()")
    if not isinstance(tensors, Mapping):
        raise ValueError(f"a safetensors file holds a dict of tensors, and no {type(tensors).__name__}: {instead}")
    used: list[tuple[str, int, int, str]] = []
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == "__metadata__" or not _is_utf8(name):
            raise ValueError(f"{name!r} is no name for a tensor in a safetensors file: {instead}")
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not has_own_memory(tensor):
            check_has_values({name: tensor})
            kind, remedy = _kind_of(tensor), instead
            if isinstance(tensor, np.ndarray):
                remedy = f"give torch.from_numpy(array), or {instead}"
            raise ValueError(f"{name} is {kind} and no plain tensor, which is what safetensors files hold: {remedy}")
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name} is of {tensor.dtype}, which safetensors files do not have: {instead}")
        if _NAMES[tensor.dtype] in PACKED and not tensor.shape:
            raise ValueError(
                f"{name} is a single {tensor.dtype}, and safetensors files count its halves along an axis: reshape it "
                f"to (1,), or {instead}"
            )
        if tensor.numel() > 0:
            if is_freed(tensor):
                raise ValueError(freed(name, "save"))
            steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            first = tensor.data_ptr()
            used.append((str(tensor.device), first, first + (steps + 1) * tensor.dtype.itemsize, name))
    for (device, _, end, name), (next_device, first, _, next_name) in itertools.pairwise(sorted(used)):
        if device == next_device and first < end:
            raise ValueError(
                f"{name} and {next_name} share memory, which a safetensors file cannot say: save the model by "
                f"gdsdata.safetensors.save_model, {instead}, or clone one"
            )


def _is_utf8(name: str) -> bool:
    """Return whether UTF-8 has all characters of a name: it has no halves of surrogate pairs."""
    try:
        return name.isascii() or bool(name.encode())
    except UnicodeEncodeError:
        return False


def _kind_of(value: Any) -> str:
    """Return words for a value that is no plain tensor."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return kind_in_words(value)
    if value.is_nested or value.is_quantized:
        return "a nested tensor" if value.is_nested else "a quantized tensor"
    return f"a tensor of {value.layout}" if value.layout is not torch.strided else "a tensor of zeros without memory"


def read_index(index: OpenFile, verify: bool = False) -> dict[str, Stored]:
    """Return the tensors of the files that an index names.

    All files are opened before one is read.

    Args:
        index: the index.
        verify: as in `read_header`.

    Raises:
        CorruptData: the index or a header is damaged, or a file does not have a tensor that the
            index says it has.
        FileNotFoundError, IoError: a file cannot be opened or read.
    """
    of_tensor = weight_map(index)
    folder = os.path.dirname(index.path)
    paths = [os.path.join(folder, name) for name in dict.fromkeys(of_tensor.values())]
    headers = read_indexed(index.path, of_tensor, paths, verify)
    return {tensor: headers[name][tensor] for tensor, name in of_tensor.items()}


def weight_map(index: OpenFile) -> dict[str, str]:
    """Return the file of each tensor that an index names.

    Raises:
        CorruptData: the index is damaged, or names pickled files.
    """
    path = index.path
    is_too_long = index.size_bytes > _LONGEST_INDEX_BYTES
    text = index.read(0, HEAD_BYTES if is_too_long else index.size_bytes)
    try:
        if is_too_long:
            raise ValueError(f"it has {index.size_bytes} bytes, more than {_LONGEST_INDEX_BYTES}")
        of_tensor: dict[str, str] = json.loads(text, object_pairs_hook=safetensors_header.dict_of)["weight_map"]
        names = dict.fromkeys(of_tensor.values())
        if any(os.path.basename(name) != name or name in ("", ".", "..") for name in names):
            raise ValueError("it names files outside its folder")
        if not all(name.isprintable() for name in names):  # excludes zero bytes and halves of characters
            raise ValueError("it names files by what is no name")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        foreign = None if text.lstrip()[:1] in (b"{", b"[") else foreign_file(f"'{path}'", text[:HEAD_BYTES])
        if foreign is not None:
            raise CorruptData(str(foreign), path) from error
        message = (
            f"'{path}' is no index of safetensors files: {error!r}. Give the path of a *.safetensors.index.json, "
            "or of the checkpoint's own file; if this is one, it is damaged: fetch it again"
        )
        raise CorruptData(message, path) from error
    pickled = next((name for name in names if name.endswith(_PICKLED)), None)
    if pickled is not None:
        file = os.path.join(os.path.dirname(path), pickled)
        raise CorruptData(
            f"'{path}' names pickled files, and an index is read if it names safetensors files: load each by itself, "
            f"as gdsdata.load({file!r})",
            path,
        )
    return of_tensor


def read_indexed(
    index: str, of_tensor: Mapping[str, str], paths: Sequence[str], verify: bool = False
) -> dict[str, dict[str, Stored]]:
    """Return the tensors of files, by the files' names, and compare them with an index.

    Args:
        index: the path of the index.
        of_tensor: of the index.
        paths: of files in one folder. There may be more than the index names.
        verify: as in `read_header`.

    Raises:
        CorruptData: a file is damaged, or does not have a tensor that the index says it has.
        FileNotFoundError, IoError: a file is missing, or cannot be read.
    """
    names = [os.path.basename(path) for path in paths]
    for name in dict.fromkeys(of_tensor.values()):
        if name not in names:
            raise _lost_shard(index, of_tensor, name)
    try:
        headers = dict(zip(names, read_headers(paths, verify), strict=True))
    except FileNotFoundError as error:
        lost = os.path.basename(getattr(error, "path", ""))
        if lost not in of_tensor.values():
            raise
        raise _lost_shard(index, of_tensor, lost) from error
    for tensor, name in of_tensor.items():
        if tensor not in headers[name]:
            path = paths[names.index(name)]
            raise CorruptData(
                f"'{path}' has no tensor {tensor!r}, which '{index}' says it has: the two are of different "
                "checkpoints, or one is damaged. Fetch both again",
                path,
            )
    return headers


def _lost_shard(index: str, of_tensor: Mapping[str, str], name: str) -> FileNotFoundError:
    its = [tensor for tensor, of_file in of_tensor.items() if of_file == name]
    return missing(
        os.path.join(os.path.dirname(index), name),
        f"a shard is missing: '{index}' names '{name}' for {its[0]!r} and {len(its) - 1} more tensors, and "
        "there is no such file beside it. Fetch that shard",
    )


def read_headers(paths: Sequence[str], verify: bool = False) -> list[dict[str, Stored]]:
    """Open files, or objects, and return their tensors.

    All are opened before one is read. The first `most_kept_files` stay open.

    Args:
        paths: of the files.
        verify: as in `read_header`.

    Raises:
        CorruptData: a file is damaged.
        FileNotFoundError, IoError: a file cannot be opened or read.
    """
    most = most_kept_files()
    keep = [number < most for number in range(len(paths))]
    with ThreadPoolExecutor(_OBJECTS_AT_A_TIME) as threads:
        each = threads.map if any(map(is_url, paths)) else map  # one after another, objects would add up round trips
        files = list(each(open_path, paths, keep))
        return list(each(partial(read_header, verify=verify), files))


class FileHeader(NamedTuple):
    """A file's header.

    Attributes:
        tensors: by name, in the header's order.
        metadata: strings by name; None: the header has no metadata.
        checksums: of tensors, by name, as the metadata has them.
    """

    tensors: dict[str, Stored]
    metadata: dict[str, str] | None
    checksums: dict[str, int]


def read_header(file: OpenFile, begin: int = 0, verify: bool = False) -> dict[str, Stored]:
    """Return the tensors of one file in its order: see `read_file_header`.

    Args:
        file, begin: as there.
        verify: compare the checksum of what the header says of the tensors.

    Raises:
        CorruptData, IoError: as there, or the checksum differs.
    """
    header = read_file_header(file, begin)
    if verify:
        _check_header(header, file.path)
    return header.tensors


def _check_header(header: FileHeader, path: str) -> None:
    """Compare the header's checksum, if it has one.

    Other programs may have copied the metadata beside more tensors or fewer. The header's checksum
    says nothing about these. A tensor that is new is warned of when it is read: it has none of its
    own.

    Raises:
        CorruptData: it differs.
    """
    expected = (header.metadata or {}).get(HEADER_CHECKSUM)
    if expected is None or header.checksums.keys() != header.tensors.keys():
        return
    forms = ((name, stored.dtype, stored.shape) for name, stored in header.tensors.items())
    if (found := _header_checksum(forms, header.checksums)) != expected:
        raise CorruptData(
            f"'{path}': names, dtypes, shapes and checksums in its header have the checksum {found} and not "
            f"{expected[:80]}: the header was changed since it was written. Write the file again, or fetch it again",
            path,
        )


def _header_checksum(forms: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], checksums: Mapping[str, int]) -> str:
    """Return the checksum of what a header says of its tensors, in hexadecimal digits.

    It depends on neither the order of the tensors nor the spaces in the JSON, which a program that
    writes the header again may change. Offsets are not in it: the tensors' own checksums show it
    if these are wrong.

    Args:
        forms: name, dtype and shape of each tensor, as torch has them.
        checksums: by name.
    """
    said = sorted([name, code_of(dtype), *shape, checksums[name]] for name, dtype, shape in forms)
    return f"{zlib.crc32(json.dumps(said).encode()):08x}"


def read_file_header(file: OpenFile, begin: int = 0) -> FileHeader:
    """Return the header of one file.

    Args:
        file: the file.
        begin: where the safetensors part begins in it, in bytes.

    Raises:
        CorruptData: the header is damaged, or the tensors do not fill the file to its end without
            gaps.
        IoError: the storage refuses a read.
    """
    data_begin = safetensors_header.data_offset(file.read(begin, LENGTH_BYTES), file.path, file.size_bytes, begin)
    text = file.read(begin + LENGTH_BYTES, data_begin - begin - LENGTH_BYTES)
    with collector_paused():
        header = safetensors_header.parse(text, file.path, data_begin, file.size_bytes)
        checksums = _checksums(header.metadata or {}, file.path)
        tensors = {
            name: _stored(
                tensor, Record(file, data_begin + tensor.begin_bytes, tensor.length_bytes, checksums.get(name))
            )
            for name, tensor in header.tensors.items()
        }
    return FileHeader(tensors, header.metadata, checksums)


def _checksums(metadata: Mapping[str, str], path: str) -> dict[str, int]:
    """Return the checksums by tensor.

    Raises:
        CorruptData: the metadata has something else under `CHECKSUMS`.
    """
    instead = "write the file again"
    try:
        checksums = json.loads(metadata.get(CHECKSUMS, "{}"))
        lost = [name for name, crc32 in checksums.items() if type(crc32) is not int]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        message = f"'{path}': {CHECKSUMS} in its header is no JSON of checksums ({error}): {instead}"
        raise CorruptData(message, path) from error
    if lost:
        raise CorruptData(f"'{path}': tensor {lost[0]!r} has a checksum that is none: {instead}", path)
    return checksums


def _stored(tensor: Tensor, record: Record) -> Stored:
    return Stored(record, 0, tensor.dtype, tensor.shape, contiguous_stride(tensor.shape))
