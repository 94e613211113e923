"""`Extents`: the reads into one device's memory, and how ranks share them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from gdsdata.checkpoint.stored import Record, bytes_of, bytes_of_storage
from gdsdata.checkpoint.tree import Path
from gdsdata.checkpoint.urls import is_url
from gdsdata.distinct import distinct
from gdsdata.io import engine
from gdsdata.storage.paths import absolute

if TYPE_CHECKING:
    from gdsdata.collective.plan import Parts, Wants
    from gdsdata.collective.transfers import SharedReads


@dataclass(eq=False, repr=False)
class Extents:
    """The reads into one device's memory."""

    names: list[Path] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)  # the record that each is a part of
    offsets: list[int] = field(default_factory=list)
    sizes_bytes: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # in the targets, in bytes
    targets: list[torch.Tensor | torch.UntypedStorage] = field(default_factory=list)  # one for each place
    bytes: int = 0
    conversion: str = "none"  # see `gdsdata.io.conversions`

    def add(self, name: Path, record: Record, offset: int, target: torch.Tensor, size_bytes: int | None = None) -> None:
        """Add a read from ``offset`` in a record on that fills a tensor without gaps.

        ``size_bytes`` is its size in the file. The default is its size in memory.
        """
        size_bytes = target.nbytes if size_bytes is None else size_bytes
        self.names.append(name)
        self.records.append(record)
        self.offsets.append(record.offset + offset)
        self.sizes_bytes.append(size_bytes)
        self.places.append(0)
        self.targets.append(target)
        self.bytes += size_bytes

    def parts(self, which: list[int], skips: list[int], sizes: list[int]) -> Extents:
        """Return parts of these extents: which one, from which of its bytes on, and how many."""
        return Extents(
            [self.names[i] for i in which],
            [self.records[i] for i in which],
            [self.offsets[i] + skip for i, skip in zip(which, skips, strict=True)],
            sizes,
            [self.places[i] + skip for i, skip in zip(which, skips, strict=True)],
            [self.targets[i] for i in which],
            sum(sizes),
        )


ReadCall = Callable[[Extents], None]  # any thread may make it


class SharedExtents:
    """The extents of one rank that others may want too: a `collective.reads.Reader`.

    Args:
        by_device: the extents; those of a device follow those of the one before.
        reads: how those of each device are read.
        verify: checksums are compared.
    """

    def __init__(
        self, by_device: Mapping[torch.device, Extents], reads: Mapping[torch.device, ReadCall], verify: bool
    ) -> None:
        self._extents, self._reads, self._verify = list(by_device.values()), list(reads.values()), verify
        self._begins = np.cumsum([0, *(len(one.names) for one in self._extents)])
        gpus = [(one.bytes, device.index, device) for device, one in by_device.items() if device.type == "cuda"]
        self._gpu = max(gpus)[-1] if gpus else None  # the group has one GPU for each rank
        self._devices = list(by_device)

    def read_with(self, together: SharedReads) -> None:
        """Read all extents. Raises as `SharedReads.read` does."""
        together.read(self._wants(), self, self._gpu)

    def _wants(self) -> Wants:
        from gdsdata.collective import plan, routes  # late: most programs read by themselves

        records = [record for one in self._extents for record in one.records]
        sizes = [size for one in self._extents for size in one.sizes_bytes]
        files = list(dict.fromkeys(record.file for record in records if record.file is not None))
        place = {file: i for i, file in enumerate(files)}
        versions = tuple(
            plan.FileVersion(file.path if is_url(file.path) else absolute(file.path), *file.seen) for file in files
        )
        if any(device not in (torch.device("cpu"), self._gpu) for device in self._devices):
            engine.warn_once(f"ranks share what is for {self._gpu}; this one reads by itself what is for other GPUs")
        ways = {None: plan.NOT_SHARED, torch.device("cpu"): routes.CPU, self._gpu: routes.GPU}
        route = [ways.get(device, plan.NOT_SHARED) for device in self._devices]
        return plan.Wants(
            versions,
            np.array([place[record.file] for record in records if record.file is not None], np.int32),
            np.array([offset for one in self._extents for offset in one.offsets], np.int64),
            np.array(sizes, np.int64),
            np.repeat(np.array(route, np.int8), np.diff(self._begins)),
            np.array(
                [
                    self._verify and record.crc32 is not None and size == record.size_bytes
                    for record, size in zip(records, sizes, strict=True)
                ],
                bool,
            ),
        )

    def read(self, parts: Parts) -> None:
        device = np.searchsorted(self._begins, parts.extent, "right") - 1
        for number in distinct(device).tolist():
            its = device == number
            which = parts.extent[its] - self._begins[number]
            self._reads[number](
                self._extents[number].parts(which.tolist(), parts.skip[its].tolist(), parts.size[its].tolist())
            )

    def memories(self, parts: Parts) -> list[torch.Tensor]:
        device = np.searchsorted(self._begins, parts.extent, "right") - 1
        which = parts.extent - self._begins[device]
        columns = (column.tolist() for column in (device, which, parts.skip, parts.size))
        return [
            _memory(self._extents[number].targets[i], self._extents[number].places[i] + skip, size)
            for number, i, skip, size in zip(*columns, strict=True)
        ]


def _memory(target: torch.Tensor | torch.UntypedStorage, begin: int, size: int) -> torch.Tensor:
    """Return ``size`` bytes of a target as uint8 of one dimension."""
    if not isinstance(target, torch.Tensor):
        return bytes_of_storage(target)[begin : begin + size]
    usual = target.is_contiguous() and not (target.requires_grad or target.is_inference())
    # A single element may have any stride, and view() keeps it.
    if usual and size == target.nbytes > target.itemsize:  # a fifth of the time
        return target.view(-1).view(torch.uint8)
    return bytes_of(target)[begin : begin + size]
