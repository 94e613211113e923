"""What a format of samples with fields makes of files: a `FieldIndex`, with the extent of each field of each sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from gdsdata.formats.index import SampleIndex, runs_of_files

_NOWHERE = 2**63 - 1
# What lies between two fields is read with them where it is no more.
_GAP_BYTES = 16384


@dataclass(frozen=True)
class Field:
    """One of the fields that samples have.

    Attributes:
        name: as the format has it: the extension of a member ("jpg"), the name of a column.
        dtype: of its elements as stored, with their byte order; None: its bytes mean nothing to the format.
        shape: of one sample's value, which then no sample lacks; ``()`` is one element, None one dimension of as many
            elements as its bytes hold.
        row_shape: where ``shape`` is None: of what that one dimension counts, which then is the first of several.
        fortran_order: the first axis varies fastest in the file.
        view_as: what the stored bits are, where numpy has no such dtype: bfloat16 in a ``dtype`` of uint16.
    """

    name: str
    dtype: np.dtype | None = None
    shape: tuple[int, ...] | None = None
    row_shape: tuple[int, ...] = ()
    fortran_order: bool = False
    view_as: torch.dtype | None = None


@dataclass(frozen=True, eq=False)
class FieldIndex(SampleIndex):
    """Where every field of every sample lies.

    Attributes:
        fields: the K fields.
        begin_bytes: int64 (N, K), offset of each field's bytes in the sample's file.
        length_bytes: int64 (N, K), how many they are; -1: the sample does not have this field.
        checksums: uint32 (N, K), of those bytes, 0 of none; compared when they are read. None: there are none.
        checksum: what they are: ``"crc32"`` or ``"crc32c"``.
    """

    kind: ClassVar[str] = "fields"
    fields: tuple[Field, ...]
    begin_bytes: np.ndarray
    length_bytes: np.ndarray
    checksums: np.ndarray | None = None
    checksum: Literal["crc32", "crc32c"] = "crc32c"

    def extents(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The extents of ``samples``.

        Args:
            samples: int64 (m,), each in ``range(len(self))``; not checked, for it runs once a batch.

        Returns:
            The file of each sample (int32 (m,), a place in ``paths``), and of each of its fields the offset there and
            the length, in bytes (int64 (m, K) each; the length is -1 where the sample does not have the field); and
            ``samples``, by which a reader of copies of these bytes still knows what they are.
        """
        file = np.searchsorted(self.first_sample, samples, side="right") - 1
        return file.astype(np.int32), self.begin_bytes[samples], self.length_bytes[samples], samples

    def _part(self, files: slice, begin: int, end: int) -> dict[str, Any]:
        return {
            "begin_bytes": self.begin_bytes[begin:end],
            "length_bytes": self.length_bytes[begin:end],
            "checksums": None if self.checksums is None else self.checksums[begin:end],
        }

    def most_bytes(self, samples: int) -> int:
        """Of so many samples' fields, whichever they are."""
        of_samples = np.maximum(self.length_bytes, 0).sum(1)
        largest = np.partition(of_samples, -samples)[-samples:] if samples < len(of_samples) else of_samples
        return int(largest.sum())

    @property
    def spacing_bytes(self) -> int:
        """Of a sample, on the average, with what lies between samples; at least 1."""
        return max(1, int(self.size_bytes.sum()) // max(1, len(self)))

    def runs(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """File (a place in ``paths``), offset and bytes of what ``count`` samples from ``first`` on have in each file.

        Of a file it is one run where the fields of a sample lie together, and one for each field where they do not.
        """
        for file, begin, here in runs_of_files(self.first_sample, first, count):
            samples = slice(int(self.first_sample[file]) + begin, int(self.first_sample[file]) + begin + here)
            begins, lengths = self.begin_bytes[samples], self.length_bytes[samples]
            there = lengths > 0
            begins, ends = np.where(there, begins, _NOWHERE).min(0), np.where(there, begins + lengths, 0).max(0)
            run_begin = run_end = 0
            for field in np.argsort(begins):
                if begins[field] == _NOWHERE:
                    break
                if run_end and begins[field] > run_end + _GAP_BYTES:
                    yield file, run_begin, run_end - run_begin
                    run_end = 0
                run_begin = run_begin if run_end else int(begins[field])
                run_end = max(run_end, int(ends[field]))
            if run_end:
                yield file, run_begin, run_end - run_begin
