"""Token files: bare (nanoGPT, OLMo), behind llm.c's header, or behind a npy header; windows of them are the samples.

Sources of the formats: nanoGPT ``data/openwebtext/prepare.py`` (``tofile`` of uint16), llm.c
``dev/data/data_common.py`` (256 int32: magic, version 1, count of tokens; then the tokens).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from gdsdata.errors import CorruptData
from gdsdata.formats import magics
from gdsdata.formats.index import Index, Sample, count_items, first_samples, read_heads

if TYPE_CHECKING:
    from numpy.typing import DTypeLike
else:
    DTypeLike = Any  # for who asks for hints at run time: numpy.typing takes as long to import as all of this

_BARE_DTYPE = np.dtype("<u2")
_LLM_C_HEADER_BYTES = 256 * 4


class _Layout(NamedTuple):
    """Where a file's tokens lie."""

    dtype: np.dtype
    base_bytes: int
    tokens: int


@dataclass(frozen=True)
class Tokens:
    """Windows of ``seq_len + 1`` tokens, ``stride`` apart, none across a file's end.

    A batch is int64 ``(B, seq_len + 1)``: inputs are ``batch[:, :-1]``, targets ``batch[:, 1:]``. A file too short for
    a window gives none, and so do the tokens behind a file's last whole window.

    Args:
        dtype: of the tokens as stored. None takes what a file's header says, and uint16 for a bare file.
        seq_len: tokens a model is fed at a time.
        stride: tokens from one window's start to the next one's; None is ``seq_len``, so that each token is a target
            once.
        raw: batches keep the stored dtype.

    Raises:
        ValueError: ``dtype`` is no integer, or ``seq_len`` or ``stride`` is less than 1.
    """

    dtype: DTypeLike | None = None
    seq_len: int = 1024
    stride: int | None = None
    raw: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None and np.dtype(self.dtype).kind not in "iu":
            raise ValueError(f"{self}: tokens are integers")
        if self.seq_len < 1 or (self.stride is not None and self.stride < 1):
            raise ValueError(f"{self}: seq_len and stride are at least 1")

    def index(self, paths: list[str]) -> Index:
        """Find the windows of ``paths``.

        Raises:
            CorruptData: a header lies about the file's size, or a file ends within a token.
            ValueError: files of unlike dtype, or of another one than this format was told; a npy file that holds no
                one-dimensional integers; or no file is long enough for a window.
            FileNotFoundError, IoError: a file is not to be had.
        """
        heads, size_bytes, mtime_ns = read_heads(paths, _LLM_C_HEADER_BYTES)
        layouts = [self._layout(*file) for file in zip(heads, paths, size_bytes.tolist(), strict=True)]
        dtype = layouts[0].dtype
        for path, layout in zip(paths, layouts, strict=True):
            if layout.dtype != dtype:
                raise ValueError(
                    f"{paths[0]} holds {dtype.str} tokens and {path} holds {layout.dtype.str}: read them as separate "
                    f"datasets (a file with no header is taken for {_BARE_DTYPE.str} unless dtype= says otherwise)"
                )
        window, stride = self.seq_len + 1, self.stride or self.seq_len
        windows = [max(0, (layout.tokens - window) // stride + 1) for layout in layouts]
        if not any(windows):
            raise ValueError(
                f"no window of {window} tokens (seq_len + 1) in {len(paths)} files such as {paths[0]}, the longest of "
                f"which has {max(layout.tokens for layout in layouts)}: use a shorter seq_len or longer files"
            )
        return Index(
            paths=paths,
            size_bytes=size_bytes,
            mtime_ns=mtime_ns,
            first_sample=first_samples(windows),
            base_bytes=np.array([layout.base_bytes for layout in layouts], np.int64),
            stride_bytes=np.full(len(paths), stride * dtype.itemsize, np.int64),
            sample=Sample(dtype, (window,), result_dtype=None if self.raw else torch.int64),
        )

    def _layout(self, head: bytes, path: str, size_bytes: int) -> _Layout:
        """Where the tokens of one file lie, told by its magic: OLMo's bare files are called .npy as well."""
        if magics.is_npy(head, path):
            layout = _npy_layout(head, path, size_bytes)
        elif magics.is_llm_c(head, path):
            layout = _llm_c_layout(head, path, size_bytes)
        else:
            dtype = _BARE_DTYPE if self.dtype is None else np.dtype(self.dtype)
            return _Layout(dtype, 0, count_items(path, size_bytes, 0, dtype.itemsize, "token"))
        if self.dtype is not None and layout.dtype != np.dtype(self.dtype):
            raise ValueError(f"{path}: its header says {layout.dtype.str} tokens, not {self}: leave dtype out")
        return layout


def _llm_c_layout(head: bytes, path: str, size_bytes: int) -> _Layout:
    if len(head) < _LLM_C_HEADER_BYTES:
        message = f"{path}: llm.c's header takes {_LLM_C_HEADER_BYTES} bytes, but the file ends at {size_bytes}"
        raise CorruptData(message, path, 0, len(head))
    magic, version, tokens = struct.unpack_from("<3i", head)
    if version != 1:
        raise CorruptData(f"{path}: version {version} of llm.c's header, not 1: write the file again", path, 4, 4)
    dtype = np.dtype(magics.LLM_C_DTYPES[magic])
    if _LLM_C_HEADER_BYTES + tokens * dtype.itemsize != size_bytes:
        raise CorruptData(
            f"{path}: llm.c's header counts {tokens} {dtype.str} tokens, but {size_bytes - _LLM_C_HEADER_BYTES} bytes "
            f"follow it: the file was cut short or appended to, write it again",
            path,
            8,
            4,
        )
    return _Layout(dtype, _LLM_C_HEADER_BYTES, tokens)


def _npy_layout(head: bytes, path: str, size_bytes: int) -> _Layout:
    from gdsdata.formats import npy  # which most token files have no need of

    header = npy.read_header(head, path, size_bytes)
    if header.dtype.kind not in "iu" or len(header.shape) != 1:
        raise ValueError(
            f"{path}: npy file of {header.dtype.str}, shape {header.shape}; tokens are one-dimensional integers"
        )
    return _Layout(header.dtype, header.data_offset, header.shape[0])
