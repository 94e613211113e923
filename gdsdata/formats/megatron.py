"""Megatron-LM's indexed datasets: ``.idx`` files, and ``.bin`` files of tokens.

Sources, in https://github.com/NVIDIA/Megatron-LM under ``megatron/core/datasets``:
``indexed_dataset.py`` (the files), ``gpt_dataset.py`` and ``helpers.cpp`` (the windows, which are
cut and shuffled here as there, token for token).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import numpy as np
import torch

from gdsdata.errors import CorruptData
from gdsdata.formats.extents import Extents
from gdsdata.formats.fields import Field, FieldIndex
from gdsdata.formats.index import Index, first_samples
from gdsdata.formats.parsers import magics
from gdsdata.formats.sample import Sample
from gdsdata.formats.windows import WindowIndex
from gdsdata.storage.heads import read_heads, sizes_of
from gdsdata.storage.opened import read_whole
from gdsdata.whole_numbers import shown, whole_number

_OLD_MAGIC = b"TNTIDX\0\0"
# Magic, version, code of the dtype, number of sequences, number of document bounds. The arrays
# behind it lie unaligned.
_HEAD = struct.Struct("<9sQBQQ")
_COUNTS_AT = 18
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
# The part of an epoch below which Megatron shuffles the last epoch by itself.
_MOST_OF_AN_EPOCH = 0.8


class Head(NamedTuple):
    """The head of an ``.idx`` file."""

    dtype: np.dtype
    sequences: int
    document_bounds: int

    @property
    def arrays_bytes(self) -> int:
        """Bytes of lengths (int32), pointers (int64) and document bounds (int64) together."""
        return self.sequences * (4 + 8) + self.document_bounds * 8


class Sequences(NamedTuple):
    """The S sequences of a ``.bin`` file.

    Attributes:
        dtype: of their tokens.
        lengths: int32 (S,), in tokens.
        pointers: int64 (S,), offset of each in the ``.bin`` file, in bytes.
    """

    dtype: np.dtype
    lengths: np.ndarray
    pointers: np.ndarray


@dataclass(frozen=True)
class Megatron:
    """Megatron-LM's ``.idx`` and ``.bin`` pairs.

    Samples are their sequences, or the windows that a GPT is trained on. With ``seq_len``, a sample
    is ``seq_len + 1`` tokens of the sequences laid end to end. It begins ``seq_len`` tokens behind
    the sample before, so each token is a target once. Every pair is cut by itself, and so is each
    of a blend in Megatron. A sequence here, one entry of the ``.idx``, is a document in Megatron's
    windows. Document bounds are checked, but mean nothing to the windows.

    For the samples of a Megatron run, in its order: its ``seed``, its ``num_samples``, its
    ``split``, and a data set that does not shuffle. To let the data set shuffle, leave ``seed``
    out: windows then lie in one piece.

    Args:
        seq_len: tokens a model is fed at a time. None: each sequence is a sample, of a length of
            its own.
        seed: of numpy's `RandomState`, which shuffles the sequences of all epochs, then the
            windows. None: neither.
        num_samples: windows wanted of each pair, which takes whole epochs of its sequences, so
            there are as many or more. If the last epoch is needed for less than 80 % of its
            windows, it is shuffled by itself, sequences and windows. None: one epoch.
        split: part of each pair's sequences that is used, as fractions of their number: Megatron's
            "969,30,1" trains on ``(0, 0.969)``.
        drop_last: leave out the tokens behind the last whole window; else they are a last, shorter
            one.

    Raises:
        TypeError: ``seq_len``, ``num_samples`` or ``seed`` is no whole number, or ``split`` no
            pair.
        ValueError: an argument out of its range, or one of windows without ``seq_len``.
    """

    seq_len: int | None = None
    seed: int | None = None
    num_samples: int | None = None
    split: tuple[float, float] = (0.0, 1.0)
    drop_last: bool = True

    def __post_init__(self) -> None:
        if self.seq_len is None and (self.seed is not None or self.num_samples is not None or not self.drop_last):
            raise ValueError(f"{self}: seed, num_samples and drop_last are of windows: pass seq_len too")
        for name in ("seq_len", "num_samples", "seed"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole_number(name, value))
        if (self.seq_len is not None and self.seq_len < 1) or (self.num_samples is not None and self.num_samples < 1):
            raise ValueError(f"{self}: seq_len and num_samples are at least 1")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise ValueError(f"{self}: numpy's RandomState takes seeds from 0 to 2**32 - 1")
        split = self.split
        is_pair = isinstance(split, (tuple, list)) and len(split) == 2 and all(isinstance(one, Real) for one in split)
        if not is_pair:
            raise TypeError(f"split={shown(split)} must be two numbers, where the part begins and where it ends")
        if not 0 <= self.split[0] <= self.split[1] <= 1:
            raise ValueError(f"{self}: split is where the part begins and where it ends, from 0 to 1")

    def index(self, paths: list[str]) -> Index | FieldIndex | WindowIndex:
        """Find the sequences or the windows of ``paths``.

        Args:
            paths: ``.idx`` files, ``.bin`` files, or both. Each pair is read once.

        Returns:
            An index of the ``.bin`` files. With ``seq_len`` None it is a `FieldIndex` of one field,
            "tokens". Otherwise it is a `WindowIndex`, or an `Index` if windows are in order and
            each is one piece.

        Raises:
            CorruptData: an ``.idx`` file contradicts itself, or points beyond its ``.bin`` file.
            ValueError: a path of another suffix, the old format of fairseq, pairs of unlike dtypes,
                windows of floats, or not enough tokens for a window.
            FileNotFoundError, IoError: a file, or the other one of its pair, is not available.
        """
        prefixes = _prefixes(paths)
        bins = [f"{prefix}.bin" for prefix in prefixes]
        try:
            size_bytes, mtime_ns = sizes_of(bins)
            pairs = [
                self._part(read_index(f"{prefix}.idx", bin_bytes))
                for prefix, bin_bytes in zip(prefixes, size_bytes.tolist(), strict=True)
            ]
        except FileNotFoundError as error:
            raise _without_its_pair(error) from None
        dtype = pairs[0].dtype
        for path, pair in zip(bins, pairs, strict=True):
            if pair.dtype != dtype:
                raise ValueError(
                    f"{bins[0]} holds {dtype} tokens and {path} holds {pair.dtype}: read them as separate datasets"
                )
        if self.seq_len is not None:
            return self._windows(self.seq_len, bins, size_bytes, mtime_ns, pairs)
        lengths = [pair.lengths.astype(np.int64) * dtype.itemsize for pair in pairs]
        begin_bytes = np.concatenate([pair.pointers for pair in pairs])[:, None]
        return FieldIndex(
            paths=bins,
            size_bytes=size_bytes,
            mtime_ns=mtime_ns,
            first_sample=first_samples([len(length) for length in lengths]),
            fields=(Field("tokens", dtype),),
            extents=Extents.of(begin_bytes, np.concatenate(lengths)[:, None]),
        )

    @staticmethod
    def side_files(paths: list[str]) -> list[str]:
        """Return the ``.idx`` files of these pairs."""
        return [f"{prefix}.idx" for prefix in _prefixes(paths)]

    def _part(self, pair: Sequences) -> Sequences:
        """Return the sequences that ``split`` leaves."""
        begin, end = (round(bound * len(pair.lengths)) for bound in self.split)
        return Sequences(pair.dtype, pair.lengths[begin:end], pair.pointers[begin:end])

    def _windows(
        self, seq_len: int, paths: list[str], size_bytes: np.ndarray, mtime_ns: np.ndarray, pairs: list[Sequences]
    ) -> Index | WindowIndex:
        dtype = pairs[0].dtype
        if dtype.kind not in "iu":
            raise ValueError(f"{paths[0]} holds {dtype}, and windows are of integers: leave seq_len out")
        cuts = [_cut(pair, seq_len, self) for pair in pairs]
        first_sample = first_samples([cut.windows for cut in cuts])
        first_token = first_samples([cut.tokens for cut in cuts])
        if not first_sample[-1]:
            raise ValueError(
                f"no window of {seq_len + 1} tokens (seq_len + 1) in {len(paths)} files such as {paths[0]}, which "
                f"have {first_token[-1]} in all: use a shorter seq_len, a larger split, or drop_last=False"
            )
        index = WindowIndex(
            paths=paths,
            size_bytes=size_bytes,
            mtime_ns=mtime_ns,
            first_sample=first_sample,
            sample=Sample(dtype, (seq_len + 1,), result_dtype=torch.int64),
            file_token=first_token,
            run_token=np.concatenate(
                [*(cut.run_token + at for cut, at in zip(cuts, first_token[:-1], strict=True)), first_token[-1:]]
            ),
            run_bytes=np.concatenate([cut.run_bytes for cut in cuts]),
            shuffled=None if self.seed is None else np.concatenate([cut.shuffled for cut in cuts]),
        )
        return index.strided() or index


class _Cut(NamedTuple):
    """One file's part of a `WindowIndex`; its tokens and windows are numbered from 0."""

    tokens: int
    windows: int
    run_token: np.ndarray
    run_bytes: np.ndarray
    shuffled: np.ndarray | None


def _cut(pair: Sequences, seq_len: int, wanted: Megatron) -> _Cut:
    """Lay the sequences end to end, epoch after epoch, and cut them into windows."""
    tokens_an_epoch = int(pair.lengths.sum(dtype=np.int64))
    epochs, last_by_itself = plan_epochs(tokens_an_epoch, seq_len, wanted.num_samples)
    tokens = epochs * tokens_an_epoch
    targets = max(0, tokens - 1)
    windows = targets // seq_len if wanted.drop_last else -(-targets // seq_len)
    order = np.tile(_arange(len(pair.lengths)), epochs)
    shuffled = None
    if wanted.seed is not None:
        shuffled = _arange(windows)
        earlier = epochs - last_by_itself
        state = np.random.RandomState(wanted.seed)
        _shuffle_apart(order, earlier * len(pair.lengths), state)
        _shuffle_apart(shuffled, (earlier * tokens_an_epoch - 1) // seq_len if last_by_itself else windows, state)

    run_token, run_bytes = _runs(pair.lengths[order], pair.pointers[order], pair.dtype.itemsize)
    return _Cut(tokens, windows, run_token, run_bytes, shuffled)


def plan_epochs(tokens_an_epoch: int, seq_len: int, num_samples: int | None) -> tuple[int, bool]:
    """Return how many epochs the windows take, and if the last is shuffled by itself."""
    if num_samples is None or not tokens_an_epoch:
        return 1, False
    epochs = -(-(num_samples * seq_len + 1) // tokens_an_epoch)
    from_last = num_samples - ((epochs - 1) * tokens_an_epoch - 1) // seq_len
    in_an_epoch = (tokens_an_epoch - 1) // seq_len
    return epochs, epochs > 1 and from_last < int(_MOST_OF_AN_EPOCH * in_an_epoch)


def _arange(count: int) -> np.ndarray:
    """Return ``arange``, in half the bytes if they suffice.

    `RandomState.shuffle` shuffles both alike.
    """
    return np.arange(count, dtype=np.int32 if count < 2**31 else np.int64)


def _shuffle_apart(items: np.ndarray, first: int, state: np.random.RandomState) -> None:
    """Shuffle the first ``first`` items, and then the others, in place."""
    state.shuffle(items[:first])
    state.shuffle(items[first:])


def _runs(lengths: np.ndarray, pointers: np.ndarray, token_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a `WindowIndex`'s ``run_token`` (without its end) and ``run_bytes``."""
    some = lengths > 0
    lengths, pointers = lengths[some].astype(np.int64), pointers[some]
    begins = np.ones(len(lengths), bool)
    begins[1:] = pointers[:-1] + lengths[:-1] * token_bytes != pointers[1:]
    first_token = np.cumsum(lengths) - lengths
    return first_token[begins], pointers[begins]


def _prefixes(paths: Sequence[str]) -> list[str]:
    """Return the common part of the names of each pair's files, each once, in order."""
    for path in paths:
        if not path.endswith((".idx", ".bin")):
            raise ValueError(f"{path} is neither an .idx nor a .bin file of Megatron-LM: name these alone")
    return list(dict.fromkeys(os.path.splitext(path)[0] for path in paths))


def read_index(path: str, bin_bytes: int) -> Sequences:
    """Return the sequences of a ``.bin`` file by its ``.idx`` file ``path``.

    Raises:
        CorruptData, ValueError: as `parse_index`.
        FileNotFoundError, IoError: the file is not available.
    """
    (head,), (size_bytes,), _ = read_heads([path], _HEAD.size)
    parse_head(head, path, int(size_bytes))  # before what may be gigabytes of something else is read
    return parse_index(read_whole(path), path, bin_bytes)


def parse_head(head: bytes, path: str, size_bytes: int) -> Head:
    """Parse the head of an ``.idx`` file of ``size_bytes``: 34 bytes or more.

    Raises:
        CorruptData: it is no such head, or the file is not as long as its counts say.
        ValueError: the old format.
    """
    if head.startswith(_OLD_MAGIC):
        raise ValueError(f"{path} is of the old format (TNTIDX) that Megatron-LM no longer reads: preprocess again")
    if not head.startswith(magics.MEGATRON):
        raise _corrupt(path, f"it starts with {head[:9]!r}, not with {magics.MEGATRON!r}", 0, len(magics.MEGATRON))
    if len(head) < _HEAD.size:
        raise _corrupt(path, f"its head takes {_HEAD.size} bytes, but it ends at {len(head)}", 0, len(head))
    _, version, code, sequences, document_bounds = _HEAD.unpack_from(head)
    if version != 1:
        raise _corrupt(path, f"version {version}, not 1", 9, 8)
    if code not in _DTYPES:
        raise _corrupt(path, f"code {code} is of no dtype", 17, 1)
    found = Head(np.dtype(_DTYPES[code]), sequences, document_bounds)
    # Multimodal files have one more byte a sequence at their end, its mode.
    if size_bytes - _HEAD.size not in (found.arrays_bytes, found.arrays_bytes + sequences):
        raise _corrupt(
            path,
            f"{sequences} sequences and {document_bounds} document bounds take {found.arrays_bytes} bytes behind its "
            f"head, but {size_bytes - _HEAD.size} follow: it was cut short, or appended to",
            _COUNTS_AT,
            16,
        )
    return found


def parse_index(data: bytes | np.ndarray, path: str, bin_bytes: int) -> Sequences:
    """Return the sequences of an ``.idx`` file for a ``.bin`` file of ``bin_bytes``.

    Args:
        data: the file's bytes, or uint8 of them.
        path: named in errors.

    Raises:
        CorruptData, ValueError: as `parse_head`.
        CorruptData: a length is below 0, a pointer is not on a token, a sequence ends beyond the
            ``.bin`` file, or document bounds do not rise from 0 to the number of sequences.
    """
    data = np.frombuffer(data, np.uint8)
    dtype, sequences, document_bounds = parse_head(data[: _HEAD.size].tobytes(), path, len(data))
    at = np.cumsum([_HEAD.size, sequences * 4, sequences * 8, document_bounds * 8]).tolist()
    # Copied, because none of them is aligned where it lies.
    lengths, pointers, bounds = (
        data[begin:end].view(stored).astype(stored[1:])
        for begin, end, stored in zip(at[:-1], at[1:], ("<i4", "<i8", "<i8"), strict=True)
    )
    if (bad := _first(lengths < 0)) is not None:
        raise _corrupt(path, f"sequence {bad} has {lengths[bad]} tokens", at[0] + bad * 4, 4)
    last_begin = bin_bytes - lengths.astype(np.int64) * dtype.itemsize
    if (bad := _first((pointers < 0) | (pointers > last_begin) | (pointers % dtype.itemsize != 0))) is not None:
        reason = (
            f"sequence {bad}, {lengths[bad]} tokens of {dtype} at {pointers[bad]}, is not within the {bin_bytes} bytes "
            f"of its .bin file, or not on a token"
        )
        raise _corrupt(path, reason, at[1] + bad * 8, 8)
    if not document_bounds or bounds[0] != 0 or bounds[-1] != sequences or (bounds[1:] < bounds[:-1]).any():
        reason = f"its {document_bounds} document bounds do not rise from 0 to its {sequences} sequences"
        raise _corrupt(path, reason, at[2], document_bounds * 8)
    return Sequences(dtype, lengths, pointers)


def _without_its_pair(error: FileNotFoundError) -> FileNotFoundError:
    """Return the same error of a file of a pair, with the other one's name."""
    prefix, suffix = os.path.splitext(error.filename)
    other = prefix + (".bin" if suffix == ".idx" else ".idx")
    reason = f"{error.strerror}, but the other file of its pair, {other}, is asked for: fetch both, or preprocess again"
    return FileNotFoundError(error.errno, reason, error.filename)


def _first(wrong: np.ndarray) -> int | None:
    """Return the first place that is True, if any."""
    place = int(wrong.argmax()) if len(wrong) else 0
    return place if len(wrong) and wrong[place] else None


def _corrupt(path: str, reason: str, offset: int, length: int) -> CorruptData:
    message = f"{path} is damaged at bytes {offset} to {offset + length}: {reason}; preprocess or copy it again"
    return CorruptData(message, path, offset, length)
