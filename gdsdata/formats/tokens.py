"""Token files: bare (nanoGPT, OLMo), or behind a header of llm.c or npy.

Windows of tokens are the samples.

Sources of the formats: nanoGPT ``data/openwebtext/prepare.py`` (``tofile`` of uint16), llm.c
``dev/data/data_common.py`` (256 int32: magic, version 1, count of tokens; then the tokens).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from gdsdata.errors import CorruptData
from gdsdata.formats.index import Index, count_items, first_samples
from gdsdata.formats.parsers import magics
from gdsdata.formats.sample import Sample, numpy_dtype
from gdsdata.storage.heads import read_heads
from gdsdata.warn import warn
from gdsdata.whole_numbers import whole_number

if TYPE_CHECKING:
    from numpy.typing import DTypeLike
else:
    DTypeLike = Any  # at run time: numpy.typing takes as long to import as all of this

_BARE_DTYPE = np.dtype("<u2")
_LLM_C_HEADER_BYTES = 256 * 4
# Vocabularies have some hundred thousand tokens; values far below zero, or above this, are of
# another dtype.
_LARGEST_TOKEN = 2**24
_LEAST_TOKEN = -(2**15)  # -100 and the like mean "no target"
# The upper half of a token that is read as two: vocabularies of less than a million have no more
# there.
_LARGEST_UPPER_HALF = 15
# No file has so many tokens, and in bytes they are still within int64.
_LARGEST_STRIDE = 2**59
# Fewer tokens than these show nothing.
_FEWEST_TOKENS = 64
# So many files are looked at, and less than twice as many: a look takes 20 us.
_LOOKED_AT = 100


class _Layout:
    """The place of a file's tokens."""

    def __init__(self, dtype: np.dtype, base_bytes: int, tokens: int) -> None:
        self.dtype, self.base_bytes, self.tokens = dtype, base_bytes, tokens


@dataclass(frozen=True)
class Tokens:
    """Windows of ``seq_len + 1`` tokens, ``stride`` apart, none across a file's end.

    The first tokens of a hundred or two files are looked at: if most of them cannot be tokens of
    ``dtype``, a warning says what they seem to be.

    A batch is int64 ``(B, seq_len + 1)``: inputs are ``batch[:, :-1]``, targets ``batch[:, 1:]``. A
    file too short for a window gives none, and so do the tokens behind a file's last whole window.

    Args:
        dtype: of the tokens as stored, of numpy or torch. None takes what a file's header says,
            and uint16 for a bare file.
        seq_len: tokens a model is fed at a time.
        stride: tokens from one window's start to the next one's; None is ``seq_len``, so that each
            token is a target once.
        raw: batches keep the stored dtype.

    Raises:
        TypeError: ``dtype`` is no dtype, or ``seq_len`` or ``stride`` no whole number.
        ValueError: ``dtype`` is no integer, or ``seq_len`` or ``stride`` is less than 1.
    """

    dtype: DTypeLike | torch.dtype | None = None
    seq_len: int = 1024
    stride: int | None = None
    raw: bool = False
    takes_any_bytes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.dtype, torch.dtype):
            object.__setattr__(self, "dtype", numpy_dtype(self.dtype))
        if self.dtype is not None and numpy_dtype(self.dtype).kind not in "iu":
            raise ValueError(f"{self}: tokens are integers")
        for name in ("seq_len", "stride"):
            if (value := getattr(self, name)) is not None or name == "seq_len":
                object.__setattr__(self, name, whole_number(name, value))
        if self.seq_len < 1 or (self.stride is not None and self.stride < 1):
            raise ValueError(f"{self}: seq_len and stride are at least 1")

    def index(self, paths: list[str]) -> Index:
        """Find the windows of ``paths``.

        Raises:
            CorruptData: a header lies about the file's size, or a file ends within a token.
            ValueError: files of unlike dtype, or of another one than ``dtype``; a npy
                file that holds no one-dimensional integers; or no file is long enough for a window.
            FileNotFoundError, IoError: a file is not available.
        """
        heads, size_bytes, mtime_ns = read_heads(paths, _LLM_C_HEADER_BYTES)
        layouts = [self._layout(*file) for file in zip(heads, paths, size_bytes.tolist(), strict=True)]
        _warn_of_another_dtype(heads, paths, layouts)
        dtype = layouts[0].dtype
        for path, layout in zip(paths, layouts, strict=True):
            if layout.dtype != dtype:
                raise ValueError(
                    f"{paths[0]} holds {dtype.str} tokens and {path} holds {layout.dtype.str}: read them as separate "
                    f"datasets (a file with no header is taken for {_BARE_DTYPE.str} unless dtype= says otherwise)"
                )
        window, stride = self.seq_len + 1, min(self.stride or self.seq_len, _LARGEST_STRIDE)
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
            sample=self._sample_of(dtype),
        )

    @property
    def expected_sample(self) -> Sample:
        """The samples of files without a header, or of ``dtype``."""
        return self._sample_of(self._bare_dtype())

    def _bare_dtype(self) -> np.dtype:
        return _BARE_DTYPE if self.dtype is None else numpy_dtype(self.dtype)

    def _sample_of(self, dtype: np.dtype) -> Sample:
        return Sample(dtype, (self.seq_len + 1,), result_dtype=None if self.raw else torch.int64)

    def _layout(self, head: bytes, path: str, size_bytes: int) -> _Layout:
        """Return the place of the tokens of one file, by its magic.

        The name does not say it: OLMo's bare files are called .npy as well.
        """
        if magics.is_npy(head, path):
            layout = _npy_layout(head, path, size_bytes)
        elif magics.is_llm_c(head, path):
            layout = _llm_c_layout(head, path, size_bytes)
        else:
            dtype = self._bare_dtype()
            return _Layout(dtype, 0, count_items(path, size_bytes, 0, dtype.itemsize, "token"))
        if self.dtype is not None and layout.dtype != numpy_dtype(self.dtype):
            raise ValueError(f"{path}: its header says {layout.dtype.str} tokens, not {self}: leave dtype out")
        return layout


def _warn_of_another_dtype(heads: list[bytes], paths: list[str], layouts: list[_Layout]) -> None:
    """Warn of a bare file whose tokens seem to be of another dtype.

    Not all of many files are looked at: one program usually writes all of a data set.
    """
    bare = [file for file, layout in enumerate(layouts) if layout.base_bytes == 0]
    for file in bare[:: max(1, len(bare) // _LOOKED_AT)]:
        head, path, layout = heads[file], paths[file], layouts[file]
        if (seems := seeming_dtype(head, layout.dtype)) is not None:
            warn(
                f"gdsdata: {path} is read as tokens of {layout.dtype.name}, but its first {len(head)} bytes seem to be "
                f'of {seems}: if so, pass Tokens("{seems}")'
            )
            return


def seeming_dtype(head: bytes, dtype: np.dtype) -> str | None:
    """Return the dtype that the tokens in ``head`` seem to have.

    None: most of them can be tokens of ``dtype``, or they show nothing.
    """
    width = dtype.itemsize
    if width == 1 or len(head) < _FEWEST_TOKENS * width:
        return None
    if _few_are_tokens(head, dtype):
        others = (dtype.newbyteorder(), *(np.dtype(f"<u{narrower}") for narrower in (4, 2) if narrower < width))
        found = next((other for other in others if not _few_are_tokens(head, other)), None)
        return None if found is None else found.str if found.str.startswith(">") else found.name
    halves = np.frombuffer(head[: len(head) // (2 * width) * (2 * width)], dtype.newbyteorder("<")).reshape(-1, 2)
    lower, upper = halves.T
    most = _LARGEST_UPPER_HALF if width == 2 else 0
    if width == 8 or not (lower[lower != np.iinfo(dtype).max] >= 256).any() or upper.min() < 0 or upper.max() > most:
        return None
    return "int64" if width == 4 or not halves[1::2].any() else "uint32"


def _few_are_tokens(head: bytes, dtype: np.dtype) -> bool:
    """Return whether less than half of the values can be tokens.

    The largest integer is left out: it may mark a place without a token.
    """
    least, largest = np.iinfo(dtype).min, np.iinfo(dtype).max
    values = np.frombuffer(head[: len(head) // dtype.itemsize * dtype.itemsize], dtype)
    values = values[values != largest]
    likely = (values >= max(_LEAST_TOKEN, least)) & (values <= min(_LARGEST_TOKEN, largest))
    return 2 * int(likely.sum()) < len(values)


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
    from gdsdata.formats import npy  # few token files need it

    header = npy.read_header(head, path, size_bytes)
    if header.dtype.kind not in "iu" or len(header.shape) != 1:
        raise ValueError(
            f"{path}: npy file of {header.dtype.str}, shape {header.shape}; tokens are one-dimensional integers"
        )
    return _Layout(header.dtype, header.data_offset, header.shape[0])
