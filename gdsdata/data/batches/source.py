"""Where a data set's batches come from, in one process: its engine, files and memory, and what reads ahead by them."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.dlpack import from_dlpack

from gdsdata.formats.index import Index, has_fields, is_of_windows, is_table
from gdsdata.io import engine
from gdsdata.io.options import EngineOptions

# As in dataset.py, what only some data sets need is imported where they need it.
if TYPE_CHECKING:
    from gdsdata.data.batches.fields import Collate, RaggedAs
    from gdsdata.data.batches.pieces import OpenPieces
    from gdsdata.data.batches.skipped import Skipped
    from gdsdata.data.order.row_groups import UpcomingGroups
    from gdsdata.decoders import Decoder, Image
    from gdsdata.formats.fields import FieldIndex
    from gdsdata.formats.megatron import WindowIndex
    from gdsdata.formats.parquet import TableIndex
    from gdsdata.io.memory import LentMemory


class Opened(NamedTuple):
    """What a process has of a source."""

    process: int
    engine: Any
    files: Any
    pool: Any  # None where samples have no one size
    residence: Any  # None without residency="pinned"


@dataclass(eq=False)
class BatchSource:
    """Opened when it is first asked, and kept from epoch to epoch, but not across a fork.

    Attributes:
        index: of the samples. device: that batches are for.
        options: of the engine that makes batches.
        batch_size, prefetch, zero_copy, residency, ragged, decode, collate: as of `GDSDataset`.
        skipped: with ``on_error="skip"``.
    """

    index: Index | FieldIndex | WindowIndex | TableIndex
    device: torch.device
    options: EngineOptions
    batch_size: int
    prefetch: int
    zero_copy: bool
    residency: str | None
    ragged: RaggedAs
    decode: Mapping[str, Decoder | Image]
    collate: Collate | None
    skipped: Skipped | None
    _kept: Opened | None = field(default=None, init=False)
    _lent: LentMemory | None = field(default=None, init=False)

    def open(self) -> Opened:
        """Now, rather than when it is first needed."""
        if self._kept is None or self._kept.process != os.getpid():
            on_cuda, pool, residence = self.device.type == "cuda", None, None
            if on_cuda and isinstance(self.index, Index):
                _, dtype = engine.conversion_on(on_cuda, self.index.sample)
                _load_cast(dtype, self.index.sample.torch_dtype, self.device)
            shared = engine.shared_engine(self._calibrated_options, self._read_to)
            if isinstance(self.index, Index):
                pool = engine.buffer_pool(shared, self.index.sample, self.batch_size, self.prefetch, on_cuda)
            files = engine.file_table(self.index)
            if self.residency is not None:
                residence = engine.residence_of(shared, files, self.index)
            self._kept = Opened(os.getpid(), shared, files, pool, residence)
        return self._kept

    @property
    def engine(self) -> Any:
        return self.open().engine

    def stats(self) -> dict[str, Any]:
        """What `GDSDataset.stats` says of the engine, and of the memory but for what row groups hold."""
        opened = self.open()
        shared, pool, residence = opened.engine, opened.pool, opened.residence
        found: dict[str, Any] = {"ring_bytes": pool.max_kept_bytes if pool else self._most_bytes}
        if residence is not None:
            found["residency"] = {
                "ready": residence.ready,
                "registered_bytes": residence.registered_bytes,
                "error": residence.error,
            }
        found["engine"] = {
            "backend": shared.backend,
            "device_backend": shared.device_backend,
            "fallback_reason": shared.fallback_reason,
            "workers": shared.workers,
            "queue_depth": shared.queue_depth,
            "segment_bytes": shared.segment_bytes,
            "bounce_bytes": shared.bounce_bytes,
            **shared.statistics(),
        }
        return found

    @functools.cached_property
    def _most_bytes(self) -> int:
        """Of batches in memory. It looks at every sample of the index, so once."""
        return self.prefetch * self.index.most_bytes(self.batch_size)

    def warn_of_fallbacks(self) -> None:
        """Once each: what was asked for, or is usual, and is not to be had."""
        if self.options.direct == "auto" and not self.options.strict:
            for refusal in engine.direct_refusals():
                engine.warn_once(f"O_DIRECT was refused, so bytes go through the page cache: {refusal}")
        if not self.options.strict:
            for fallback in engine.noted_fallbacks():
                engine.warn_once(fallback)
        if self._kept and self._kept.residence is not None and self._kept.residence.error:
            engine.warn_once(f'residency="pinned" is not to be had: {self._kept.residence.error}')

    def batches(
        self,
        pieces: OpenPieces | None = None,
        upcoming: UpcomingGroups | None = None,
        batch_samples: int | None = None,
        owner: object = None,
    ) -> tuple[Any, Callable[[], Any]]:
        """What is given plans, and what gives the next batch as the user keeps it.

        Args:
            pieces: that samples are read from, instead of the files.
            upcoming: of a table, which row groups are needed next.
            batch_samples: None: ``batch_size``.
            owner: of the iterator that takes them: `engine.make_batches`.
        """
        index, timeout_s = self.index, self.options.stall_timeout_s
        _, shared, files, pool, residence = self.open()
        if pieces is not None:
            files = pieces.files
        if is_table(index):
            from gdsdata.data.batches.fields import moved
            from gdsdata.data.batches.tables import TableBatches

            batches = TableBatches(
                *(shared, files, index, self.prefetch, timeout_s, self.ragged, self.decode, upcoming),
                *(self.collate, self.skipped),
            )
            if self.device.type == "cpu":
                return batches, batches.next
            return batches, lambda: moved(batches.next(), self.device)
        if has_fields(index):
            from gdsdata.data.batches.fields import FieldBatches

            host = engine.kept_engine(self.options, torch.device("cpu")) if self._reads_to_both else None
            batches = FieldBatches(
                *(shared, files, index, self.device, self.prefetch, timeout_s, self.ragged, self.decode, host),
                *(self.collate, self.skipped, self._lent_memory()),
            )
            return batches, batches.next
        if is_of_windows(index):
            from gdsdata.data.batches.fields import WindowBatches

            lent = self._lent_memory()
            batches = WindowBatches(shared, files, index, self.device, self.prefetch, timeout_s, lent)
            return batches, batches.next
        batches, dtype = engine.make_batches(
            shared,
            files,
            pool,
            index.sample,
            batch_samples=batch_samples or self.batch_size,
            slots=self.prefetch,
            stall_timeout_s=timeout_s,
            on_cuda=self.device.type == "cuda",
            residence=residence,
            owner=owner,
        )
        return batches, self._take_of(batches, dtype)

    def _take_of(self, batches: Any, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        next_batch = batches.next
        result_dtype = self.index.sample.torch_dtype if self.index.sample.torch_dtype != dtype else None
        if self.device.type == "cpu":
            if result_dtype is None:
                return lambda: from_dlpack(next_batch())
            return lambda: from_dlpack(next_batch()).to(result_dtype)
        device, most_leases = self.device, self.prefetch if self.zero_copy else -1

        def take() -> torch.Tensor:
            # The current stream waits for the copies, not the host; what is queued on it here comes behind them, and
            # the lease, which ends with `lent`, behind that.
            lent = from_dlpack(next_batch(engine.stream_of(device)))
            if result_dtype is not None:
                return lent.to(result_dtype)
            return lent if batches.leased <= most_leases else lent.clone()

        return take

    @property
    def _reads_to_both(self) -> bool:
        """Decoders want bytes on the CPU; the other fields go to the GPU as they are."""
        return bool(self.decode) and self.device.type == "cuda"

    @property
    def _read_to(self) -> torch.device:
        """What pyarrow decodes it wants on the CPU."""
        return torch.device("cpu") if is_table(self.index) else self.device

    @property
    def _calibrated_options(self) -> EngineOptions:
        if self._read_to.type == "cpu":  # for which nothing is calibrated
            return self.options
        from gdsdata.io.calibration import calibrated

        largest = self.index.paths[int(self.index.size_bytes.argmax())]
        return calibrated(self.options, largest, self._read_to)

    def _lent_memory(self) -> LentMemory:
        if self._lent is None:
            from gdsdata.io.memory import LentMemory

            self._lent = LentMemory(self.prefetch + 2)
        return self._lent

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes: all but what belongs to this one."""
        return {**self.__dict__, "_kept": None, "_lent": None}


@functools.cache
def _load_cast(dtype: torch.dtype, result_dtype: torch.dtype, device: torch.device) -> None:
    """CUDA loads a kernel where it is first used, some 16 ms for a cast of torch's: beside the first reads, then."""

    def cast() -> None:
        with contextlib.suppress(RuntimeError):  # the batch that is cast tells what is wrong
            torch.empty(1, dtype=dtype, device=device).to(result_dtype)

    if dtype != result_dtype:  # no daemon: one that is in torch's C++ when the interpreter ends takes the process along
        threading.Thread(target=cast, name="gdsdata-cast").start()
