"""`FileSaves`: single files that are written in the background."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import torch

from gdsdata.checkpoint.background.save_content import SaveContent, content_of_state, content_of_tensors
from gdsdata.checkpoint.background.save_counts import SaveCounts
from gdsdata.checkpoint.background.save_job import PIECES_AT_A_TIME, SaveJob
from gdsdata.checkpoint.background.staging import Snapshots
from gdsdata.checkpoint.background.staging_memory import Staging
from gdsdata.checkpoint.threads import DaemonThreads, saving_thread
from gdsdata.checkpoint.torch_zip import torch_config
from gdsdata.io import engine
from gdsdata.io.captures import stay_beside_captures
from gdsdata.io.options import EngineOptions
from gdsdata.observe.times import note_checkpoint_stall
from gdsdata.storage.paths import absolute


class FileSaves:
    """Copies the contents of files to the host, and writes them one after another in a thread.

    It owns threads and memory until `close`. One thread calls it. It is a `deferred.Deferred`.

    Args:
        folder: of the files, for `gdsdata.top`.
        staging_bytes: the most host memory for contents that are being written. Larger ones pass
            through it piece by piece.
        options: of the engine.

    Attributes:
        step: of the training, for `gdsdata.top`.
    """

    def __init__(self, folder: str, staging_bytes: int, options: EngineOptions) -> None:
        self.step = 0
        self._options = options
        self._counts = SaveCounts(folder)
        self._staging = Staging(staging_bytes)
        self._saver = saving_thread()
        self._writers = DaemonThreads(PIECES_AT_A_TIME, "gdsdata-write")
        self._unseen: list[Future[Any]] = []  # what is in progress, and errors that nobody has seen

    def prepare(self, size_bytes: int, device: torch.device | None) -> None:
        """Make memory for the first contents, as `Staging.prepare`."""
        self._staging.prepare(size_bytes, device)

    def save_state(self, value: Any, path: str) -> int:
        """Save what `torch.save` would write.

        Returns:
            The size of the file in bytes.

        Raises:
            NotReplaceable: no new file can replace the one at ``path``. Nothing was copied.
            ValueError, RuntimeError, pickle.PicklingError, ...: as of `content_of_state`.

        Stream semantics: tensors on a GPU are copied after all work that the current stream of that
        GPU has so far, and before this returns.
        """
        started = time.perf_counter()
        _check_replaceable(path)
        content = content_of_state(value, torch_config.alignment_bytes(), torch_config.has_checksums())
        self._save(content, path, started)
        return content.layout.end

    def save_tensors(self, tensors: list[torch.Tensor], header: bytes, path: str) -> None:
        """Save a safetensors file: see `deferred.Deferred`.

        Raises:
            NotReplaceable: as `save_state`.

        Stream semantics: as `save_state`.
        """
        started = time.perf_counter()
        _check_replaceable(path)
        self._save(content_of_tensors(tensors, header), path, started)

    def behind(self, function: Callable[[], object]) -> None:
        """Call a function in the thread when the saves before it are complete.

        It is not called if one of them failed whose error nobody has seen.
        """
        before = list(self._unseen)

        def call() -> None:
            if all(one.exception() is None for one in before):
                function()

        self._unseen.append(self._saver.submit(call))

    def raise_unseen(self, only_ended: bool = False) -> None:
        """Raise the first error that nobody has seen.

        Args:
            only_ended: False waits until all saves have ended.
        """
        while self._unseen and (self._unseen[0].done() or not only_ended):
            self._unseen.pop(0).result()

    def close(self) -> None:
        """Wait until every save has ended, and free the memory.

        An error that nobody has seen is a warning.
        """
        self._saver.shutdown()
        for one in self._unseen:
            if (error := one.exception()) is not None:
                engine.warn_once(f"a save in the background failed: {error}")
        self._writers.close()
        self._staging.close()

    def _save(self, content: SaveContent, path: str, started: float) -> None:
        job = SaveJob(self.step, content, self._staging, Snapshots(0), self._counts)
        begun: list[Future[None]] = []
        try:
            begun.append(self._saver.submit(self._write, job, absolute(path)))
            self._counts.begin(self.step, job.size_bytes, begun[0])
            job.stage()
        except BaseException as error:
            job.abandon(error)
            wait(begun)  # its error is the one that the caller sees now
            raise
        self._unseen += begun
        stall_s = time.perf_counter() - started
        note_checkpoint_stall(stall_s)
        self._counts.stalled(stall_s)

    def _write(self, job: SaveJob, path: str) -> None:
        stay_beside_captures()
        try:
            job.write(path, self._writers, self._options)
        finally:
            job.cancel()


def _check_replaceable(path: str) -> None:
    """Raise NotReplaceable now, and not in the middle of training.

    The caller can still have the file written in another way.
    """
    if os.path.lexists(path):
        engine.Output(path, 0)  # makes a temporary file, and removes it
