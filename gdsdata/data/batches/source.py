"""`BatchSource`: where a data set's batches come from, in one process.

It has an engine, files and memory, and makes the readers of epochs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch.utils.data import get_worker_info

from gdsdata.data.batches.reader import IndexT, Reader
from gdsdata.data.batches.ring import RingReader, batches_in_slot
from gdsdata.data.batches.settings import BatchSettings
from gdsdata.data.order.epoch import Epoch
from gdsdata.fork_safe import cached_property
from gdsdata.formats.index import Index
from gdsdata.io import engine
from gdsdata.io.conversions import conversion_on
from gdsdata.io.engine import BufferPool, Engine, FileTable, Residence
from gdsdata.io.options import EngineOptions
from gdsdata.storage.urls import have_urls, is_remote

# Modules that only some data sets need are imported by these: a program pays for what it uses.
if TYPE_CHECKING:
    from gdsdata.data.batches.piece_memory import SpareMemory
    from gdsdata.data.batches.pieces import OpenPieces
    from gdsdata.formats.sample import Sample


Opened = tuple[Engine, FileTable]

# Each GPU's newest engine. With it, another data set over 2048 files is made in 12 to 16 ms, and in
# 20 to 24 without it (H200).
_newest_of_gpus: dict[torch.device, Engine] = {}

# Host memory for ids, places and transfers of a sample in flight, less than was measured with 4
# batches of 2**20 samples of one field: of one size 93 bytes, else 58 (Arrow), 77 (strings) and 109
# (Parquet), on two cores, 2026-11-30.
_PLANNED_BYTES, _PLANNED_BYTES_OF_ONE_SIZE = 56, 92


class BatchSource(ABC, Generic[IndexT]):
    """Makes the readers of a data set's epochs.

    It opens engine and files when they are first needed, and keeps them from epoch to epoch. A
    forked or spawned process opens its own.

    Args:
        index: of the samples.
        settings: of the batches.

    Raises:
        ValueError: the settings are not for such samples.
    """

    def __init__(self, index: IndexT, settings: BatchSettings) -> None:
        self.index, self.settings = index, settings
        self._kept: tuple[int, Opened] | None = None  # with the process that opened it
        self._spare_pieces: SpareMemory | None = None
        self._refuse_residency()

    def _refuse_residency(self) -> None:
        if self.settings.residency is not None:
            raise ValueError(
                f"residency={self.settings.residency!r} is for samples of one size: leave it out for fields"
            )

    @property
    def least_sample_bytes(self) -> int:
        """The host memory that a sample of a batch in flight takes, at least."""
        return _PLANNED_BYTES

    @abstractmethod
    def reader(self, epoch: Epoch, owner: object) -> Reader[IndexT]:
        """Return what reads an epoch's batches.

        Args:
            epoch: that is read.
            owner: of the iterator that takes the batches: see `engine.make_batches`.
        """

    def open(self) -> Opened:
        """Return engine and files, and open them if that was not done in this process yet."""
        if self._kept is None or self._kept[0] != os.getpid():
            self._kept = os.getpid(), self._opened()
        return self._kept[1]

    def open_for_epoch(self) -> Opened:
        """Return engine and files for an epoch. Files changed in place since will be refused."""
        shared, files = self.open()
        files.evict_changed()
        return shared, files

    def _opened(self) -> Opened:
        if self.settings.remote is not None:
            self.settings.remote.take_effect()  # a worker of a DataLoader is another process
        return _engine_for(self._calibrated_options, self._reads_to), engine.file_table(self.index)

    @cached_property
    def reads_objects(self) -> bool:
        """Whether the index has objects of stores."""
        return have_urls(self.index.paths)

    @property
    def engine(self) -> Engine:
        return self.open()[0]

    @property
    def _reads_to(self) -> torch.device:
        """The device whose engine reads."""
        return self.settings.device

    @property
    def _calibrated_options(self) -> EngineOptions:
        if self._reads_to.type == "cpu":  # for which nothing is calibrated
            return self.settings.options
        from gdsdata.io.calibration import calibrated

        largest = self.index.paths[int(self.index.size_bytes.argmax())]
        if is_remote(largest):  # what a network needs is not measured on a disk
            return self.settings.options
        return calibrated(self.settings.options, largest, self._reads_to)

    def _pieces(self, epoch: Epoch) -> OpenPieces | None:
        """Return the chunks that a lane shuffle reads ahead."""
        lanes = epoch.lanes()
        if lanes is None or self.settings.residency is not None:
            return None
        from gdsdata.data.batches.piece_memory import SpareMemory
        from gdsdata.data.batches.pieces import OpenPieces

        worker, options = get_worker_info(), self.settings.piece_options
        if worker and worker.num_workers > 1:  # they read the same pieces, which the storage then gives once
            options = replace(options, direct="never")
        if self._spare_pieces is None:
            self._spare_pieces = SpareMemory()
        return OpenPieces(self.index, *lanes, options, options.stall_timeout_s, self._spare_pieces)

    def _open_with_pieces(self, epoch: Epoch) -> tuple[Engine, FileTable, OpenPieces | None]:
        """Return an epoch's engine, files and `_pieces`. The files include those of the pieces."""
        (shared, files), pieces = self.open_for_epoch(), self._pieces(epoch)
        return shared, files if pieces is None else pieces.files, pieces

    def ring_bytes(self, epoch: Epoch, steps: int, reader: Reader[IndexT] | None) -> int:
        """Return the memory of batches in flight or ready, at most, and of row groups.

        Args:
            epoch: that is read, or would be. steps: in it.
            reader: that reads it, if one does.
        """
        return self._most_bytes

    @cached_property
    def _most_bytes(self) -> int:
        """The memory of batches. It looks at every sample of the index."""
        return self.settings.prefetch * self.index.most_bytes(self.settings.batch_size)

    def stats(self) -> dict[str, Any]:
        """Return what `GDSDataset.stats` says of the engine, and of the client of objects."""
        shared = self.engine
        return {
            **({"network": engine.http_statistics()} if self.reads_objects else {}),
            "engine": {
                "backend": shared.backend,
                "device_backend": shared.device_backend,
                "fallback_reason": shared.fallback_reason,
                "workers": shared.workers,
                "queue_depth": shared.queue_depth,
                "segment_bytes": shared.segment_bytes,
                "bounce_bytes": shared.bounce_bytes,
                **shared.statistics(),
            },
        }

    def warn_of_fallbacks(self) -> None:
        """Warn once of each fallback from what was asked for, or is usual."""
        options = self.settings.options
        if options.direct == "auto" and not options.strict:
            for refusal in engine.direct_refusals():
                engine.warn_once(f"O_DIRECT was refused, so bytes go through the page cache: {refusal}")
        if not options.strict:
            for fallback in engine.noted_fallbacks():
                engine.warn_once(fallback)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for worker processes, which open their own engine and files."""
        return {**self.__dict__, "_kept": None, "_spare_pieces": None}


def begun_engine(path: str, options: EngineOptions, device: torch.device) -> Engine | None:
    """Return a GPU's engine, whose workers pin their memory from now on.

    None for files that calibration measures, if ``path`` is one: it wants an idle machine, and few
    files of that size are indexed fast.
    """
    if not is_remote(path):
        from gdsdata.io.calibration import SMALLEST_FILE_BYTES, calibrated

        try:
            if os.path.getsize(path) >= SMALLEST_FILE_BYTES:
                return None
        except OSError:  # the index says what is wrong
            return None
        options = calibrated(options, path, device, measure=False)
    begun = _engine_for(options, device)
    begun.prepare()
    return begun


def _engine_for(options: EngineOptions, device: torch.device) -> Engine:
    """Return the engine that reads to ``device``; a GPU's is kept for the next data set."""
    found = engine.shared_engine(options, device)
    if device.type == "cuda":
        _newest_of_gpus[device] = found
    return found


class RingSource(BatchSource[Index]):
    """Samples of one size, in batches of a pool. Files may be pinned for a GPU."""

    def __init__(self, index: Index, settings: BatchSettings) -> None:
        super().__init__(index, settings)
        self._pool: BufferPool | None = None  # of the process that has it open
        self._residence: Residence | None = None  # with residency="pinned"

    @property
    def least_sample_bytes(self) -> int:
        values_bytes = self.index.sample.bytes if self.settings.device.type == "cpu" else 0
        return _PLANNED_BYTES_OF_ONE_SIZE + values_bytes

    def _refuse_residency(self) -> None:
        """Refuse objects: other samples of one size may have it."""
        if self.settings.residency is not None and have_urls(self.index.paths):
            raise ValueError(
                f"residency={self.settings.residency!r} maps files, and these samples are in objects on a server: "
                "leave it out, or copy them"
            )

    def _opened(self) -> Opened:
        settings, on_cuda = self.settings, self.settings.device.type == "cuda"
        if on_cuda:
            _load_cast_of(self.index.sample, settings.device)
        shared, files = super()._opened()
        slot_samples = settings.batch_size * batches_in_slot(self.index, settings)
        self._pool = engine.buffer_pool(shared, self.index.sample, slot_samples, settings.prefetch, on_cuda)
        if settings.residency is not None:
            self._residence = engine.residence_of(shared, files, self.index, self.index.sample, slot_samples)
        return shared, files

    def reader(self, epoch: Epoch, owner: object) -> Reader[Index]:
        shared, files, pieces = self._open_with_pieces(epoch)
        make_batches = functools.partial(
            engine.make_batches,
            shared,
            files,
            self._buffers,
            self.index.sample,
            slots=self.settings.prefetch,
            stall_timeout_s=self.settings.options.stall_timeout_s,
            on_cuda=self.settings.device.type == "cuda",
            residence=self._residence,
            owner=owner,
        )
        return RingReader(self.index, self.settings, make_batches, pieces)

    def ring_bytes(self, epoch: Epoch, steps: int, reader: Reader[Index] | None) -> int:
        return self._buffers.max_kept_bytes

    @property
    def _buffers(self) -> BufferPool:
        self.open()
        assert self._pool is not None  # `open` makes it
        return self._pool

    def stats(self) -> dict[str, Any]:
        found, residence = super().stats(), self._residence
        if residence is not None:
            found["residency"] = {
                "ready": residence.ready,
                "registered_bytes": residence.registered_bytes,
                "error": residence.error,
            }
        return found

    def warn_of_fallbacks(self) -> None:
        super().warn_of_fallbacks()
        if self._residence is not None and self._residence.error:
            engine.warn_once(f'residency="pinned" is not available: {self._residence.error}')

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_pool": None, "_residence": None}


def load_expected_cast(format: object, device: torch.device) -> None:
    """Have a GPU load what casts the samples that a format expects, while files are indexed."""
    sample = getattr(format, "expected_sample", None)
    if sample is not None and device.type == "cuda" and get_worker_info() is None:
        _load_cast_of(sample, device)


def _load_cast_of(sample: Sample, device: torch.device) -> None:
    """Have a GPU load the kernel that casts such samples: 13 to 16 ms when it is first used."""
    _, dtype = conversion_on(True, sample)
    _load_cast(dtype, sample.torch_dtype, device)


@functools.cache
def _load_cast(dtype: torch.dtype, result_dtype: torch.dtype, device: torch.device) -> None:
    from gdsdata.io.captures import stay_beside_captures

    def cast() -> None:
        stay_beside_captures()
        with contextlib.suppress(RuntimeError):  # the batch that is cast reports what is wrong
            torch.empty(1, dtype=dtype, device=device).to(result_dtype)

    if dtype != result_dtype:  # no daemon: one that is in torch's C++ when the interpreter ends takes the process along
        threading.Thread(target=cast, name="gdsdata-cast").start()
