"""From extents of files into tensors: all that a load asks for, in one call of the engine a device."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from gdsdata.checkpoint.nests import Path, name_of
from gdsdata.checkpoint.open_file import OpenFile, table_of
from gdsdata.checkpoint.pause import collector_resumed
from gdsdata.checkpoint.tensor_kinds import has_own_memory
from gdsdata.checkpoint.threads import submit_or_call
from gdsdata.errors import CorruptData
from gdsdata.io import engine
from gdsdata.io.options import EngineOptions


def sealed(self: Any, state: Any) -> None:
    """The `__setstate__` of what a pickle makes and may not change: unpicklers call it where it says so."""
    raise TypeError(f"a {type(self).__name__} is not to be changed")


# Tuples, because some thousand are made before a checkpoint's first byte is asked for.
class Record(NamedTuple):
    """Bytes of a file that have one checksum: a storage in an archive of torch's, a tensor in a safetensors file.

    Attributes:
        file, offset, size_bytes: where they lie. file: None of what is nowhere, and not to be read.
        crc32: of all of them; None where the file does not say.
    """

    file: OpenFile | None
    offset: int
    size_bytes: int
    crc32: int | None = None

    __setstate__ = sealed

    @property
    def path(self) -> str:
        return "" if self.file is None else self.file.path


@functools.lru_cache(maxsize=1024)  # a model's layers are alike
def spanned(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from a tensor's first one to the end of its last one; -1: it cannot be one."""
    if len(shape) != len(stride) or min((0, *shape, *stride)) < 0:
        return -1
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


class Stored(NamedTuple):
    """A tensor as a file has it.

    Attributes:
        record: the storage that it is a view of.
        offset: of its first element in the record, in bytes.
        dtype, shape, stride: its elements (stride in elements, as torch counts).
        location: the device that it was on when it was saved, as torch names it.
    """

    record: Record
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    location: str = "cpu"

    __setstate__ = sealed

    @property
    def span_bytes(self) -> int:
        """From its first element to the end of its last one."""
        return spanned(self.shape, self.stride) * self.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def box(self, offsets: Sequence[int], sizes: Sequence[int]) -> Stored:
        """The part from ``offsets`` on, of ``sizes``: one number for each dimension.

        Raises:
            ValueError: it reaches beyond the tensor.
        """
        if sizes == self.shape and not any(offsets):
            return self
        within = [0 <= at <= at + size <= end for at, size, end in zip(offsets, sizes, self.shape, strict=True)]
        if not all(within):
            raise ValueError(f"a box of {tuple(sizes)} at {tuple(offsets)} is not within a tensor of {self.shape}")
        first = sum(at * step for at, step in zip(offsets, self.stride, strict=True))
        return Stored(self.record, self.offset + first * self.dtype.itemsize, self.dtype, tuple(sizes), self.stride)


# Rows whose neighbours in the file are nearer than this are read with what lies between them: their pages are, anyway.
_PAGE_BYTES = 4096
# But not where that makes them so many times more.
_MOST_TIMES_MORE = 16


@dataclass
class _Extents:
    """Of one device."""

    names: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)  # that a checksum is compared with, or not
    offsets: list[int] = field(default_factory=list)
    sizes_bytes: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    targets: list[torch.Tensor | torch.UntypedStorage] = field(default_factory=list)  # one for each place
    bytes: int = 0


# So much is read while the rest is still collected.
_BATCH_BYTES = 256 << 20
_BATCHES_AT_A_TIME = 4


class Reading:
    """Collects what is to be read, reads it, and then does what had to wait for it.

    Whoever finds that something is not as it should be says so before it asks for the first byte: reading may begin
    with any call.

    Args:
        options: of the engine.
        verify: compare the checksum of each record that is read as a whole.

    Attributes:
        own_bytes: of memory that tensors go by way of, until this object goes.
    """

    def __init__(self, options: EngineOptions, verify: bool) -> None:
        self._options, self._verify = options, verify
        self._by_device: dict[torch.device, _Extents] = {}
        self._afterwards: list[Callable[[], object]] = []
        self._batches = ThreadPoolExecutor(_BATCHES_AT_A_TIME, thread_name_prefix="gdsdata-read")  # made when needed
        self._begun: list[Future[None]] = []
        self.own_bytes = 0

    def expect(self, size_bytes: int, device: torch.device) -> None:
        """So much is to be read to there, from where is still looked up: its engine gets ready meanwhile."""
        if device.type == "cuda" and size_bytes >= _BATCH_BYTES:
            engine.kept_engine(self._options, device).prepare()

    def bytes_into(self, target: torch.Tensor, record: Record, offset: int, name: str) -> None:
        """``target.nbytes`` bytes from ``offset`` of the record on; ``target``: uint8, one dimension, contiguous."""
        if not engine.reaches(target.device):  # torch goes the rest of the way
            on_cpu = torch.empty_like(target, device="cpu")
            self.afterwards(functools.partial(target.copy_, on_cpu))
            target = on_cpu
        self._memory_of(target, record, offset, name)

    def _memory_of(self, target: torch.Tensor, record: Record, offset: int, name: str) -> None:
        """All elements of a tensor that lie in memory without gaps, as they lie there."""
        size_bytes = target.nbytes
        if size_bytes == 0:
            return
        device = target.device
        extents = self._by_device.get(device)
        if extents is None:
            extents = self._by_device[device] = _Extents()
        extents.names.append(name)
        extents.records.append(record)
        extents.offsets.append(record.offset + offset)
        extents.sizes_bytes.append(size_bytes)
        extents.places.append(0)
        extents.targets.append(target)
        extents.bytes += size_bytes
        if extents.bytes >= _BATCH_BYTES:
            call = self._reader_of(device, self._by_device.pop(device))
            self._begun.append(submit_or_call(self._batches, call))

    def tensor_into(self, target: torch.Tensor, stored: Stored, name: str) -> None:
        """A tensor's values into another of its shape, cast where dtypes differ.

        They are read in place where file and ``target`` have the same dtype and rows in common that are long enough,
        else by way of memory of their own.

        Raises:
            ValueError: ``target`` is on the meta device.
        """
        if target.is_meta:
            raise ValueError(f"{name} is on the meta device, which has no memory to read '{stored.record.path}' into")
        plain = has_own_memory(target) and not (target.is_conj() or target.is_neg())
        if plain and target.dtype == stored.dtype:
            if target.stride() == stored.stride and target.is_contiguous():
                return self._all_of(target, stored, name)
            if target.numel() == 0:
                return None
            rows = _Rows(stored, target.stride())
            if not rows.sizes:
                return self._all_of(target, stored, name)
            if engine.reaches(target.device) and self._is_read_in_place(rows, stored, target.device):
                return self._rows_into(target, rows, stored, name)
        target = target.detach()
        if target.numel() == 0:
            return None
        values = self._values(stored, target.device, name)
        self.own_bytes += values.nbytes
        return self.afterwards(functools.partial(target.copy_, values))

    def _all_of(self, target: torch.Tensor, stored: Stored, name: str) -> None:
        if engine.reaches(target.device):
            self._memory_of(target, stored.record, stored.offset, name)
        else:
            self.bytes_into(bytes_of(target.detach()), stored.record, stored.offset, name)

    def _is_read_in_place(self, rows: _Rows, stored: Stored, device: torch.device) -> bool:
        if self._verify and stored.size_bytes == stored.record.size_bytes:
            return False  # its checksum is that of all rows in one
        if 0 in rows.of_target:  # many elements in one place: torch says what it thinks of that
            return False
        is_long = rows.size_bytes >= _PAGE_BYTES or not _is_read_with_gaps(stored, rows)
        return is_long and (device.type == "cpu" or rows.follow_in_target)  # a GPU has one copy for all that follow

    def _rows_into(self, target: torch.Tensor, rows: _Rows, stored: Stored, name: str) -> None:
        extents = self._by_device.setdefault(target.device, _Extents())
        extents.names += [name] * rows.count
        extents.records += [stored.record] * rows.count
        extents.offsets += (stored.record.offset + stored.offset + rows.offsets(rows.of_stored)).tolist()
        extents.sizes_bytes += [rows.size_bytes] * rows.count
        memory, begin = target.untyped_storage(), target.storage_offset() * target.itemsize
        extents.places += (begin + rows.offsets(rows.of_target)).tolist()
        extents.targets += [memory] * rows.count

    def _values(self, stored: Stored, device: torch.device, name: str) -> torch.Tensor:
        """A new tensor, filled by `run`."""
        tight = _without_gaps(stored)
        rows = _Rows(stored, tight)
        if _is_read_with_gaps(stored, rows) or not engine.reaches(device):
            (values,) = self.tensors({(name,): stored}, device).values()
        else:
            values = torch.empty_strided(stored.shape, tight, dtype=stored.dtype, device=device)
            self._rows_into(values, rows, stored, name)
        return values

    def tensors(self, wanted: dict[Path, Stored], device: torch.device) -> dict[Path, torch.Tensor]:
        """New tensors with strides as in the file, filled by `run`. Those that overlap in the file share memory."""
        made: dict[Path, torch.Tensor] = {}
        for group in _overlapping(wanted):
            begin = min(stored.offset for _, stored in group)
            end = max(stored.offset + stored.span_bytes for _, stored in group)
            storage = engine.new_storage(end - begin, device)
            self.bytes_into(bytes_of_storage(storage), group[0][1].record, begin, name_of(group[0][0]))
            for path, stored in group:
                first = (stored.offset - begin) // stored.dtype.itemsize
                empty = torch.empty(0, dtype=stored.dtype, device=device)
                made[path] = empty.set_(storage, first, stored.shape, stored.stride)
        return made

    def afterwards(self, call: Callable[[], object]) -> None:
        self._afterwards.append(call)

    def run(self) -> None:
        """Bytes are in place, for every stream, and checksums compared when this returns.

        Raises:
            FileNotFoundError, IoError: a file is not to be had.
            CorruptData: a file ends too early, or a checksum differs; it names the tensor.
            StallError: nothing has moved for ``stall_timeout_s``.
        """
        with collector_resumed():
            try:
                for device, extents in self._by_device.items():
                    self._reader_of(device, extents)()
                for batch in self._begun:
                    batch.result()
            finally:  # those that have begun have ended then
                self._batches.shutdown(cancel_futures=True)
        for call in self._afterwards:
            call()

    def _reader_of(self, device: torch.device, extents: _Extents) -> Callable[[], None]:
        """What reads them, in any thread, behind what the current stream of this one has been given."""
        shared = engine.kept_engine(self._options, device)
        return functools.partial(self._read, extents, shared, shared.mark(engine.stream_of(device)))

    def _read(self, extents: _Extents, shared: Any, before: Any) -> None:
        files = list(dict.fromkeys(record.file for record in extents.records))
        place = {file: i for i, file in enumerate(files)}
        for file in files:
            file.check_unchanged()
        checksums, _ = shared.read_many(
            table_of(files),
            np.array([place[record.file] for record in extents.records], np.int32),
            np.array(extents.offsets, np.int64),
            np.array(extents.sizes_bytes, np.int64),
            extents.targets,
            np.array(extents.places, np.int64),
            self._verify,
            before,
            True,
            stall_timeout_s=self._options.stall_timeout_s,
        )
        for file in files:
            file.check_unchanged()
        unknown = set()
        for i, found in enumerate(checksums):
            record, name = extents.records[i], extents.names[i]
            if record.crc32 is None:
                unknown.add(record.path)
            elif extents.sizes_bytes[i] == record.size_bytes and found != record.crc32:
                raise CorruptData(
                    f"{name} in '{record.path}', {record.size_bytes} bytes from offset {record.offset} on, has the "
                    f"checksum {found:08x} and not {record.crc32:08x}: the file was changed since it was written",
                    record.path,
                    record.offset,
                    record.size_bytes,
                )
        known = {record.path for record in extents.records if record.crc32 is not None}
        for path in sorted(unknown - known):
            engine.warn_once(f"'{os.path.basename(path)}' has no checksums: verify=True compares nothing in such files")


class _Rows:
    """The longest stretches without gaps that a tensor has both in a file and in memory.

    Attributes:
        size_bytes: of each.
        sizes, of_stored, of_target: how many there are along each of the other dimensions, and the steps there from
            one to the next, in bytes.
    """

    def __init__(self, stored: Stored, stride: Sequence[int]) -> None:
        dimensions = [
            dimension for dimension in zip(stored.stride, stride, stored.shape, strict=True) if dimension[2] != 1
        ]
        dimensions.sort(reverse=True)
        elements = 1
        while dimensions and dimensions[-1][0] == dimensions[-1][1] == elements:
            elements *= dimensions.pop()[2]
        width = stored.dtype.itemsize
        self.size_bytes = elements * width
        self.of_stored = [step * width for step, _, _ in dimensions]
        self.of_target = [step * width for _, step, _ in dimensions]
        self.sizes = [size for _, _, size in dimensions]

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    @property
    def follow_in_target(self) -> bool:
        """Whether the rows lie one behind the other in memory, as they do in the file but for gaps."""
        expected = self.size_bytes
        for step, size in zip(reversed(self.of_target), reversed(self.sizes), strict=True):
            if step != expected:
                return False
            expected *= size
        return True

    def offsets(self, steps: Sequence[int]) -> np.ndarray:
        """Of each row from the first one, in bytes."""
        found = np.zeros(1, np.int64)
        for step, size in zip(steps, self.sizes, strict=True):
            found = (found[:, None] + np.arange(size, dtype=np.int64) * step).reshape(-1)
        return found


def _without_gaps(stored: Stored) -> tuple[int, ...]:
    """Strides of a tensor with the same order of elements that has nothing between them."""
    strides, elements = [0] * len(stored.shape), 1
    for axis in sorted(range(len(stored.shape)), key=lambda axis: (stored.stride[axis], -axis)):
        strides[axis] = elements
        elements *= stored.shape[axis]
    return tuple(strides)


def _is_read_with_gaps(stored: Stored, rows: _Rows) -> bool:
    gaps_bytes = stored.span_bytes - stored.size_bytes
    return gaps_bytes < rows.count * _PAGE_BYTES and stored.span_bytes <= _MOST_TIMES_MORE * stored.size_bytes


def _overlapping(wanted: dict[Path, Stored]) -> list[list[tuple[Path, Stored]]]:
    """Groups of tensors that have bytes of one record in common, directly or by way of others of the group."""
    groups: list[list[tuple[Path, Stored]]] = []
    end = 0

    def place(item: tuple[Path, Stored]) -> tuple[str, int, int]:
        return item[1].record.path, item[1].record.offset, item[1].offset

    for path, stored in sorted(wanted.items(), key=place):
        last = groups[-1][0][1] if groups else None
        shared = last is not None and last.record == stored.record and stored.offset < end and stored.span_bytes > 0
        # Of different dtypes, one might begin between two elements of the other.
        if last is not None and shared and (stored.offset - last.offset) % stored.dtype.itemsize == 0:
            groups[-1].append((path, stored))
            end = max(end, stored.offset + stored.span_bytes)
        else:
            groups.append([(path, stored)])
            end = stored.offset + stored.span_bytes
    return groups


def bytes_of_storage(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor without gaps (contiguous, or transposed), as uint8 of one dimension."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    first = tensor.storage_offset() * tensor.element_size()
    return flat.set_(tensor.untyped_storage(), first, (tensor.nbytes,), (1,))
