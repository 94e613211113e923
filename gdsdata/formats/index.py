"""`SampleIndex`: where the samples of files lie, with no Python for each sample.

A format (`Format`) makes one of files. Readers ask it for the extents of sample ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np

from gdsdata.errors import CorruptData
from gdsdata.fork_safe import cached_property
from gdsdata.formats.sample import Sample
from gdsdata.io import engine
from gdsdata.storage.heads import sizes_of
from gdsdata.storage.paths import joined
from gdsdata.values import Frozen

Self = TypeVar("Self", bound="SampleIndex")

if TYPE_CHECKING:
    from gdsdata.formats.plan import Plan

    Made = TypeVar("Made", covariant=True)

    class Readers(Protocol[Made]):
        """Makes readers of samples: one method for each way in which samples lie.

        See `SampleIndex.read_by`. Indexes of other modules are Any, because these import this one.
        """

        def of_one_size(self, index: Index) -> Made:
            """Return what reads the samples of an `Index`."""

        def of_fields(self, index: Any) -> Made:
            """Return what reads the samples of a `fields.FieldIndex`."""

        def of_windows(self, index: Any) -> Made:
            """Return what reads the samples of a `windows.WindowIndex`."""

        def of_row_groups(self, index: Any) -> Made:
            """Return what reads the samples of a `tables.TableIndex`."""

    class MappedFile(Protocol):
        """A file that an index is mapped from."""

        def is_there(self) -> bool:
            """Return whether its path still names this file."""

        def index(self) -> SampleIndex:
            """Return its index; any process of this machine may call it."""


@dataclass(init=False, eq=False, repr=False)
class SampleIndex(Frozen, ABC):
    """Where the samples of some files lie. Sample ids run through the files in order.

    Attributes:
        kind: the name of the class of indexes in a state's identity of its data.
        paths: the F files.
        size_bytes: int64 (F,), when indexed. A reader refuses a file whose size or ``mtime_ns`` has
            changed.
        mtime_ns: int64 (F,), last modification, when indexed.
        first_sample: int64 (F + 1,), id of each file's first sample, then the number of samples N.
        mapped_from: the file that the arrays are mapped from, if they are of one.
    """

    kind: ClassVar[str]
    mapped_from: ClassVar[MappedFile | None] = None  # of an instance, and no part of its value
    paths: Sequence[str]
    size_bytes: np.ndarray
    mtime_ns: np.ndarray
    first_sample: np.ndarray

    def __len__(self) -> int:
        """Return the number of samples in all files."""
        return int(self.first_sample[-1])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let a process that this one spawns map the same file: a copy could be of a gigabyte.

        Other pickles may go to another machine, so they have the arrays.
        """
        if self.mapped_from and get_spawning_popen() and self.mapped_from.is_there():
            return self.mapped_from.index, ()
        return super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, whose arrays are its own."""
        return {name: value for name, value in self.__dict__.items() if name != "mapped_from"}

    def joined_paths(self, more: Sequence[str] = ()) -> np.ndarray:
        """Return `paths`, then ``more`` paths, as `paths.joined` does: uint8, one dimension."""
        return joined([*self.paths, *more] if more else self.paths)

    @abstractmethod
    def plan(self, samples: np.ndarray) -> Plan:
        """Return where samples lie.

        Args:
            samples: int64 (m,), each in ``range(len(self))``. They are not checked, because this
                runs once a batch.
        """

    @abstractmethod
    def read_by(self, readers: Readers[Made]) -> Made:
        """Return what reads these samples."""

    def part(self: Self, begin: int, end: int) -> Self:
        """Return an index of the samples ``range(begin, end)`` alone, at least one.

        Their ids count from 0.
        """
        files, first_sample = files_of_part(self.first_sample, begin, end)
        return replace(
            self,
            paths=self.paths[files],
            size_bytes=self.size_bytes[files],
            mtime_ns=self.mtime_ns[files],
            first_sample=first_sample,
            **self._part(files, begin, end),
        )

    @abstractmethod
    def _part(self, files: slice, begin: int, end: int) -> dict[str, Any]:
        """Return the other attributes of such a `part`, whose samples lie in ``files``."""

    @property
    @abstractmethod
    def spacing_bytes(self) -> int:
        """Bytes from one sample's start to the next one's, about; at least 1."""

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample, about."""
        return self.spacing_bytes

    @property
    def field_names(self) -> tuple[str, ...]:
        """The names of the samples' fields. Without any, a sample is one tensor."""
        return ()

    @property
    def is_even(self) -> bool:
        """Whether no sample is shorter than a batch has room for."""
        return True

    @property
    def group_first_sample(self) -> np.ndarray | None:
        """The groups of samples that can only be decoded as a whole.

        int64 (G + 1,), id of each group's first sample, then N. None: each sample can be read by
        itself.
        """
        return None

    @abstractmethod
    def most_bytes(self, samples: int) -> int:
        """Return the bytes of so many samples at most, whichever they are."""

    def runs(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield the runs of bytes that ``count`` samples from ``first`` on lie in.

        A run is a file (a place in ``paths``), an offset and a length in bytes.
        """
        plan = self.plan(np.arange(first, first + count))
        yield from zip(plan.source.tolist(), plan.offset.tolist(), plan.lengths.tolist(), strict=True)

    def probe(self) -> Index:
        """Return samples of one size that take about as long to read as these, to time it."""
        return records_of(self.paths[int(self.size_bytes.argmax())], self.sample_bytes)


@dataclass(eq=False, repr=False)
class Index(SampleIndex):
    """Where samples of one size lie, each in one piece.

    Sample i of file f (counted from the file's first) starts at ``base_bytes[f] + i *
    stride_bytes[f]``.

    Attributes:
        base_bytes: int64 (F,), offset of each file's first sample.
        stride_bytes: int64 (F,), from one sample's start to the next one's; less than a sample if
            they overlap.
        sample: what each of them is.
    """

    kind: ClassVar[str] = "samples"
    base_bytes: np.ndarray
    stride_bytes: np.ndarray
    sample: Sample

    def plan(self, samples: np.ndarray) -> Plan:
        from gdsdata.formats.plan import Plan  # the engine itself plans most of these samples

        if len(self.paths) == 1:
            offset = samples * self.stride_bytes[0]
            offset += self.base_bytes[0]
            return Plan(samples, np.zeros(len(samples), np.int32), offset, self.sample.bytes)
        if self._one_sample_a_file:
            return Plan(samples, samples.astype(np.int32), self.base_bytes[samples], self.sample.bytes)
        source, offset = engine.locate(samples, self.first_sample, self.base_bytes, self.stride_bytes)
        return Plan(samples, source, offset, self.sample.bytes)

    def read_by(self, readers: Readers[Made]) -> Made:
        return readers.of_one_size(self)

    def _part(self, files: slice, begin: int, end: int) -> dict[str, Any]:
        base_bytes = self.base_bytes[files].copy()
        base_bytes[0] += (begin - self.first_sample[files.start]) * self.stride_bytes[files.start]
        return {"base_bytes": base_bytes, "stride_bytes": self.stride_bytes[files]}

    @property
    def spacing_bytes(self) -> int:
        """Bytes from a sample's start to the next one's, the most of any file; at least 1."""
        return max(1, int(self.stride_bytes.max()))

    @property
    def sample_bytes(self) -> int:
        return self.sample.bytes

    def most_bytes(self, samples: int) -> int:
        return min(samples, len(self)) * self.sample.bytes

    def probe(self) -> Index:
        return self

    def runs(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        for file, begin, here in runs_of_files(self.first_sample, first, count):
            stride_bytes = int(self.stride_bytes[file])
            offset = int(self.base_bytes[file]) + begin * stride_bytes
            yield file, offset, (here - 1) * stride_bytes + self.sample.bytes

    @cached_property
    def _one_sample_a_file(self) -> bool:
        return bool((np.diff(self.first_sample) == 1).all())


def runs_of_files(first_sample: np.ndarray, first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield the files that ``count`` samples from ``first`` on lie in.

    With each file come the number that its first sample has there, and how many are there.
    """
    file = int(np.searchsorted(first_sample, first, side="right")) - 1
    while count:
        here = min(count, int(first_sample[file + 1]) - first)
        if here:  # files can have no samples
            yield file, first - int(first_sample[file]), here
        first, count, file = first + here, count - here, file + 1


def files_of_part(first_sample: np.ndarray, begin: int, end: int) -> tuple[slice, np.ndarray]:
    """Return the files with any of the samples ``range(begin, end)``.

    With them comes `SampleIndex.first_sample` of these samples alone.
    """
    first = int(np.searchsorted(first_sample, begin, side="right")) - 1
    stop = int(np.searchsorted(first_sample, end, side="left"))
    return slice(first, stop), np.clip(first_sample[first : stop + 1], begin, end) - begin


def records_of(path: str, record_bytes: int) -> Index:
    """Return an index of any file as records, without an incomplete last record."""
    size_bytes, mtime_ns = sizes_of([path])
    return Index(
        paths=[path],
        size_bytes=size_bytes,
        mtime_ns=mtime_ns,
        first_sample=first_samples(size_bytes // record_bytes),
        base_bytes=np.zeros(1, np.int64),
        stride_bytes=np.full(1, record_bytes, np.int64),
        sample=Sample(np.dtype(np.uint8), (record_bytes,)),
    )


class Format(Protocol):
    """A format: its method reads headers and sizes, and the engine reads samples.

    If a class has ``decoded_on_cpu = True``, no engine of a GPU begins before its files are
    indexed. If it has ``takes_any_bytes = True``, nothing in a file shows that it is of the format,
    so a folder's files must have one ending. If it has a `Sample` as ``expected_sample``, a GPU
    loads what casts such samples while files are indexed.
    """

    def index(self, paths: list[str]) -> SampleIndex:
        """Find the samples of ``paths``.

        Raises:
            CorruptData: a file is not what its header or its size says.
            ValueError: the files are sound, but do not fit this format's arguments, or are unlike
                each other.
            FileNotFoundError, IoError: a file is not available.
        """


def first_samples(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return `SampleIndex.first_sample`: int64 (F + 1,) for ``counts`` of F files."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def count_items(path: str, size_bytes: int, header_bytes: int, item_bytes: int, item: str) -> int:
    """Return how many items follow the header in a file.

    Args:
        path: of the file, for errors.
        size_bytes: of the file.
        header_bytes: of its header.
        item_bytes: of each item.
        item: their name in errors.

    Raises:
        CorruptData: the file ends within its header or within an item.
    """
    if size_bytes < header_bytes:
        raise CorruptData(
            f"{path}: its {size_bytes} bytes are fewer than header_bytes={header_bytes}", path, 0, size_bytes
        )
    count, tail_bytes = divmod(size_bytes - header_bytes, item_bytes)
    if tail_bytes:
        raise CorruptData(
            f"{path}: behind {count} {item}s of {item_bytes} bytes, {tail_bytes} bytes are left at offset "
            f"{size_bytes - tail_bytes}: the file was cut short, or its {item}s are of another size",
            path,
            size_bytes - tail_bytes,
            tail_bytes,
        )
    return count
