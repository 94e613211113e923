"""`FieldIndex`: where each field of each sample lies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from gdsdata.errors import CorruptData
from gdsdata.formats.extents import Extents
from gdsdata.formats.field import Field
from gdsdata.formats.index import SampleIndex, runs_of_files
from gdsdata.formats.plan import Plan
from gdsdata.io import engine

if TYPE_CHECKING:
    from gdsdata.formats.index import Made, Readers

__all__ = ["Field", "FieldIndex"]

_NOWHERE = 2**63 - 1
# A gap between two fields that is no longer than this is read with them.
_GAP_BYTES = 16384


@dataclass(eq=False, repr=False)
class FieldIndex(SampleIndex):
    """Where every field of every sample lies.

    Attributes:
        fields: the K fields.
        extents: of each field's bytes in the sample's file.
        checksums: uint32 (N, K), of those bytes, 0 of none; compared when they are read. None:
            there are none.
        checksum: what they are: ``"crc32"`` or ``"crc32c"``.
    """

    kind: ClassVar[str] = "fields"
    fields: tuple[Field, ...]
    extents: Extents
    checksums: np.ndarray | None = None
    checksum: Literal["crc32", "crc32c"] = "crc32c"

    def plan(self, samples: np.ndarray) -> Plan:
        """Return where the fields of samples lie, K pieces a sample.

        Pieces have the length -1 if there is no field.
        """
        file = engine.find_files(samples, self.first_sample)
        source = file if len(self.fields) == 1 else np.repeat(file, len(self.fields))
        begin, length = self.extents.take(samples)
        return Plan(samples, source, begin.reshape(-1), length.reshape(-1))

    def read_by(self, readers: Readers[Made]) -> Made:
        return readers.of_fields(self)

    @property
    def field_names(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields)

    @property
    def begin_bytes(self) -> np.ndarray:
        """int64 (N, K), offset of each field's bytes, in memory of its own."""
        return self.extents.wide().begin

    @property
    def length_bytes(self) -> np.ndarray:
        """int64 (N, K), how many they are; -1: the sample does not have this field."""
        return self.extents.wide().length

    def damaged(self, sample: int, field: int, reason: str) -> CorruptData:
        """Return the error for a field of a sample.

        Args:
            sample: its id.
            field: number of the field.
            reason: what the field does or lacks.
        """
        path = self.paths[int(np.searchsorted(self.first_sample, sample, side="right")) - 1]
        name = self.fields[field].name
        begins, lengths = (one[0] for one in self.extents.take(np.array([sample])))
        begin, length = int(begins[field]), int(lengths[field])
        if length < 0:
            begin = min(begins[lengths >= 0].tolist(), default=0)
            message = (
                f"{path}: the sample at offset {begin} has no field {name!r}, and an empty one {reason}. Write the "
                f'field, pass on_error="skip", or Fields(collate=...), which gets samples with the fields they have'
            )
            return CorruptData(message, path, begin, 0)
        return CorruptData(f"{path}: field {name!r} of {length} bytes at offset {begin} {reason}", path, begin, length)

    def _part(self, files: slice, begin: int, end: int) -> dict[str, Any]:
        return {
            "extents": self.extents[begin:end],
            "checksums": None if self.checksums is None else self.checksums[begin:end],
        }

    def most_bytes(self, samples: int) -> int:
        largest, least = np.empty(0, np.int64), -1
        for of_samples in self.extents.sample_bytes():
            if len(candidates := of_samples[of_samples > least]):
                largest = np.concatenate([largest, candidates])
                if len(largest) >= samples:
                    largest = np.partition(largest, -samples)[-samples:]
                    least = int(largest[0])
        return int(largest.sum())

    @property
    def spacing_bytes(self) -> int:
        """Bytes from one sample's start to the next one's, on average; at least 1."""
        return max(1, int(self.size_bytes.sum()) // max(1, len(self)))

    def runs(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield one run a file if a sample's fields lie together, else one for each field."""
        files = list(runs_of_files(self.first_sample, first, count))
        if not files:
            return
        begins, lengths = self.extents[first : first + count].wide()
        there = lengths > 0
        heads = np.cumsum([0, *(here for _, _, here in files[:-1])])  # the first of each file's samples
        ends = np.maximum.reduceat(np.where(there, begins + lengths, 0), heads)
        begins = np.minimum.reduceat(np.where(there, begins, _NOWHERE), heads)
        for (file, _, _), *of_fields in zip(files, begins.tolist(), ends.tolist(), strict=True):
            run_begin = run_end = 0
            for begin, end in sorted(zip(*of_fields, strict=True)):
                if begin == _NOWHERE:
                    break
                if run_end and begin > run_end + _GAP_BYTES:
                    yield file, run_begin, run_end - run_begin
                    run_end = 0
                run_begin = run_begin if run_end else begin
                run_end = max(run_end, end)
            if run_end:
                yield file, run_begin, run_end - run_begin
