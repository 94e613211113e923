"""`load_file`, `save_file`, `load` and `save`, as `safetensors.torch` has them."""

from __future__ import annotations

import itertools
import json
import os
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from gdsdata.checkpoint.deferred import deferred_for
from gdsdata.checkpoint.explanations import checked_path
from gdsdata.checkpoint.gc_pause import collector_paused
from gdsdata.checkpoint.hooks_report import COUNTS
from gdsdata.checkpoint.safetensors.errors import NotWritten
from gdsdata.checkpoint.safetensors.opened import Device, safe_open
from gdsdata.checkpoint.safetensors.stock import stock
from gdsdata.checkpoint.safetensors_file import code_of, header_of, write
from gdsdata.checkpoint.tensor_kinds import has_own_memory, is_freed
from gdsdata.checkpoint.urls import is_url
from gdsdata.errors import NotReplaceable
from gdsdata.formats.parsers.safetensors_header import DTYPES, LENGTH_BYTES, LONGEST_HEADER_BYTES
from gdsdata.io import engine
from gdsdata.io.options import EngineOptions

# The package's order of dtypes. A file has the tensors of the last one first.
_DTYPES = [
    *("BOOL", "F4", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16", "U16"),
    *("F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64"),
]


_SAVED = frozenset(dtype for code, dtype in DTYPES.items() if code in _DTYPES)


def load_file(
    filename: str | os.PathLike[str], device: Device = "cpu", *, backend: str = "mmap"
) -> dict[str, torch.Tensor]:
    """Read all tensors of a file, as `safetensors.torch.load_file`.

    The bytes go straight into the tensors, in few large requests. `gdsdata.load` also reads a
    checkpoint of several files, casts, compares checksums, and fills existing tensors.

    Args:
        filename: of the file, or the URL of an object.
        device: of the tensors.
        backend: "mmap" or "pread", which make no difference.

    Returns:
        The tensors by name, in the order of the file.

    Raises:
        FileNotFoundError, SafetensorError, IoError: see `safe_open`.

    Stream semantics: the bytes are in place when this returns, for every stream.
    """
    with safe_open(filename, framework="pt", device=device, backend=backend) as file:
        return file.get_tensors()


def save_file(
    tensors: dict[str, torch.Tensor], filename: str | os.PathLike[str], metadata: dict[str, str] | None = None
) -> None:
    """Write tensors into a file, as `safetensors.torch.save_file`.

    The file has the bytes that `safetensors` would write. (With several metadata, those stand in
    the order of the dict; `safetensors` writes them in a random order.) It is on storage when this
    returns. After an error or a crash, the name has what was there before. `gdsdata.save` adds
    checksums.

    Args:
        tensors: contiguous tensors by name, which share no memory.
        filename: of the file, or the URL of an object.
        metadata: strings by name, for the header.

    Raises:
        ValueError, RuntimeError, TypeError: those of `safetensors`, for what it does not save.
        SafetensorError: the file cannot be written (the error is an `IoError` too).
        NotReplaceable: an `IoError`; the package `safetensors` is not installed, and no new file
            can replace this one. Otherwise `safetensors` tries it.

    Stream semantics: tensors on a GPU are read after all work that the current stream of that GPU
    has so far.
    """
    path = checked_path(filename, "save")
    text = _header_text(tensors, metadata)
    if isinstance(text, str):
        COUNTS.leave(text, path)
        if is_url(path):
            path = f"<{path}>"  # an error's, because the package writes files alone
        return stock("save_file of these tensors").save_file(tensors, path, metadata)
    names, header = text
    in_order = [tensors[name] for name in names]
    deferred = deferred_for(path)
    try:
        if deferred is not None:
            return deferred.save_tensors(in_order, len(header).to_bytes(LENGTH_BYTES, "little") + header, path)
        with collector_paused():
            write(in_order, path, LENGTH_BYTES + len(header), lambda _: header, EngineOptions())
    except NotReplaceable as error:
        try:
            stock_save = stock("save_file").save_file
        except ImportError:
            raise error from None
        engine.warn_once(f"{error}. safetensors writes it instead")
        COUNTS.leave("no new file can replace it", path)
        stock_save(tensors, path, metadata)
    except OSError as error:
        message = f"Error while serializing: {error}"
        raise NotWritten(error.errno or 0, message, path) from error
    return None


def load(data: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors of a file's content, by `safetensors.torch.load` itself."""
    return stock("load").load(data)


def save(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Return a file's content, by `safetensors.torch.save` itself."""
    return stock("save").save(tensors, metadata)


def _header_text(tensors: Any, metadata: Any) -> tuple[list[str], bytes] | str:
    """Return the names in the order of the file, and the header's JSON.

    If `safetensors` would refuse this, or may treat it in another way, return why.
    """
    if type(tensors) not in (dict, OrderedDict):
        return f"its tensors are in a {type(tensors).__name__}, not a dict"
    for name, tensor in tensors.items():
        if why := _why_unusual(name, tensor):
            return why
    if metadata is not None and not (isinstance(metadata, dict) and _is_text(metadata)):
        return "metadata that are not strings by name"
    if _share_memory(tensors):
        return "tensors that share memory"
    names = sorted(tensors, key=lambda name: (-_DTYPES.index(code_of(tensors[name].dtype)), name))
    about = {} if metadata is None else {"__metadata__": metadata}
    about |= header_of({name: tensors[name] for name in names})
    try:
        text = json.dumps(about, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "a name or metadata that UTF-8 cannot encode"
    text += b" " * (-len(text) % 8)
    return "a header that is too long" if len(text) > LONGEST_HEADER_BYTES else (names, text)


def _why_unusual(name: Any, tensor: Any) -> str:
    """Return why a tensor is not written by gdsdata; "" if it is."""
    if type(name) is not str or name == "__metadata__":
        return "a name that is not a string, or is __metadata__"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__name__} among the tensors"
    if not has_own_memory(tensor):
        return "a tensor without memory of its own (meta, sparse)"
    if tensor.dtype not in _SAVED or (tensor.dtype == torch.float4_e2m1fn_x2 and not tensor.shape):
        return f"a tensor of {tensor.dtype}"
    if is_freed(tensor):
        return "a tensor whose memory was freed"
    return "" if tensor.is_contiguous() else "a tensor that is not contiguous"


def _is_text(metadata: Mapping[Any, Any]) -> bool:
    return all(type(one) is str for item in metadata.items() for one in item)


def _share_memory(tensors: Mapping[str, torch.Tensor]) -> bool:
    areas = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        for tensor in tensors.values()
        if tensor.numel() > 0
    )
    return any(device == after and end > begin for (device, _, end), (after, begin, _) in itertools.pairwise(areas))
