"""`TensorReader`: read a load's tensors in few calls of the engine per device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from gdsdata.checkpoint.extents import Extents, ReadCall, SharedExtents
from gdsdata.checkpoint.gc_pause import collector_resumed
from gdsdata.checkpoint.open_file import table_of
from gdsdata.checkpoint.record_checksums import (
    MOST_OWN_BYTES,
    Part,
    PartsOfRecord,
    RecordParts,
    compare,
    copy_bytes,
    copy_values,
    is_compared,
)
from gdsdata.checkpoint.shared_targets import SharedTargets, fill_last
from gdsdata.checkpoint.spans import Gapped, spans_of
from gdsdata.checkpoint.stored import Record, Stored, bytes_of, bytes_of_storage, contiguous_stride, view_in
from gdsdata.checkpoint.tensor_kinds import check_tensors_are_real, has_own_memory
from gdsdata.checkpoint.tensor_rows import PAGE_BYTES, Rows, is_read_with_gaps, overlapping, without_gaps
from gdsdata.checkpoint.threads import CallThreads, results_of, without_traceback
from gdsdata.checkpoint.tree import Path, name_of
from gdsdata.io import engine
from gdsdata.io.captures import wait_for_streams
from gdsdata.io.conversions import conversion_between
from gdsdata.io.new_memory import new_storage, new_tensor
from gdsdata.io.options import EngineOptions
from gdsdata.progress_bars import current

if TYPE_CHECKING:
    from gdsdata.collective.transfers import SharedReads

# A batch of this size is read while the rest is still collected.
_BATCH_BYTES = 256 << 20
_BATCHES_AT_A_TIME = 4
_NO_BYTES = torch.empty(0, dtype=torch.uint8)


class TensorReader:
    """Collects reads, makes them, and then makes the calls that need the bytes.

    Any method may begin to read, so a caller checks its whole request first. One thread uses it;
    `run` ends it.

    Args:
        options: of the engine.
        verify: compare the checksum of each record. If only a part is wanted, all of it is read.
        together: the ranks that read together; all of them call `run`. None: this one alone.

    Attributes:
        verify: as given.
        own_bytes: the size of the memory that this object holds for tensors that cannot be read in
            place.
    """

    def __init__(self, options: EngineOptions, verify: bool, together: SharedReads | None = None) -> None:
        self._options, self.verify, self._together = options, verify, together
        self._collected: dict[tuple[torch.device, str], Extents] = {}  # by device and conversion
        self._parts = RecordParts()  # that `run` reads
        self._gapped: dict[tuple[Record, torch.device], list[Gapped]] = {}  # that it looks at together
        self._shared = SharedTargets()
        self._devices: set[torch.device] = set()  # that it has read into
        self._copies: list[Callable[[], object]] = []  # before `_afterwards`
        self._afterwards: list[Callable[[], object]] = []
        self._batches = CallThreads(_BATCHES_AT_A_TIME, "gdsdata-read")  # made when needed
        self._begun: list[Future[None]] = []
        self._calls: list[Callable[[], None]] = []  # those of `_begun`, until `run` has made all
        self._interrupted: list[Callable[[], None]] = []  # those that `run` makes again
        self._stop = engine.Stop()  # of reads that have begun
        self._error: BaseException | None = None  # of `run`, without a traceback
        self._bar = current()
        self.own_bytes = 0

    def expect(self, size_bytes: int, device: torch.device) -> None:
        """Allocate the engine's memory while the caller finds out what to read.

        Args:
            size_bytes: about how much will be read.
            device: of the tensors.
        """
        if device.type == "cuda" and size_bytes >= _BATCH_BYTES:
            engine.kept_engine(self._options, device).prepare()

    def bytes_into(self, target: torch.Tensor, record: Record, offset: int, name: Path) -> None:
        """Read ``target.nbytes`` bytes of a record.

        Args:
            target: uint8, one dimension, contiguous.
            record: the record.
            offset: of the first byte in the record.
            name: the path of the tensor in what was saved, for errors.
        """
        if not engine.reaches(target.device):  # by way of the CPU
            on_cpu = torch.empty_like(target, device="cpu")
            self.afterwards(functools.partial(target.copy_, on_cpu))
            target = on_cpu
        self._memory_of(target, record, offset, name)

    def _memory_of(self, target: torch.Tensor, record: Record, offset: int, name: Path) -> None:
        """Read into the memory of a tensor without gaps, in the order of that memory."""
        size_bytes = target.nbytes
        if size_bytes == 0:
            return
        if self._compares(record) and not self._is_first_with_all(target, record):
            take = functools.partial(copy_bytes, target, offset)
            return self._parts.add(record, target.device, Part(offset, size_bytes, name, take, target))
        self._extents_of(target.device).add(name, record, offset, target)
        return self._begin_if_many(target.device)

    def _is_first_with_all(self, target: torch.Tensor, record: Record) -> bool:
        return target.nbytes == record.size_bytes and self._parts.note_whole(record, target)

    def _extents_of(self, device: torch.device, conversion: str = "none") -> Extents:
        if (extents := self._collected.get((device, conversion))) is None:
            extents = self._collected[device, conversion] = Extents(conversion=conversion)
            self._devices.add(device)
        return extents

    def _begin_if_many(self, device: torch.device, conversion: str = "none") -> None:
        if self._together is None and self._collected[device, conversion].bytes >= _BATCH_BYTES:
            self._begin(device, self._collected.pop((device, conversion)))

    def tensor_into(self, target: torch.Tensor, stored: Stored, name: Path) -> None:
        """Read a stored tensor into a tensor of its shape; cast it if dtypes differ.

        Values are read in place if file and ``target`` have the same dtype, and long enough
        contiguous stretches in common. Otherwise they pass through memory of their own. So do those
        that fill the memory of an earlier target: the last one remains there.

        Args:
            target: the tensor to fill.
            stored: where the values lie.
            name: the path of the tensor in what was saved, for errors.

        Raises:
            ValueError: ``target`` is on the meta device.
        """
        if target.is_meta:
            why = f"is on the meta device, which has no memory to read '{stored.record.path}' into"
            raise ValueError(f"{name_of(name)} {why}")
        increment_version(target)  # so that autograd notices
        has_memory = has_own_memory(target)
        if has_memory and target.numel() > 0 and (before := self._shared.note(target, stored, name)) is not None:
            return self._filled_last(target.detach(), stored, name, before)
        plain = has_memory and not (target.is_conj() or target.is_neg())
        if plain and target.dtype == stored.dtype:
            if target.stride() == stored.stride and target.is_contiguous():
                return self._all_of(target, stored, name)
            if target.numel() == 0:
                return None
            rows = Rows(stored, target.stride())
            if not rows.sizes:
                return self._all_of(target, stored, name)
            if engine.reaches(target.device) and self._is_read_in_place(rows, stored, target.device):
                alone = functools.partial(self._rows_into, target, rows, stored, name)
                return self._read_rows(Gapped(target.detach(), stored, rows, name, alone))
        target = target.detach()
        if target.numel() == 0:
            return None
        conversion = self.conversion_of(stored, target.dtype, target.device)
        if conversion is not None and plain and target.is_contiguous():
            extents = self._extents_of(target.device, conversion)
            extents.add(name, stored.record, stored.offset, target, stored.size_bytes)
            return self._begin_if_many(target.device, conversion)
        if self._compares(stored.record):
            take = functools.partial(copy_values, target, stored)
            part = Part(stored.offset, stored.span_bytes, name, take)
            return self._parts.add(stored.record, _read_to(target.device), part)
        self.own_bytes += stored.size_bytes
        alone = functools.partial(self._copied_into, target, stored, name)
        return self._read_rows(Gapped(target, stored, Rows(stored, without_gaps(stored)), name, alone))

    def conversion_of(self, stored: Stored, dtype: torch.dtype, device: torch.device) -> str | None:
        """Return how values are cast while they are read to a contiguous tensor, if they can be."""
        is_possible = device.type == "cpu" and not self.verify and self._together is None
        is_contiguous = stored.stride == contiguous_stride(stored.shape)
        return conversion_between(stored.dtype, dtype) if is_possible and is_contiguous else None

    def _filled_last(self, target: torch.Tensor, stored: Stored, name: Path, before: Path) -> None:
        self.own_bytes += stored.size_bytes
        (values,) = self.tensors({name: stored}, _read_to(target.device)).values()
        self.afterwards(functools.partial(fill_last, target, values, name, before, stored.record.path))

    def _all_of(self, target: torch.Tensor, stored: Stored, name: Path) -> None:
        if engine.reaches(target.device):
            self._memory_of(target, stored.record, stored.offset, name)
        else:
            self.bytes_into(bytes_of(target.detach()), stored.record, stored.offset, name)

    def _compares(self, record: Record) -> bool:
        return self.verify and is_compared(record)

    def _read_rows(self, one: Gapped) -> None:
        """Read a tensor, or, if its rows are short, wait for the others of its record."""
        if not one.may_share_a_span:
            return one.read_alone()
        return self._gapped.setdefault((one.stored.record, _read_to(one.target.device)), []).append(one)

    def _read_gapped(self) -> None:
        """Read the tensors that have waited for the others of their records."""
        for (record, device), tensors in self._gapped.items():
            spans, alone = spans_of(tensors)
            for begin, end, its in spans:
                parts = PartsOfRecord(record, device, begin, end)
                for one in its:
                    relative = one.stored._replace(offset=one.stored.offset - begin)
                    take = functools.partial(copy_values, one.target, relative)
                    parts.parts.append(Part(one.stored.offset, one.stored.span_bytes, one.name, take))
                self._parts.add_span(parts)
            for one in alone:
                one.read_alone()
        self._gapped.clear()

    def _copied_into(self, target: torch.Tensor, stored: Stored, name: Path) -> None:
        self._copies.append(functools.partial(target.copy_, self._values(stored, target.device, name)))

    def _is_read_in_place(self, rows: Rows, stored: Stored, device: torch.device) -> bool:
        if self._compares(stored.record):
            return False  # a checksum needs all rows in one read
        if 0 in rows.of_target:  # several elements share memory: torch raises its own error
            return False
        is_long = rows.size_bytes >= PAGE_BYTES or not is_read_with_gaps(stored, rows)
        return is_long and (device.type == "cpu" or rows.follow_in_target)  # on a GPU, one copy serves adjacent rows

    def _rows_into(self, target: torch.Tensor, rows: Rows, stored: Stored, name: Path) -> None:
        extents = self._extents_of(target.device)
        extents.names += [name] * rows.count
        extents.records += [stored.record] * rows.count
        extents.offsets += (stored.record.offset + stored.offset + rows.offsets(rows.of_stored)).tolist()
        extents.sizes_bytes += [rows.size_bytes] * rows.count
        memory, begin = target.untyped_storage(), int(target.storage_offset()) * target.itemsize
        extents.places += (begin + rows.offsets(rows.of_target)).tolist()
        extents.targets += [memory] * rows.count

    def _values(self, stored: Stored, device: torch.device, name: Path) -> torch.Tensor:
        """Return a new tensor that `run` fills."""
        tight = without_gaps(stored)
        rows = Rows(stored, tight)
        if is_read_with_gaps(stored, rows) or not engine.reaches(device):
            (values,) = self.tensors({name: stored}, device).values()
        else:
            values = torch.empty_strided(stored.shape, tight, dtype=stored.dtype, device=device)
            self._rows_into(values, rows, stored, name)
        return values

    def tensors(self, wanted: dict[Path, Stored], device: torch.device) -> dict[Path, torch.Tensor]:
        """Return new tensors that `run` fills.

        Their strides are those in the file. If they overlap in the file, they share memory.
        """
        made: dict[Path, torch.Tensor] = {}
        for group in overlapping(wanted):
            path, stored = group[0]
            if len(group) == 1 and stored.span_bytes == stored.size_bytes:  # half of the time of a view
                made[path] = new_tensor(stored.shape, stored.stride, stored.dtype, device)
                self._all_of(made[path], stored, path)
            else:
                made |= self._views(group, device)
        return made

    def _views(self, group: list[tuple[Path, Stored]], device: torch.device) -> dict[Path, torch.Tensor]:
        """Return tensors that lie in one storage, with the gaps that the file has."""
        begin = min(stored.offset for _, stored in group)
        end = max(stored.offset + stored.span_bytes for _, stored in group)
        storage = new_storage(end - begin, device)
        path, stored = group[0]
        self.bytes_into(bytes_of_storage(storage), stored.record, begin, path)
        made = {}
        for path, stored in group:
            made[path] = view_in(storage, begin, stored)
        return made

    def afterwards(self, call: Callable[[], object]) -> None:
        """Have `run` make a call when all bytes are in place."""
        self._afterwards.append(call)

    def begin(self) -> None:
        """Begin to read what was collected so far. `run` waits for it.

        Ranks that read together begin in `run`.

        Stream semantics: as `run`. This thread's current stream counts.
        """
        if self._together is None:
            for (device, _), extents in self._collected.items():
                self._begin(device, extents)
            self._collected = {}

    def _begin(self, device: torch.device, extents: Extents) -> None:
        call = self._reader_of(device, extents)
        self._calls.append(call)
        self._begun.append(self._batches.submit(call))

    def cancel(self) -> None:
        """Begin no more reads, and stop those that have begun when their requests have ended."""
        self._stop.request()
        self._batches.shutdown()

    def run_if_full(self) -> None:
        """Do as `run` does if the own memory is large, and free it. More can be collected then."""
        if self.own_bytes >= MOST_OWN_BYTES:
            self.run()
            self._copies, self._afterwards, self.own_bytes = [], [], 0
            self._batches = CallThreads(_BATCHES_AT_A_TIME, "gdsdata-read")

    def run(self) -> None:
        """Read what is left, compare checksums, and make the calls of `afterwards`.

        If it has failed, it raises the same error at each later call. If Ctrl-C interrupts it, a
        later call reads everything again, unless ranks read together.

        Raises:
            FileNotFoundError, IoError: a file cannot be opened or read.
            CorruptData: a file ends too early, or a checksum differs; the message has the tensor's
                name.
            StallError: no byte has moved for ``stall_timeout_s``.
            RuntimeError: `FakeTensorMode` is active.
            Exception: another rank's error, if ranks read together.

        Stream semantics: the bytes are in place when this returns, for every stream.
        """
        check_tensors_are_real("load")
        if self._error is not None:
            raise without_traceback(self._error)
        try:
            self._run()
        except BaseException as error:
            if isinstance(error, Exception) or self._together is not None:
                self._error = without_traceback(error)
            else:
                self._interrupted += self._calls
                self._calls, self._begun, self._stop = [], [], engine.Stop()
            raise

    def _run(self) -> None:
        self._read_gapped()
        are_copied = bool(self._copies or self._afterwards)
        try:
            for parts in self._parts.rounds(may_split=self._together is None):
                are_copied = are_copied or bool(parts)
                memories = [self._memory_for(one) for one in parts]
                self._read_collected()
                for one, memory in zip(parts, memories, strict=True):
                    for take in one.takes:
                        take(memory)
        except BaseException:
            self.cancel()
            raise
        self._batches.shutdown()
        self._parts.clear()
        for call in [*self._copies, *self._afterwards]:
            call()
        if are_copied:
            wait_for_streams(self._devices)

    def _memory_for(self, parts: PartsOfRecord) -> torch.Tensor:
        """Have a record read, and return the memory of which its parts are copied.

        After the next `_read_collected`, it has all bytes of the parts that are copied.
        """
        if parts.whole is not None:
            return bytes_of(parts.whole.detach())
        memory = bytes_of_storage(new_storage(parts.own_bytes, parts.device)) if parts.own_bytes else _NO_BYTES
        extents = self._extents_of(parts.device)
        for stretch in parts.stretches():
            target = stretch.target
            if target is None:
                target = memory[stretch.place : stretch.place + stretch.size_bytes]
            extents.add(stretch.name, parts.record, stretch.offset, target)
        self._begin_if_many(parts.device)
        return memory

    def _read_collected(self) -> None:
        if self._together is None:
            self._read_alone()
        else:  # the collector stays paused: views of all tensors are made meanwhile
            by_device = {device: extents for (device, _), extents in self._collected.items()}  # none is converted
            reads = {device: self._parts_reader_of(device) for device in by_device}
            SharedExtents(by_device, reads, self.verify).read_with(self._together)
        self._collected = {}

    def _read_alone(self) -> None:
        with collector_resumed():
            for (device, _), extents in self._collected.items():
                self._reader_of(device, extents)()
            for call in self._interrupted:
                call()
            for _ in results_of(self._begun):
                pass
            self._calls, self._interrupted = [], []  # they hold tensors

    def _reader_of(self, device: torch.device, extents: Extents) -> Callable[[], None]:
        """Return a function that makes these reads, and that any thread may call.

        The bytes arrive after the current work of this thread's stream.
        """
        self._bar.expect(sum(extents.sizes_bytes))
        return functools.partial(self._parts_reader_of(device), extents)

    def _parts_reader_of(self, device: torch.device) -> ReadCall:
        shared = engine.kept_engine(self._options, device)
        return functools.partial(self._read, shared, shared.mark(engine.stream_of(device)))

    def _read(self, shared: Any, before: Any, extents: Extents) -> None:
        files_of_records = [record.file for record in extents.records if record.file is not None]  # all have one
        files = list(dict.fromkeys(files_of_records))
        place = {file: i for i, file in enumerate(files)}
        for file in files:
            file.check_unchanged()
        checksums, _ = shared.read_many(
            table_of(files),
            np.array([place[file] for file in files_of_records], np.int32),
            np.array(extents.offsets, np.int64),
            np.array(extents.sizes_bytes, np.int64),
            extents.targets,
            np.array(extents.places, np.int64),
            self.verify,
            before,
            True,
            stall_timeout_s=self._options.stall_timeout_s,
            conversion=extents.conversion,
            stop=self._stop,
        )
        for file in files:
            file.check_unchanged()
        self._bar.add(sum(extents.sizes_bytes))
        compare(extents, checksums)


def _read_to(device: torch.device) -> torch.device:
    """Return where the bytes are read to of which a tensor on ``device`` gets copies."""
    return device if engine.reaches(device) else torch.device("cpu")
