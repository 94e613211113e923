"""From extents of files into tensors: all that a load asks for, in one call of the engine a device."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from gdsdata import engine
from gdsdata.checkpoint.nests import Path, name_of
from gdsdata.errors import CorruptData
from gdsdata.options import EngineOptions


@dataclass(frozen=True, slots=True)
class Record:
    """Bytes of a file that have one checksum: a storage in an archive of torch's, a tensor in a safetensors file.

    Attributes:
        path, offset, size_bytes: where they lie.
        crc32: of all of them; None where the file does not say.
    """

    path: str
    offset: int
    size_bytes: int
    crc32: int | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a file has it.

    Attributes:
        record: the storage that it is a view of.
        offset: of its first element in the record, in bytes.
        dtype, shape, stride: its elements (stride in elements, as torch counts).
    """

    record: Record
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def span_bytes(self) -> int:
        """From its first element to the end of its last one."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True


@dataclass
class _Extents:
    """Of one device."""

    names: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)  # that a checksum is compared with, or not
    offsets: list[int] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)  # of uint8, one dimension


class Reading:
    """Collects what is to be read, reads it, and then does what had to wait for it.

    Args:
        options: of the engine.
        verify: compare the checksum of each record that is read as a whole.
    """

    def __init__(self, options: EngineOptions, verify: bool) -> None:
        self._options, self._verify = options, verify
        self._by_device: dict[torch.device, _Extents] = {}
        self._afterwards: list[Callable[[], object]] = []

    def bytes_into(self, target: torch.Tensor, record: Record, offset: int, name: str) -> None:
        """``target.nbytes`` bytes from ``offset`` of the record on; ``target``: uint8, one dimension, contiguous."""
        if target.nbytes == 0:
            return
        device = target.device
        if not engine.reaches(device):  # torch goes the rest of the way
            on_cpu = torch.empty_like(target, device="cpu")
            self.afterwards(functools.partial(target.copy_, on_cpu))
            target, device = on_cpu, on_cpu.device
        extents = self._by_device.setdefault(device, _Extents())
        extents.names.append(name)
        extents.records.append(record)
        extents.offsets.append(record.offset + offset)
        extents.targets.append(target)

    def tensor_into(self, target: torch.Tensor, stored: Stored, name: str) -> None:
        """A tensor's values into another of its shape, cast where dtypes differ.

        They are read in place where ``target`` is contiguous and the file has them in that order and dtype, else by way
        of memory of their own.
        """
        target = target.detach()
        plain = target.layout == torch.strided and not target.is_conj() and not target.is_neg()
        if plain and stored.is_contiguous and target.is_contiguous() and target.dtype == stored.dtype:
            self.bytes_into(bytes_of(target), stored.record, stored.offset, name)
            return
        (values,) = self.tensors({(name,): stored}, target.device).values()
        self.afterwards(functools.partial(target.copy_, values))

    def tensors(self, wanted: dict[Path, Stored], device: torch.device) -> dict[Path, torch.Tensor]:
        """New tensors with strides as in the file, filled by `run`. Those that overlap in the file share memory."""
        made: dict[Path, torch.Tensor] = {}
        for group in _overlapping(wanted):
            begin = min(stored.offset for _, stored in group)
            end = max(stored.offset + stored.span_bytes for _, stored in group)
            storage = torch.UntypedStorage(end - begin, device=device)
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
        """
        for device, extents in self._by_device.items():
            self._read(device, extents)
        for call in self._afterwards:
            call()

    def _read(self, device: torch.device, extents: _Extents) -> None:
        paths = list(dict.fromkeys(record.path for record in extents.records))
        place = {path: i for i, path in enumerate(paths)}
        shared = engine.shared_engine(self._options, device)
        checksums = shared.read_many(
            engine.file_table_of(paths),
            np.array([place[record.path] for record in extents.records], np.int32),
            np.array(extents.offsets, np.int64),
            np.array([target.nbytes for target in extents.targets], np.int64),
            np.array([target.data_ptr() for target in extents.targets], np.uint64),
            self._verify,
            shared.mark(engine.stream_of(device)),
            True,
        )
        unknown = set()
        for i, found in enumerate(checksums):
            record, name = extents.records[i], extents.names[i]
            if record.crc32 is None:
                unknown.add(record.path)
            elif extents.targets[i].nbytes == record.size_bytes and found != record.crc32:
                raise CorruptData(
                    f"{name} in '{record.path}', {record.size_bytes} bytes from offset {record.offset} on, has the "
                    f"checksum {found:08x} and not {record.crc32:08x}: the file was changed since it was written",
                    record.path,
                    record.offset,
                    record.size_bytes,
                )
        for path in sorted(unknown):
            engine.warn_once(f"'{os.path.basename(path)}' has no checksums: verify=True compares nothing in such files")


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
    """The memory of a contiguous tensor, as uint8 of one dimension."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    first = tensor.storage_offset() * tensor.element_size()
    return flat.set_(tensor.untyped_storage(), first, (tensor.nbytes,), (1,))
