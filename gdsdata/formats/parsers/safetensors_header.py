"""The header of a safetensors file.

A file is u64 N, JSON of N bytes, then the tensors' bytes one behind the other, without gaps. This
parser is pure: `safetensors_files` reads files for data, and ``checkpoint.safetensors_file`` for
checkpoints.

Source: the format's own description, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from gdsdata.errors import CorruptData

LENGTH_BYTES = 8
LONGEST_HEADER_BYTES = 100_000_000  # as the reference implementation has it

DTYPES = {
    "BOOL": torch.bool,
    "F4": torch.float4_e2m1fn_x2,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
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
# One element in torch of these dtypes is several of the file's, along the last axis.
PACKED = {"F4": 2}
# Known to the format and not to torch, with their bits.
_FOREIGN_BITS = {"F6_E2M3": 6, "F6_E3M2": 6}
_METADATA = "__metadata__"
# torch's own limit; without one, the product of a shape that lies could take for ever.
_MOST_AXES = 64
# Keeps every offset within int64.
_LARGEST_BYTES = 2**62


class Tensor(NamedTuple):
    """One of the tensors, in C order.

    Attributes:
        dtype, shape: as torch has them.
        begin_bytes: from where the data begins in the file.
        length_bytes: of it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin_bytes: int
    length_bytes: int


class Header(NamedTuple):
    """The tensors and the metadata of a header.

    Attributes:
        tensors: by name, in the header's order.
        metadata: strings by name, as somebody wrote them; None: the header has no metadata.
        data_bytes: of all tensors, which are all that follows the header.
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, str] | None
    data_bytes: int


def recognises(head: bytes) -> bool:
    """Return whether a file that begins so (9 bytes or more) can be one."""
    return len(head) >= 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= LONGEST_HEADER_BYTES


def data_offset(head: bytes, path: str, size_bytes: int, begin: int = 0) -> int:
    """Return where the data begins in a file.

    Args:
        head: the 8 bytes at ``begin``.
        path: named in errors.
        size_bytes: of the file.
        begin: offset of the header.

    Raises:
        CorruptData: the header would not end within the file, or is absurdly long.
    """
    length_bytes = int.from_bytes(head[:LENGTH_BYTES], "little")
    most_bytes = min(LONGEST_HEADER_BYTES, size_bytes - begin - LENGTH_BYTES)
    if len(head) < LENGTH_BYTES or length_bytes > most_bytes:
        message = (
            f"'{path}' of {size_bytes} bytes says that its header has {length_bytes}, at offset {begin}, and the most "
            f"is {max(0, most_bytes)}: {_REMEDY}"
        )
        raise CorruptData(message, path, begin, LENGTH_BYTES)
    return begin + LENGTH_BYTES + length_bytes


def parse(text: bytes, path: str, data_begin: int, size_bytes: int, is_repeated: bool = False) -> Header:
    """Return the header that the JSON ``text`` is.

    Args:
        text: of the header.
        path: named in errors.
        data_begin: where the data begins in the file.
        size_bytes: of the file.
        is_repeated: other files may have the same header: keep it, if it is short.

    Raises:
        CorruptData: it is none, or the tensors do not lie one behind the other up to the file's
            end.
        ValueError: the header is sound, but torch cannot hold one of its tensors.
    """
    begin = data_begin - len(text)
    try:
        header = (_parse_again if is_repeated and len(text) <= _SHORT_BYTES else _parse)(text)
    except _NotInTorch as error:
        raise ValueError(f"'{path}': {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        message = f"'{path}': its header at offset {begin} is not one of safetensors ({reason}): {_REMEDY}"
        raise CorruptData(message, path, begin, len(text)) from error
    end = data_begin + header.data_bytes
    if end != size_bytes:
        message = f"'{path}' has {size_bytes} bytes, and its tensors end at {end}: {_REMEDY}"
        raise CorruptData(message, path, min(end, size_bytes), abs(end - size_bytes))
    return header


_REMEDY = "write it again, or fetch it again"


class _NotInTorch(ValueError):
    """A sound tensor that torch has no dtype or shape for."""


def _parse(text: bytes) -> Header:
    if not text.startswith(b"{"):
        raise ValueError(f"it begins with {text[:8]!r}, and not with a brace")
    said = json.loads(text.decode(), object_pairs_hook=dict_of, parse_constant=_refuse_constant)
    if b"\\u" in text:  # half a surrogate pair is no character
        json.dumps(said, ensure_ascii=False).encode()
    metadata = said.pop(_METADATA, None)
    if metadata is not None and (
        type(metadata) is not dict or not all(type(value) is str for value in metadata.values())
    ):
        raise ValueError(f"{_METADATA} holds strings by name, and this is {str(metadata)[:80]}")
    tensors = {name: _tensor(name, about) for name, about in said.items()}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if tensor.begin_bytes != end:
            raise ValueError(f"tensor {name!r} does not begin where the one before ends, at {end} of the data")
        end += tensor.length_bytes
    return Header(tensors, metadata, end)


def dict_of(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these members, each of which it has once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice[:80]!r} comes twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


# A hundred thousand samples that were saved alike have one header. Checkpoints have checksums in
# theirs, so no two are alike.
_SHORT_BYTES = 16 * 1024
_parse_again = lru_cache(maxsize=256)(_parse)


def _tensor(name: str, said: dict[str, Any]) -> Tensor:
    code, shape, (begin, end) = said["dtype"], said["shape"], said["data_offsets"]
    if type(shape) is not list:
        raise ValueError(f"tensor {name!r} has the shape {str(shape)[:80]}, which is no list")
    for size in (begin, end, *shape):
        if type(size) is not int or not 0 <= size <= _LARGEST_BYTES:
            raise ValueError(f"tensor {name!r} has a size or an offset that is none")
    try:
        bits, dtype, in_torch = _meant(code, tuple(shape))
    except ValueError as error:
        raise ValueError(f"tensor {name!r} {error}") from None
    if 8 * (end - begin) != bits:
        raise ValueError(f"tensor {name!r} of shape {shape} and dtype {code} has {end - begin} bytes")
    if dtype is None:
        raise _NotInTorch(f"tensor {name!r} is of dtype {code}, which torch does not have: save it as another")
    if in_torch is None:
        raise _NotInTorch(
            f"tensor {name!r} is of dtype {code} and shape {shape}, and torch has such in pairs along the last "
            f"axis: save it in another shape"
        )
    return Tensor(dtype, in_torch, begin, end - begin)


@lru_cache(maxsize=1024)  # layers repeat
def _meant(code: str, shape: tuple[int, ...]) -> tuple[int, torch.dtype | None, tuple[int, ...] | None]:
    """Return what a dtype and a shape of a header mean.

    Args:
        code, shape: in the header; the shape has sizes alone.

    Returns:
        The size in bits; torch's dtype, or None; the shape in torch, or None.

    Raises:
        ValueError: they cannot be.
    """
    dtype = DTYPES.get(code)
    if dtype is None and code not in _FOREIGN_BITS:
        raise ValueError(f"is of dtype {code!r}, which torch does not have")
    if len(shape) > _MOST_AXES:
        raise ValueError(f"has {len(shape)} axes, more than {_MOST_AXES}")
    if math.prod(max(size, 1) for size in shape) > _LARGEST_BYTES:  # of one without elements too
        raise ValueError(f"of shape {list(shape)} is absurd")
    packed = PACKED.get(code, 1)
    bits = 8 * dtype.itemsize // packed if dtype else _FOREIGN_BITS[code]
    in_torch: tuple[int, ...] | None = shape
    if packed > 1:
        is_whole = shape and shape[-1] % packed == 0
        in_torch = (*shape[:-1], shape[-1] // packed) if is_whole else None
    return math.prod(shape) * bits, dtype, in_torch
