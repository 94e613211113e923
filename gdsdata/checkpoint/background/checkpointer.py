"""`AsyncCheckpointer`: checkpoints that are written while training goes on."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from gdsdata.checkpoint.background.arguments import size_in_bytes, whole_number
from gdsdata.checkpoint.background.checkpoint_folder import CheckpointFolder, LockedFolder, Manifest, SavedFile
from gdsdata.checkpoint.background.preparation import Preparation
from gdsdata.checkpoint.background.rank_file import load_over
from gdsdata.checkpoint.background.ranks import Ranks
from gdsdata.checkpoint.background.save_handle import SaveHandle
from gdsdata.checkpoint.background.save_job import FailedJob, SaveJob
from gdsdata.checkpoint.background.staging import Snapshots
from gdsdata.checkpoint.background.staging_memory import Staging
from gdsdata.checkpoint.background.states import check_state, restored, state_of, target_of
from gdsdata.checkpoint.dtensors import local_parts, with_dtensors
from gdsdata.checkpoint.threads import DaemonThreads
from gdsdata.errors import CorruptData, EngineClosed, SaveAborted
from gdsdata.io import engine
from gdsdata.io.options import EngineOptions
from gdsdata.observe.times import note_checkpoint_stall

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class AsyncCheckpointer:
    """Saves checkpoints in the background, and restores the newest complete one.

        ckpt = gdsdata.AsyncCheckpointer("runs/a", keep_last=3, keep_every=1000)
        start = ckpt.restore({"model": model, "optim": optim, "data": ds})   # the step, or None
        ...
        handle = ckpt.save(step, {"model": model, "optim": optim, "data": ds})

    A checkpoint is a folder ``step-N`` with a file of each rank, which `torch.load` reads, and a
    manifest. The manifest is written when all files are on storage. Without it there is no
    checkpoint: what a crash has left is never restored, and the next save removes it. If a step is
    saved again, one rename replaces the old checkpoint.

    With several ranks (`torch.distributed` is initialized), all of them construct it, save and
    restore together. Each rank saves its own state, of a DTensor its own part, and the same number
    of ranks restores them. To change that number, save with torch.distributed.checkpoint and
    `GDSStorageWriter`.

    Memory: at most ``staging_bytes`` of the host, in buffers of 32 MiB, kept until `close`. They
    are pinned if a state has tensors on a GPU. `restore` and `prepare` have as many made in the
    background as the state's bytes need; a save makes what is lacking. To that come the engine's
    own memory (`EngineOptions`), and GPU memory within ``device_staging_bytes``.

    It owns the threads that write, and the folder's lock. One thread at a time may call it.

    Args:
        folder: of the checkpoints, on storage that all ranks see. One `AsyncCheckpointer` at a time
            may save into it. On a file system without ``flock`` a lock file with a heartbeat
            ensures that, and a warning says so. If the holder was killed, the next one's first save
            waits a minute.
        keep_last: how many of the newest checkpoints are kept; each complete save removes older
            ones. Default 3.
        keep_every: checkpoints of steps that are multiples of it are kept too, forever. None: none
            are.
        staging_bytes: the most host memory for states that are being written: a number, or as
            "8GiB" (the default). A larger state passes through it piece by piece.
        device_staging_bytes: the most memory of each GPU for copies of states. `save` then waits
            neither for GPUs nor for storage. A state that does not fit into what is left of it is
            copied to the host first. 0: none.
        process_group: of gloo, with all ranks; None: all ranks together make one.
        timeout_s: how long ranks wait for one another, in seconds.
        options: of the engine; None: the defaults.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument has another type.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_last: int = 3,
        keep_every: int | None = None,
        staging_bytes: int | str = "8GiB",
        device_staging_bytes: int | str = 0,
        process_group: ProcessGroup | None = None,
        timeout_s: float = 1800.0,
        options: EngineOptions | None = None,
    ) -> None:
        self.keep_last = whole_number("keep_last", keep_last, 1)
        self.keep_every = None if keep_every is None else whole_number("keep_every", keep_every, 1)
        self.options = options or EngineOptions()
        self._folder = CheckpointFolder(os.fsdecode(folder))
        self._locked: LockedFolder | None = None  # of the thread that saves, from its first save on
        self._staging = Staging(size_in_bytes("staging_bytes", staging_bytes))
        on_devices = size_in_bytes("device_staging_bytes", device_staging_bytes) if device_staging_bytes else 0
        self._preparation = Preparation(self._staging)
        self._end_preparing = weakref.finalize(self, _end_preparing, self._staging, self._preparation, os.getpid())
        self._snapshots = Snapshots(on_devices)
        self._ranks = Ranks(process_group, timeout_s)
        self._saves = ThreadPoolExecutor(1, thread_name_prefix="gdsdata-save")  # the interpreter's end waits for it
        self._writers = DaemonThreads(2, "gdsdata-write")  # two pieces at a time, so that storage always has the next
        self._stagers = DaemonThreads(1, "gdsdata-stage")
        self._stagings: list[Future[None]] = []  # of snapshots, in progress
        self._under_way: list[Future[str]] = []  # saves, and those in which this rank only takes part
        self._unseen: list[Future[str]] = []  # saves whose errors nobody has seen yet
        self._closed = False

    def save(self, step: int, state: Mapping[str, Any]) -> SaveHandle:
        """Copy a state and write it in the background.

        Everything in it may change when this returns.

        This waits for the copy to the host. If this save and earlier ones fill the staging memory,
        it also waits until storage has taken some of it. With ``device_staging_bytes`` it waits for
        neither.

        Args:
            step: of the training: a number of 0 or more.
            state: by name: objects that have a ``state_dict``, or plain values as `torch.save`
                takes them.

        Returns:
            A handle that says when the checkpoint is complete.

        Raises:
            ValueError, TypeError: an argument is out of range or has another type, or a tensor is
                on the meta device.
            pickle.PicklingError, TypeError, AttributeError: a value cannot be pickled; the message
                has its name.
            IoError, SaveAborted, ...: an earlier save failed in the background, and nobody has seen
                its error yet. This save has not begun then.
            EngineClosed: `close` was called before.

        Stream semantics: tensors on a GPU are copied after all work that the current stream of that
        GPU has so far. Work that it gets after this returns comes after the copy.
        """
        started = time.perf_counter()
        self._preparation.end()  # what it needs is known now
        try:
            self._check_open()
            step = whole_number("step", step, 0)
            check_state(state, Mapping)
            states = {name: local_parts(state_of(one)) for name, one in state.items()}
            job = SaveJob(step, states, self._staging, self._snapshots)
        except Exception as error:
            if not self._closed:
                self._submit(FailedJob(step, error))  # the other ranks wait for this one
            raise
        if not job.is_copied:
            wait(self._stagings)  # they need staging memory, and this state would hold all of it until it is written
        ended = self._submit(job)
        self._unseen.append(ended)
        handle = SaveHandle(step, job.size_bytes, ended, lambda: self._forget(ended))
        try:
            if job.is_copied:
                self._stagings = [one for one in self._stagings if not one.done()]
                self._stagings.append(self._stagers.submit(job.stage))
            else:
                job.stage()
        except BaseException:  # the caller sees this error now
            self._forget(ended)
            raise
        handle.stall_s = time.perf_counter() - started
        note_checkpoint_stall(handle.stall_s)
        return handle

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Make memory for saves of a state in the background.

        The first save then takes no longer than later ones. Returns at once. `restore` does the
        same for its state, so most programs need not call this. It may be called again, with
        another state too: memory is added if that needs more.

        Memory: as many buffers of 32 MiB as the state's bytes need, at most ``staging_bytes``, and
        at most half of what the machine has left, divided among its ranks. They are made one by
        one, with pauses. A save that comes before they are complete has several threads make the
        rest. Pages of a state on the CPU are touched, from 1 MiB on; if it has tensors on a GPU,
        the buffers are pinned. An optimizer makes its state in its first step: until then it is
        looked at twice a second.

        If memory cannot be made, a warning says so, and `save` tries again.

        Args:
            state: as for `save`. Parameters and buffers of models are counted, and the state that
                optimizers have; ``state_dict`` is called of other objects.

        Raises:
            TypeError: ``state`` is no dict.
            EngineClosed: `close` was called before.
            Exception: whatever a ``state_dict`` of ``state`` raises.
        """
        self._check_not_closed()
        check_state(state, Mapping)
        self._preparation.begin(state)

    def restore(
        self,
        state: MutableMapping[str, Any],
        step: int | None = None,
        *,
        verify: bool = False,
        weights_only: bool = True,
    ) -> int | None:
        """Load the newest complete checkpoint, or that of ``step``, into ``state``.

        Waits for saves in progress. Afterwards memory for saves of ``state`` is made in the
        background, as by `prepare`, whether there was a checkpoint or not. Without a checkpoint,
        only models, optimizers and plain values are counted.

        An object that has a ``load_state_dict`` gets its part. In plain values, tensors are filled
        where they are, and other values are replaced in their dict; so are tensors that take no
        copy, as nested ones. Names that the checkpoint has and ``state`` does not have are ignored.

        Args:
            state: as for `save`.
            step: the step; None: the one that was saved last.
            verify: compare checksums while reading.
            weights_only: torch's rules for what a pickle may make (`torch.load`).

        Returns:
            The step; None if there is no checkpoint. Nothing was changed then.

        Raises:
            FileNotFoundError: there is no checkpoint of that step, or a file of it is missing.
            CorruptData, IoError: the checkpoint is damaged, or cannot be read.
            ValueError: it has other names or shapes (then a part of ``state`` may have been
                changed), another number of ranks saved it, or a tensor of ``state`` is on the meta
                device.
            TypeError: an argument has another type.
            pickle.UnpicklingError: ``weights_only`` forbids something in the checkpoint.
            SaveAborted: another rank failed; its error is the cause.
            IoError, SaveAborted, ...: an earlier save failed in the background, and nobody has seen
                its error yet.
            Exception: whatever a ``load_state_dict`` of ``state`` raises.

        Stream semantics: the bytes are in place when this returns, for every stream.
        """

        def prepare() -> None:
            check_state(state, MutableMapping)
            if step is not None:
                whole_number("step", step, 0)
            self.wait()

        self._ranks.each(prepare)  # afterwards no rank has a save in progress
        chosen = self._ranks.first(lambda: self._find(step))
        if chosen is None:
            self._prepare({name: one for name, one in state.items() if _is_counted(one)})
            return None
        targets = {name: target_of(one) for name, one in state.items()}
        parts = {name: local_parts(target) for name, target in targets.items()}

        def read() -> dict[str, Any]:
            if len(chosen.files) != self._ranks.count:
                raise ValueError(
                    f"step {chosen.step} in '{self._folder.path}' was saved by {len(chosen.files)} ranks, and these "
                    f"are {self._ranks.count}: use torch.distributed.checkpoint with GDSStorageWriter to change that"
                )
            return load_over(
                self._folder.check(chosen, chosen.files[self._ranks.rank]),
                parts,
                strict=[name for name, one in state.items() if not hasattr(one, "load_state_dict")],
                verify=verify,
                weights_only=weights_only,
                options=self.options,
            )

        found = self._ranks.mine(read)
        whole = {name: with_dtensors(targets[name], parts[name], found[name]) for name in targets}
        for name, one in list(state.items()):
            if hasattr(one, "load_state_dict"):
                self._load_state(name, one, whole[name], chosen.step)
            else:
                state[name] = restored(one, whole[name])
        self._prepare({name: one if _is_counted(one) else targets[name] for name, one in state.items()})
        return chosen.step

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, the newest last."""
        return [manifest.step for manifest in self._folder.complete()]

    def wait(self) -> None:
        """Wait until every save has ended.

        Raises:
            IoError, SaveAborted, ...: as `save` does.
        """
        wait(list(self._under_way))
        self._under_way.clear()
        self._raise_unseen()

    def close(self) -> None:
        """Wait for every save, and let others save into the folder. Raises as `wait` does.

        Memory that is being made is not waited for, but for the buffers in progress.

        May be called again.
        """
        self._end_preparing()
        try:
            self.wait()
        finally:
            self._closed = True
            self._staging.close()
            self._saves.shutdown()
            self._writers.close()
            self._stagers.close()
            if self._locked is not None:
                self._locked.release()

    def __repr__(self) -> str:
        under_way = sum(not one.done() for one in self._under_way)
        state = "closed" if self._closed else f"{under_way} saves under way"
        kept = f"keep_last={self.keep_last}, keep_every={self.keep_every}"
        rank = f"rank {self._ranks.rank} of {self._ranks.count}"
        return f"AsyncCheckpointer({self._folder.path!r}, {kept}, {rank}, {state})"

    def __enter__(self) -> AsyncCheckpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            return self.close()
        with contextlib.suppress(Exception):  # the error that ends the block is the one to report
            self.close()
        return None

    def _check_open(self) -> None:
        self._check_not_closed()
        self._under_way = [one for one in self._under_way if not one.done()]
        self._raise_unseen()

    def _check_not_closed(self) -> None:
        if self._closed:
            raise EngineClosed("this AsyncCheckpointer was closed; make a new one")

    def _prepare(self, state: Mapping[str, Any]) -> None:
        """Prepare for a state that was restored, which an error here does not change."""
        if self._closed:
            return
        try:
            self._preparation.begin(state)
        except Exception as error:
            engine.warn_once(f"memory for saves could not be made in advance ({error!r}): save() makes it")

    def _raise_unseen(self) -> None:
        """Raise the first error that nobody has seen, of saves that have ended."""
        done = [one for one in self._unseen if one.done()]
        for ended in done:
            self._forget(ended)
        for ended in done:
            ended.result()

    def _forget(self, ended: Future[str]) -> None:
        with contextlib.suppress(ValueError):
            self._unseen.remove(ended)

    def _find(self, step: int | None) -> Manifest | None:
        complete = self._folder.complete()
        if step is None:
            return complete[-1] if complete else None
        for manifest in complete:
            if manifest.step == step:
                return manifest
        steps = ", ".join(str(manifest.step) for manifest in complete) or "none"
        raise FileNotFoundError(f"'{self._folder.path}' has no complete checkpoint of step {step}; there are: {steps}")

    def _load_state(self, name: str, one: Any, found: Any, step: int) -> None:
        try:
            one.load_state_dict(found)
        except RuntimeError as error:
            if not isinstance(one, torch.nn.Module) or not str(error).startswith("Error(s) in loading state_dict"):
                raise
            message = f"step {step} in '{self._folder.path}' does not fit {name!r}: {error}"
            raise ValueError(message) from error

    # --- in the thread that saves, on every rank ----------------------------------------------------------------------

    def _submit(self, job: SaveJob | FailedJob) -> Future[str]:
        ended = self._saves.submit(self._save, job)
        self._under_way.append(ended)
        return ended

    def _save(self, job: SaveJob | FailedJob) -> str:
        """Save on all ranks.

        The first rank makes the folder, each rank writes its file, and the first rank commits.
        """
        try:
            number, step = self._ranks.first(lambda: (self._begin(job), job.step))
            files = self._ranks.each(lambda: self._write(job, number, step))
            self._ranks.first(lambda: self._commit(step, files))
            return self._folder.folder_of(job.step)
        except BaseException:
            if self._locked is not None:
                with contextlib.suppress(Exception):  # the next save tries again
                    self._locked.tidy()
            raise
        finally:
            job.cancel()

    def _begin(self, job: SaveJob | FailedJob) -> str:
        job.check()
        if self._locked is None:
            self._locked = LockedFolder(self._folder, self.options)
        return self._locked.begin(job.step)

    def _write(self, job: SaveJob | FailedJob, number: str, step: int) -> SavedFile:
        if job.step != step:
            raise SaveAborted(f"the ranks save different steps: this one {job.step}, and the first one {step}")
        name = f"rank-{self._ranks.rank}-{number}.pt"
        return SavedFile(name, job.write(self._folder.file(job.step, name), self._writers, self.options))

    def _commit(self, step: int, files: list[SavedFile]) -> None:
        assert self._locked is not None  # `_begin` was here before, on this rank
        self._locked.commit(step, files)
        try:
            self._locked.retain(self.keep_last, self.keep_every)
        except (OSError, CorruptData) as error:  # this checkpoint is complete all the same
            engine.warn_once(f"older checkpoints in '{self._folder.path}' could not be removed: {error}")


def _is_counted(one: Any) -> bool:
    """Return whether `Preparation` counts a value without its ``state_dict``."""
    return isinstance(one, (torch.nn.Module, torch.optim.Optimizer)) or not hasattr(one, "state_dict")


def _end_preparing(staging: Staging, preparation: Preparation, process: int) -> None:
    if os.getpid() == process:  # a forked child has no such threads, and their locks may be held forever
        staging.stop()
        preparation.end()
