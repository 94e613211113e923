"""Checkpoints of Lightning that are written while training goes on."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from gdsdata.checkpoint.api import save
from gdsdata.checkpoint.background.arguments import size_in_bytes
from gdsdata.checkpoint.background.save_counts import SaveCounts
from gdsdata.checkpoint.background.save_job import SaveJob
from gdsdata.checkpoint.background.staging import Snapshots
from gdsdata.checkpoint.background.staging_memory import Staging
from gdsdata.checkpoint.threads import DaemonThreads
from gdsdata.checkpoint.urls import is_url
from gdsdata.integrations.lightning import GDSCheckpointIO, prepared_place
from gdsdata.io.options import EngineOptions
from gdsdata.observe.times import note_checkpoint_stall


class AsyncGDSCheckpointIO(GDSCheckpointIO):
    """Saves in the background, as `gdsdata.AsyncCheckpointer` does.

        Trainer(plugins=[AsyncGDSCheckpointIO()])

    A save copies the state to staging memory of the host, which is kept for the next one, and
    returns. Storage follows in a thread. Lightning's `AsyncCheckpointIO` would clone each tensor
    where it is, in the GPU's memory too.

    An old checkpoint is removed after the saves that came before, and not if one of them failed.
    Checkpoints at URLs are saved before the call returns.

    Args:
        staging_bytes: the most host memory for states that are being written: a number, or as
            "8GiB" (the default). A larger state passes through it piece by piece.
        options: of the engine; None: the defaults.
    """

    def __init__(self, staging_bytes: int | str = "8GiB", options: EngineOptions | None = None) -> None:
        super().__init__(options)
        self._staging_bytes = size_in_bytes("staging_bytes", staging_bytes)
        self._threads: _Threads | None = None  # from the first save until `teardown`
        self._counts: SaveCounts | None = None  # from the first save on
        self._unseen: list[Future[Any]] = []  # what is in progress, and errors that nobody has seen

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Copy a checkpoint to the host, and write it in the background.

        Raises:
            IoError, ...: an earlier save failed, and nobody has seen its error yet. This save has
                not begun then.
            TypeError, pickle.PicklingError, ...: as of `GDSCheckpointIO`.

        Stream semantics: tensors on a GPU are copied after all work that the current stream of that
        GPU has so far.
        """
        self._raise_unseen(only_ended=True)
        place = prepared_place(path, storage_options)
        if is_url(place):
            return save(checkpoint, place, options=self._options)
        started = time.perf_counter()
        threads = self._threads = self._threads or _Threads(self._staging_bytes)
        counts = self._counts = self._counts or SaveCounts(os.path.dirname(place))
        job = SaveJob(0, checkpoint, threads.staging, Snapshots(0), counts)
        written = threads.saver.submit(_write, job, place, threads.writers, self._options)
        counts.begin(int(checkpoint.get("global_step", 0)), job.size_bytes, written)
        try:
            job.stage()
        except BaseException:
            wait([written])  # its error is the one that the caller sees now
            raise
        self._unseen.append(written)
        stall_s = time.perf_counter() - started
        note_checkpoint_stall(stall_s)
        counts.stalled(stall_s)
        return None

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Wait for saves in progress, and load a checkpoint as `GDSCheckpointIO` does."""
        self._raise_unseen()
        return super().load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint when the saves before it are complete."""
        if self._threads is None:
            return super().remove_checkpoint(path)
        before, remove = list(self._unseen), super().remove_checkpoint

        def remove_behind() -> None:
            if all(one.exception() is None for one in before):
                remove(path)

        self._unseen.append(self._threads.saver.submit(remove_behind))
        return None

    def teardown(self) -> None:
        """Wait until every save has ended, and free the memory. Lightning calls it after a run.

        Raises:
            IoError, ...: a save failed, and nobody has seen its error yet.
        """
        try:
            self._raise_unseen()
        finally:
            if self._threads is not None:
                self._threads.close()
            self._threads = None

    def _raise_unseen(self, only_ended: bool = False) -> None:
        """Raise the first error that nobody has seen."""
        while self._unseen and (self._unseen[0].done() or not only_ended):
            self._unseen.pop(0).result()


class _Threads:
    """The threads and the memory of saves in the background.

    Attributes:
        saver: writes one checkpoint after another. The interpreter's end waits for it.
        writers: write two pieces of a checkpoint at a time.
        staging: memory that states pass through.
    """

    def __init__(self, staging_bytes: int) -> None:
        self.saver = ThreadPoolExecutor(1, thread_name_prefix="gdsdata-save")
        self.writers = DaemonThreads(2, "gdsdata-write")
        self.staging = Staging(staging_bytes)

    def close(self) -> None:
        """End the threads, and free the memory."""
        self.saver.shutdown()
        self.writers.close()
        self.staging.close()


def _write(job: SaveJob, path: str, writers: DaemonThreads, options: EngineOptions) -> None:
    try:
        job.write(path, writers, options)
    finally:
        job.cancel()
