"""`Uploads`: complete checkpoints on their way from a local folder to a store."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import NamedTuple

from gdsdata.checkpoint.background.checkpoint_folder import CheckpointFolder
from gdsdata.checkpoint.background.checkpoints import in_order
from gdsdata.checkpoint.background.manifest import Kept, Manifest
from gdsdata.checkpoint.background.ranks import Ranks
from gdsdata.checkpoint.background.remote_folder import RemoteFolder
from gdsdata.checkpoint.background.replicas import Replicas
from gdsdata.checkpoint.background.sending import Pace, Sender, Stopped, lower_priority
from gdsdata.errors import CorruptData, IoError, SaveAborted
from gdsdata.io import engine

# A store retries each request by itself. If all of these attempts fail, the upload is given up.
_ATTEMPTS = 3
_FIRST_PAUSE_S = 5.0  # before the second attempt; twice as long before the third
_FOREVER_S = 30 * 86400.0  # the ranks' threads wait for the next checkpoint in a collective call
_MOST_JOIN_S = 1.0  # at the program's end
_OUTCOMES_KEPT = 16  # of uploads that ended before their handle was known


@dataclass(frozen=True)
class UploadStatus:
    """The state of a process's uploads.

    Attributes:
        step: the step that is being uploaded; None: none is.
        sent_bytes: how much of this rank's file of that step was sent.
        waiting: the steps that are uploaded next. On the first rank; the others know of none.
        newest_step: the step whose upload was completed last; None: none was in this process.
        error: the last error of an upload; None: there was none.
    """

    step: int | None
    sent_bytes: int
    waiting: tuple[int, ...]
    newest_step: int | None
    error: str | None


class _Command(NamedTuple):
    """The next step of all ranks, chosen by the first one.

    Attributes:
        manifest: what they upload; None: they end.
        skipped: sequences of checkpoints that nobody uploads.
    """

    manifest: Manifest | None
    skipped: tuple[int, ...]


class Uploads:
    """Uploads checkpoints one after another, in a thread of its own.

    Each rank sends its own file. The first one chooses the next checkpoint, and puts the manifest
    when all files are there. An error never reaches a save: it is in `status`, in the result of the
    upload, and in one warning.

    A checkpoint that waits may be removed from the local folder, because newer ones need its place.
    Then it is skipped. So a slow store never delays a save, nor fills the disk.

    It owns the thread, which ends with the program: what was not sent is sent by the next one. Any
    thread may call it, but one alone `spare` and `add`. All ranks construct it together.

    Args:
        folder: of the local checkpoints.
        remote: where they go.
        kept: which of them stay there.
        bytes_per_s: of all ranks together; None: no bound.
        ranks: that save.
        replicas: which of them have the same state, and so one file.

    Attributes:
        sent_in_all_bytes: what this process has sent.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        remote: RemoteFolder,
        kept: Kept,
        bytes_per_s: float | None,
        ranks: Ranks,
        replicas: Replicas,
    ) -> None:
        self._folder, self._remote, self._kept = folder, remote, kept
        self._ranks = ranks.again(_FOREVER_S)  # with a group of its own, because another thread uses it
        self._replicas = replicas
        self._pace = Pace(None if bytes_per_s is None else bytes_per_s / replicas.count)
        self._sender = Sender(self._pace, self._count)
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # guards everything below
        self._waiting: deque[Manifest] = deque()  # on the first rank
        self._known: set[int] = set()  # there too: sequences of all that have waited
        self._skipped: list[int] = []  # there too: sequences that the other ranks do not know of yet
        self._knows_leftovers = False
        self._is_closed = False
        self._current: Manifest | None = None
        self._sent_bytes = 0
        self.sent_in_all_bytes = 0
        self._newest_step: int | None = None
        self._error: str | None = None
        self._last_error: BaseException | None = None  # that has ended the thread
        self._results: dict[int, Future[str]] = {}  # of those who wait, by sequence
        self._outcomes: dict[int, str | BaseException] = {}  # that came before their `add`
        self.least_sequence = 0

    def start(self) -> None:
        """Begin with what an earlier process has left. May be called again.

        All ranks call it, when this process alone writes into the local folder.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gdsdata-upload", daemon=True)
            self._thread.start()
            atexit.register(self._leave)

    def add(self, manifest: Manifest, result: Future[str]) -> None:
        """Upload a checkpoint that was committed. All ranks call it.

        Args:
            manifest: of the checkpoint.
            result: gets the URL of the checkpoint, or the error.
        """
        with self._changed:
            outcome = self._outcomes.pop(manifest.sequence, self._last_error)
            self._results[manifest.sequence] = result
            if self._ranks.rank == 0 and manifest.sequence not in self._known:
                self._known.add(manifest.sequence)
                self._waiting.append(manifest)
            self._changed.notify_all()
        if outcome is not None:
            self._end(manifest.sequence, outcome)

    def spare(self, leaving: Sequence[Manifest]) -> set[int]:
        """Skip the checkpoints that are about to be removed from the local folder.

        Returns:
            The sequence of the one that is being uploaded, if it is among them: it has to stay.
        """
        sequences = {one.sequence for one in leaving}
        with self._changed:
            skipped = [one for one in self._waiting if one.sequence in sequences]
            self._waiting = deque(one for one in self._waiting if one.sequence not in sequences)
            self._skipped += [one.sequence for one in skipped]
            current = self._current.sequence if self._current is not None else None
        for one in skipped:
            error = _skipped(one.step)
            engine.warn_once(f"{error} It stays out of '{self._remote.url}'; newer ones are uploaded")
            self._end(one.sequence, error)
        return sequences & {current} if current is not None else set()

    def note(self, sequence: int) -> None:
        """Note the highest sequence of the store's checkpoints: later ones have higher ones."""
        with self._changed:
            self.least_sequence = max(self.least_sequence, sequence + 1)

    @property
    def status(self) -> UploadStatus:
        with self._changed:
            step = None if self._current is None else self._current.step
            waiting = tuple(one.step for one in self._waiting)
            return UploadStatus(step, self._sent_bytes, waiting, self._newest_step, self._error)

    def close(self, waits: bool) -> None:
        """End the thread.

        Args:
            waits: upload what waits first. Otherwise the next process uploads it.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if not waits:
            self._pace.stop()
        if self._thread is not None and waits:
            self._thread.join()
        self._end_all(Stopped("the program ended before the checkpoint was uploaded; the next one uploads it"))
        self._sender.close()
        if self._thread is None or not self._thread.is_alive():
            atexit.unregister(self._leave)

    def _leave(self) -> None:
        """End the thread's waits before modules are torn down: see `gdsdata.io.program_end`."""
        if self._thread is None or not self._thread.is_alive():  # as in a forked child
            return
        self._pace.stop()
        with self._changed:
            self._changed.notify_all()
        self._ranks.break_off()
        self._thread.join(_MOST_JOIN_S)

    def _end(self, sequence: int, outcome: str | BaseException) -> None:
        """Set the result of an upload."""
        with self._changed:
            result = self._results.pop(sequence, None)
            if result is None:
                self._outcomes[sequence] = outcome
                while len(self._outcomes) > _OUTCOMES_KEPT:
                    self._outcomes.pop(min(self._outcomes))
                return
        with contextlib.suppress(InvalidStateError):  # it has ended already
            if isinstance(outcome, BaseException):
                result.set_exception(outcome)
            else:
                result.set_result(outcome)

    def _end_all(self, error: BaseException) -> None:
        with self._changed:
            self._last_error = self._last_error or error
        for sequence in list(self._results):
            self._end(sequence, error)

    # --- in the thread, on every rank ---------------------------------------------------------------------------------

    def _run(self) -> None:
        lower_priority()
        try:
            while True:
                command = self._ranks.first(self._next)
                for sequence in command.skipped:
                    if self._ranks.rank > 0:
                        self._end(sequence, _skipped(None))
                if command.manifest is None:
                    return
                self._upload(command.manifest)
        except Stopped as error:
            self._end_all(error)
        except BaseException as error:
            if not self._pace.is_stopped:
                self._report(f"no more checkpoints are uploaded by this process: {error!r}")
            self._end_all(error)
        finally:
            with self._changed:
                self._current = None

    def _next(self) -> _Command:
        """Wait for something to upload, and take it. On the first rank."""
        while True:
            self._find_leftovers()
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed or self._pace.is_stopped)
                self._pace.sleep(0)
                self._current = self._waiting.popleft() if self._waiting else None
                self._sent_bytes = 0
                skipped, self._skipped = tuple(self._skipped), []
                return _Command(self._current, skipped)

    def _find_leftovers(self) -> None:
        """Have what an earlier process has committed, and not uploaded, wait too."""
        if self._knows_leftovers:
            return
        try:
            remote = self._remote.complete()
            self.note(max((one.sequence for one in remote), default=-1))
            newest = remote[-1].sequence if remote else -1
            order = in_order(self._folder.complete(), remote)
        except (OSError, CorruptData) as error:
            self._report(f"it is not known which checkpoints '{self._remote.url}' lacks: {error}")
            return
        found = [one.manifest for one in order if not one.is_uploaded and one.sequence > newest]
        with self._changed:
            new = [one for one in found if one.sequence not in self._known]
            self._known.update(one.sequence for one in new)
            self._waiting = deque(sorted([*new, *self._waiting], key=lambda one: one.sequence))
            self._knows_leftovers = True

    def _upload(self, manifest: Manifest) -> None:
        """Upload a checkpoint, or give it up. On every rank."""
        with self._changed:
            self._current, self._sent_bytes = manifest, 0
        pause_s = _FIRST_PAUSE_S
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._ranks.each(lambda: self._send_mine(manifest))
                url = self._ranks.first(lambda: self._commit(manifest))
            except Exception as error:
                self._pace.sleep(0)  # raises if the program ends
                failed, is_last = error, attempt == _ATTEMPTS
                if self._ranks.first(lambda: is_last or self._is_in_vain(failed)):  # noqa: B023  called at once
                    self._report(f"step {manifest.step} could not be uploaded to '{self._remote.url}': {error}")
                    self._end_current(manifest, error)
                    return
                self._pace.sleep(pause_s)
                pause_s *= 2
            else:
                with self._changed:
                    self._newest_step = manifest.step
                self._end_current(manifest, url)
                return

    def _end_current(self, manifest: Manifest, outcome: str | BaseException) -> None:
        with self._changed:
            self._current = None
        self._end(manifest.sequence, outcome)

    def _is_in_vain(self, error: Exception) -> bool:
        """Return whether to give an upload up: it would fail again, or a newer one waits."""
        with self._changed:
            if self._waiting:  # a newer one is worth more
                return True
        cause = error.__cause__ if isinstance(error, SaveAborted) else error
        return isinstance(cause, (PermissionError, FileNotFoundError, CorruptData, ValueError, TypeError))

    def _send_mine(self, manifest: Manifest) -> None:
        for file in self._replicas.mine_of(manifest.files):
            if not self._remote.has(manifest.step, file):
                path, url = self._folder.file(manifest.step, file.name), self._remote.file(manifest.step, file.name)
                try:
                    self._sender.send(path, file.size_bytes, url)
                except FileNotFoundError as error:
                    if os.path.exists(path):
                        raise
                    raise _skipped(manifest.step) from error  # newer checkpoints have its place

    def _commit(self, manifest: Manifest) -> str:
        """Put the manifest, and remove what the store does not keep. On the first rank."""
        if lacking := self._remote.lacking(manifest):
            url = self._remote.file(manifest.step, lacking[0])
            raise IoError(0, f"'{url}' was uploaded, and is not there: does another run write to this URL?", url)
        if not self._knows_leftovers:  # the store could not be listed before
            self.note(max((one.sequence for one in self._remote.complete()), default=-1))
        sequence = max(manifest.sequence, self.least_sequence)
        self._remote.commit(Manifest(manifest.step, sequence, manifest.files))
        self.note(sequence)
        with self._changed:
            coming = list(self._waiting)
        try:
            self._remote.retain(self._kept, coming)
        except (OSError, CorruptData) as error:  # the checkpoint is complete all the same
            self._report(f"older checkpoints in '{self._remote.url}' could not be removed: {error}")
        return self._remote.folder_of(manifest.step)

    def _count(self, size_bytes: int) -> None:
        with self._changed:
            self._sent_bytes += size_bytes
            self.sent_in_all_bytes += size_bytes

    def _report(self, message: str) -> None:
        with self._changed:
            self._error = message
        engine.warn_once(message)


def _skipped(step: int | None) -> SaveAborted:
    which = "a checkpoint" if step is None else f"step {step}"
    return SaveAborted(f"the upload of {which} was skipped: saves come faster than the store takes them.")
