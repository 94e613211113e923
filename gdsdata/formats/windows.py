"""`WindowIndex`: the places of windows of tokens that may have several pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gdsdata.formats.index import Index, SampleIndex
from gdsdata.formats.plan import Plan
from gdsdata.formats.sample import Sample
from gdsdata.io import engine

if TYPE_CHECKING:
    from gdsdata.formats.index import Made, Readers


@dataclass(eq=False, repr=False)
class WindowIndex(SampleIndex):
    """Where every window of some token files lies, in however many pieces.

    The tokens of all files have numbers, in the order they are read (a sequence comes again in
    every epoch). Tokens that lie together in a file and in that order are a run. So a window of a
    file is its intersection with some successive runs. The index keeps 16 bytes a run, and 4 a
    window if they are shuffled.

    Attributes:
        sample: what each of them is; a file's last window may be shorter, as `Megatron` was asked.
        file_token: int64 (F + 1,), number of each file's first token, then the number of tokens.
        run_token: int64 (R + 1,), number of the first token of each of the R runs, none of them
            empty, then the same.
        run_bytes: int64 (R,), offset of each run in its file.
        shuffled: int32 or int64 (N,), which window of its file each sample is; None: they are in
            order.
    """

    kind: ClassVar[str] = "windows"
    sample: Sample
    file_token: np.ndarray
    run_token: np.ndarray
    run_bytes: np.ndarray
    shuffled: np.ndarray | None

    def plan(self, samples: np.ndarray) -> Plan:
        """Return the pieces of windows, one or more each, in the order of their tokens.

        No piece is empty.
        """
        file = engine.find_files(samples, self.first_sample)
        order = self.shuffled
        window = samples - self.first_sample[file] if order is None else order[samples].astype(np.int64)
        (window_tokens,) = self.sample.shape
        begin = self.file_token[file] + window * (window_tokens - 1)
        end = np.minimum(begin + window_tokens, self.file_token[file + 1])

        first_run = np.searchsorted(self.run_token, begin, side="right") - 1
        pieces = np.searchsorted(self.run_token, end, side="left") - first_run
        sample_ptr = np.concatenate([[0], np.cumsum(pieces)])
        of_sample = np.repeat(np.arange(len(samples)), pieces)
        run = np.arange(len(of_sample)) + (first_run - sample_ptr[:-1])[of_sample]

        run_begin = self.run_token[run]
        piece_begin = np.maximum(run_begin, begin[of_sample])
        piece_end = np.minimum(self.run_token[run + 1], end[of_sample])
        token_bytes = self.sample.dtype.itemsize
        offset = self.run_bytes[run] + (piece_begin - run_begin) * token_bytes
        length = (piece_end - piece_begin) * token_bytes
        return Plan(samples, file[of_sample].astype(np.int32), offset, length, sample_ptr)

    def read_by(self, readers: Readers[Made]) -> Made:
        return readers.of_windows(self)

    def _part(self, files: slice, begin: int, end: int) -> dict[str, Any]:
        file_token = self.file_token[files.start : files.stop + 1].copy()
        if self.shuffled is None:
            file_token[0] += (begin - self.first_sample[files.start]) * (self.sample.shape[0] - 1)
        return {
            "file_token": file_token,
            "shuffled": None if self.shuffled is None else self.shuffled[begin:end],
        }

    @property
    def is_even(self) -> bool:
        """Whether no window is shorter than the others; not for a `part` that is shuffled."""
        (window_tokens,) = self.sample.shape
        needed = np.diff(self.first_sample) * (window_tokens - 1) + 1
        return bool((needed <= np.diff(self.file_token))[np.diff(self.first_sample) > 0].all())

    def strided(self) -> Index | None:
        """Return the same as an `Index`.

        None: a file's tokens lie in several runs, or windows are shuffled or of several lengths.
        """
        has_run = np.diff(self.file_token) > 0
        if self.shuffled is not None or len(self.run_bytes) != has_run.sum() or not self.is_even:
            return None
        base_bytes = np.zeros(len(self.paths), np.int64)
        base_bytes[has_run] = self.run_bytes
        stride_bytes = np.full(len(self.paths), self.spacing_bytes)
        return Index(
            self.paths, self.size_bytes, self.mtime_ns, self.first_sample, base_bytes, stride_bytes, self.sample
        )

    def most_bytes(self, samples: int) -> int:
        return min(samples, len(self)) * self.sample.bytes

    @property
    def spacing_bytes(self) -> int:
        """Bytes from one window's start to the next one's, if they lie in one piece."""
        return max(1, (self.sample.shape[0] - 1) * self.sample.dtype.itemsize)
