"""`Saver`: the thread that saves, on every rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from gdsdata.checkpoint.background.checkpoint_folder import CheckpointFolder, LockedFolder, nothing_spared, removed
from gdsdata.checkpoint.background.copies import Generation
from gdsdata.checkpoint.background.manifest import Kept, Manifest, SavedFile
from gdsdata.checkpoint.background.own_copy import NoCopy, OwnCopy
from gdsdata.checkpoint.background.peer_memory import CopiesInMemory, Outcome, set_outcome
from gdsdata.checkpoint.background.ranks import Ranks
from gdsdata.checkpoint.background.replicas import Described, ReplicaJob, Replicas
from gdsdata.checkpoint.background.save_job import PIECES_AT_A_TIME, FailedJob, SaveJob
from gdsdata.checkpoint.background.uploads import Uploads
from gdsdata.checkpoint.threads import DaemonThreads, saving_thread
from gdsdata.errors import CorruptData, EngineClosed, IoError, RankLost, SaveAborted
from gdsdata.io import engine
from gdsdata.io.captures import stay_beside_captures
from gdsdata.io.options import EngineOptions

Job = SaveJob | ReplicaJob | FailedJob
T = TypeVar("T")


class _Begun(NamedTuple):
    """A save that the first rank has begun.

    Attributes:
        step: the step.
        folder: of the step, as the first rank calls it.
        number: the random part of its files' names.
        sequence: the least `Manifest.sequence`.
        generation: of its copies in memory; None: it gets none.
    """

    step: int
    folder: str
    number: str
    sequence: int
    generation: Generation | None


class Saver:
    """Saves one state after another in the background. It owns the threads and the folder's lock.

    All ranks call it in the same order, each by one thread.

    Args:
        folder: of the checkpoints.
        ranks: all ranks.
        replicas: which of them have the same state.
        kept: which checkpoints stay in the folder.
        uploads: takes complete checkpoints; None: nobody does.
        memory: takes copies of saves.
        options: of the engine.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        ranks: Ranks,
        replicas: Replicas,
        kept: Kept,
        uploads: Uploads | None,
        memory: CopiesInMemory,
        options: EngineOptions,
    ) -> None:
        self._folder, self._ranks, self._kept, self._uploads, self._options = folder, ranks, kept, uploads, options
        self._replicas, self._memory = replicas, memory
        self._locked: LockedFolder | None = None  # of the thread, from its first save on
        self._thread = saving_thread()
        self._process = os.getpid()
        self._is_closed = False
        self._writers = DaemonThreads(PIECES_AT_A_TIME, "gdsdata-write")

    def submit(self, job: Job, described: Described, uploaded: Future[str], copied: Outcome) -> Future[str]:
        """Save a state after those before it.

        Args:
            job: the state, or the error that keeps it from being saved.
            described: the state, which must be the same on replicas.
            uploaded: gets the checkpoint's URL, if it is uploaded, or the error.
            copied: gets whether memory has all copies.

        Returns:
            The checkpoint's folder, when it is complete.
        """
        return self._submitted(self._save, job, described, uploaded, copied)

    def begin_uploads(self) -> Future[None]:
        """Upload what an earlier process has left, if nobody else saves into the folder."""
        return self._submitted(self._begin_uploads)

    def reconnect(self) -> None:
        """Connect the ranks again if one was lost, behind every save. All of them call it.

        Raises:
            RankLost: a rank does not come in time.
        """
        if self._is_closed:
            self._ranks.connect()
        else:
            self._submitted(self._ranks.connect).result()

    def _submitted(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        self.check_not_forked()
        return self._thread.submit(call, *arguments)

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child: it has no threads, and its parent's saves end there."""
        return os.getpid() != self._process

    def check_not_forked(self) -> None:
        """Raise `EngineClosed` in a forked child."""
        if self.is_forked:
            raise EngineClosed("this AsyncCheckpointer belongs to the process that forked this one: make a new one")

    def close(self, waits_for_uploads: bool) -> None:
        """Wait for every save, and release the folder. May be called again."""
        self._is_closed = True
        self._thread.shutdown()
        self._writers.close()
        if self._uploads is not None:
            self._uploads.close(waits_for_uploads)
        if self._locked is not None:
            self._locked.release()

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _save(self, job: Job, described: Described, uploaded: Future[str], copied: Outcome) -> str:
        """Save on all ranks.

        The first rank makes the folder, one rank of each state writes its file, and the first rank
        commits.
        """

        stay_beside_captures()

        def its_description() -> Described:
            job.check()
            return described

        try:
            begun = self._ranks.first(lambda: self._begin(job))
            self._replicas.check_same(its_description)
            with self._memory.keeping(begun.generation, copied) as copy:
                written = self._ranks.each(lambda: self._write(job, begun, copy))
                files = [file for file in written if file is not None]
                manifest = self._ranks.first(lambda: self._commit(begun, files))
            if self._uploads is not None:
                self._uploads.start()
                self._uploads.add(manifest, uploaded)
            return self._folder.folder_of(job.step)
        except BaseException as error:
            failed = SaveAborted(str(error)) if isinstance(error, RankLost) else error
            uploaded.set_exception(failed)
            set_outcome(copied, False)
            if self._locked is not None:
                with contextlib.suppress(Exception):  # the next save tries again
                    self._locked.tidy()
            if failed is not error:
                raise failed from error
            raise
        finally:
            job.cancel()

    def _begin(self, job: Job) -> _Begun:
        job.check()
        locked = self._lock()
        number = locked.begin(job.step)
        of_store = self._uploads.least_sequence if self._uploads else 0
        sequence = locked.next_sequence(max(self._memory.least_sequence, of_store))
        generation = self._memory.plan(job.step, sequence, number, locked.run_id)
        return _Begun(job.step, self._folder.folder_of(job.step), number, sequence, generation)

    def _lock(self) -> LockedFolder:
        if self._locked is None:
            self._locked = LockedFolder(self._folder, self._options)
        return self._locked

    def _hold_lock(self) -> None:
        self._lock()

    def _begin_uploads(self) -> None:
        if self._uploads is not None:
            with contextlib.suppress(IoError, SaveAborted, RankLost, CorruptData):  # the first save raises it
                self._ranks.first(self._hold_lock)
                self._uploads.start()

    def _write(self, job: Job, begun: _Begun, copy: OwnCopy | NoCopy) -> SavedFile | None:
        if job.step != begun.step:
            raise SaveAborted(f"the ranks save different steps: this one {job.step}, and the first one {begun.step}")
        if isinstance(job, ReplicaJob):
            return None
        name = f"rank-{self._ranks.rank}-{begun.number}.pt"
        path = self._folder.file(job.step, name)
        try:
            return SavedFile(name, job.write(path, self._writers, self._options, copy))
        except FileNotFoundError as error:
            folder = os.path.dirname(path)
            if os.path.isdir(folder):
                raise
            if self._ranks.rank == 0:
                raise removed(folder) from error
            raise IoError.caused_by(
                error,
                f"the first rank made the folder '{begun.folder}', and this rank has no '{folder}'. Give all ranks the "
                "same folder, on storage that all of them see",
                folder,
            ) from error

    def _commit(self, begun: _Begun, files: list[SavedFile]) -> Manifest:
        assert self._locked is not None  # `_begin` was here before, on this rank
        uploads = self._uploads
        least_sequence = max(begun.sequence, uploads.least_sequence if uploads else 0)
        manifest = self._locked.commit(begun.step, files, least_sequence)
        try:
            self._locked.retain(self._kept, uploads.spare if uploads else nothing_spared)
        except (OSError, CorruptData) as error:  # this checkpoint is complete all the same
            engine.warn_once(f"older checkpoints in '{self._folder.path}' could not be removed: {error}")
        return manifest
