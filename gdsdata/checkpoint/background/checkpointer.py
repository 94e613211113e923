"""`AsyncCheckpointer`: checkpoints that are written while training goes on."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from concurrent.futures import Future, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gdsdata.checkpoint.background.arguments import (
    bytes_per_s,
    check_no_replicas,
    checkpoint_folder,
    peers_of,
    same_on_all,
    size_in_bytes,
    step_number,
    upload_url,
)
from gdsdata.checkpoint.background.checkpoint_folder import CheckpointFolder
from gdsdata.checkpoint.background.checkpoints import Checkpoints
from gdsdata.checkpoint.background.copies import Held
from gdsdata.checkpoint.background.manifest import Kept
from gdsdata.checkpoint.background.memory_folder import DEFAULT_BASE, MemoryFolder
from gdsdata.checkpoint.background.peer_memory import CopiesInMemory, NoPeerMemory, Outcome, PeerMemory
from gdsdata.checkpoint.background.preparation import Preparation, end_preparing
from gdsdata.checkpoint.background.rank_file import load_over
from gdsdata.checkpoint.background.ranks import Ranks
from gdsdata.checkpoint.background.remote_folder import RemoteFolder
from gdsdata.checkpoint.background.replicas import Described, ReplicaJob, Replicas
from gdsdata.checkpoint.background.restoring import Found, Restoring
from gdsdata.checkpoint.background.save_content import content_of_state
from gdsdata.checkpoint.background.save_counts import SaveCounts
from gdsdata.checkpoint.background.save_handle import SaveHandle
from gdsdata.checkpoint.background.save_job import FailedJob, SaveJob
from gdsdata.checkpoint.background.saver import Saver
from gdsdata.checkpoint.background.saves_under_way import SavesUnderWay
from gdsdata.checkpoint.background.staging import Snapshots
from gdsdata.checkpoint.background.staging_memory import Staging
from gdsdata.checkpoint.background.states import check_state, is_counted, load_states, plain_values, state_of, target_of
from gdsdata.checkpoint.background.uploads import Uploads, UploadStatus
from gdsdata.checkpoint.dtensors import local_parts
from gdsdata.checkpoint.threads import DaemonThreads
from gdsdata.errors import EngineClosed
from gdsdata.io.options import EngineOptions, options_of
from gdsdata.observe.times import note_checkpoint_stall
from gdsdata.progress_bars import bar
from gdsdata.whole_numbers import whole_number

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from gdsdata.collective.transfers import SharedReads


class AsyncCheckpointer:
    """Saves checkpoints in the background, and restores the newest complete one.

        ckpt = gdsdata.AsyncCheckpointer("runs/a", keep_last=3, keep_every=1000)
        start = ckpt.restore({"model": model, "optim": optim, "data": ds})   # the step, or None
        ...
        handle = ckpt.save(step, {"model": model, "optim": optim, "data": ds})

    A checkpoint is a folder ``step-N`` with a file of each rank, which `torch.load` reads, and a
    manifest. The manifest is written when all files are on storage. Without it there is no
    checkpoint: what a crash has left is never restored, and the next save removes it. If a step is
    saved again, one rename replaces the old checkpoint. The newest checkpoint is the one that was
    saved last, also if its step is lower than those of others.

    With several ranks (`torch.distributed` is initialized), all of them construct it, save and
    restore together. Each rank saves its own state, of a DTensor its own part, and the same number
    of ranks restores them. With ``replicas``, one rank of a group saves for all of it, and there
    may be another number of replicas later. To change the number of shards, save with
    torch.distributed.checkpoint and `GDSStorageWriter`.

    Memory: at most ``staging_bytes`` of the host, in buffers of 32 MiB, kept until `close`. They
    are pinned if a state has tensors on a GPU. `restore` and `prepare` have as many made in the
    background as the state's bytes need; a save makes what is lacking. In addition: the engine's
    own memory (`EngineOptions`), GPU memory within ``device_staging_bytes``, and 4 parts of an
    upload (16 MiB each, for files up to 160 GB). With ``peers=1``, a node's ``memory_folder`` has
    two files for each rank: its own, and that of the rank whose partner it is. While they are
    replaced, it has four. A copy takes at most three quarters of what the node has left.

    It owns the threads that write, and the folder's lock. One thread at a time may call it.

    Args:
        folder: of the checkpoints, on storage that all ranks see. One `AsyncCheckpointer` at a time
            may save into it. On a file system without ``flock`` a lock file with a heartbeat
            ensures that, and a warning says so. If the holder was killed, the next one's first save
            waits a minute.
        keep_last: how many of the newest checkpoints are kept; each complete save removes older
            ones. Default 3.
        keep_every: checkpoints of steps that are its multiples are kept for ever. None: none are.
        staging_bytes: the most host memory for states that are being written: a number, or as
            "8GiB" (the default). A larger state passes through it piece by piece.
        device_staging_bytes: the most memory of each GPU for copies of states. `save` then waits
            neither for GPUs nor for storage. A state that does not fit into what is left of it is
            copied to the host first. 0: none.
        process_group: with all ranks; None: the default group.
        replicas: this rank and those that have the same state: a process group, or a `DeviceMesh`
            of one dimension (for HSDP, the one that replicates). ``"auto"``: the default group (for
            DDP). The first of them saves, and `restore` reads each byte once for all of them. None:
            each rank saves and restores a state of its own.
        timeout_s: how long ranks wait for one another, in seconds.
        upload: a URL below which complete checkpoints are uploaded, as ``s3://bucket/run``, by a
            thread behind everything else. None: they are not.
        upload_keep_last: how many of the newest uploaded checkpoints the store keeps, besides those
            of ``keep_every``.
        upload_gb_per_s: the most that all ranks together upload, in GB/s. None: no bound.
        peers: 1 keeps the newest state in memory too: each rank's file on its own node, and on that
            of a partner. They outlive the processes, so a restart restores from memory, also if one
            node is lost. If all ranks are on one node, it has each file once. With 0, the first
            save removes such copies.
        memory_folder: where copies are, in the memory of each node. None: "/dev/shm". If containers
            share it, and their checkpoint folders have the same path, each of them needs another
            one: a program removes copies that no process of another run holds.
        options: of the engine; None: the defaults.

    Raises:
        ValueError: an argument is out of range, ``peers`` or ``upload`` differs among the ranks,
            ``replicas`` is no division of all ranks, or ``peers`` and ``replicas`` are given.
        TypeError: an argument has another type.
        SaveAborted: ``peers``, ``upload`` or ``replicas`` is wrong on another rank.
        RankLost: a rank has ended, or does not come in ``timeout_s``.
        IoError: no thread can start.
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
        replicas: Any = None,
        timeout_s: float = 1800.0,
        upload: str | None = None,
        upload_keep_last: int = 10,
        upload_gb_per_s: float | None = None,
        peers: int = 0,
        memory_folder: str | os.PathLike[str] | None = None,
        options: EngineOptions | None = None,
    ) -> None:
        self.keep_last = whole_number("keep_last", keep_last, 1)
        self.keep_every = None if keep_every is None else whole_number("keep_every", keep_every, 1)
        kept = Kept(self.keep_last, self.keep_every)
        kept_there = kept._replace(last=whole_number("upload_keep_last", upload_keep_last, 1))
        self.options = options_of(options)
        self._folder = CheckpointFolder(checkpoint_folder(folder))
        pace = bytes_per_s("upload_gb_per_s", upload_gb_per_s)
        self._staging = Staging(size_in_bytes("staging_bytes", staging_bytes))
        on_devices = size_in_bytes("device_staging_bytes", device_staging_bytes) if device_staging_bytes else 0
        self._snapshots = Snapshots(on_devices)
        copies = MemoryFolder(DEFAULT_BASE if memory_folder is None else memory_folder, self._folder.path)
        self._ranks = Ranks(process_group, timeout_s)
        self._keeps_copies = same_on_all("peers", self._ranks.each(lambda: peers_of(peers))) > 0
        url = same_on_all("upload", self._ranks.each(lambda: upload_url(upload)))
        remote = None if url is None else RemoteFolder(url)
        self._checkpoints = Checkpoints(self._folder, remote)
        self._replicas = Replicas(self._ranks, replicas)
        self._preparation = Preparation(self._staging, is_needed=self._replicas.saves)
        self._end_preparing = weakref.finalize(self, end_preparing, self._staging, self._preparation, os.getpid())
        self._memory: CopiesInMemory = NoPeerMemory(copies)
        if self._keeps_copies:
            check_no_replicas(self._replicas.is_used)
            self._memory = PeerMemory(copies, self._ranks, timeout_s)
        self._restoring = Restoring(self._folder, self._checkpoints, self._memory, self._ranks, self._replicas)
        self._uploads = None
        if remote is not None:
            self._uploads = Uploads(self._folder, remote, kept_there, pace, self._ranks, self._replicas)
        self._counts = SaveCounts(self._folder.path, self._uploads)
        self._saver = Saver(self._folder, self._ranks, self._replicas, kept, self._uploads, self._memory, self.options)
        self._stagers = DaemonThreads(1, "gdsdata-stage")
        self._stagings: list[Future[None]] = []  # of snapshots, in progress
        self._under_way = SavesUnderWay()
        self._closed = False

    def save(self, step: int, state: Mapping[str, Any]) -> SaveHandle:
        """Copy a state and write it in the background.

        Everything in it may change when this returns.

        This waits for the copy to the host. If this save and earlier ones fill the staging memory,
        it also waits until storage has taken some of it. With ``device_staging_bytes`` it waits for
        neither, and nor does a rank whose replica saves.

        Args:
            step: of the training: a number of 0 or more, of at most 19 digits.
            state: by name: objects that have a ``state_dict``, or plain values as `torch.save`
                takes them. Lists, tuples and dicts of these may contain such objects too.

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
            self._under_way.raise_unseen()
            step = step_number(step)
            check_state(state, Mapping)
            whole = {name: state_of(one) for name, one in state.items()}
            described = Described(whole if self._replicas.is_used else {})
            job: SaveJob | ReplicaJob = ReplicaJob(step)
            if self._replicas.saves:
                states = {name: local_parts(one) for name, one in whole.items()}
                job = SaveJob(step, content_of_state(states), self._staging, self._snapshots, self._counts)
            if not job.is_copied:
                wait(self._stagings)  # their memory: this state would hold all of it until it is written
        except BaseException as error:  # the other ranks wait for this one, also if Ctrl-C came
            if not self._closed:
                failed = FailedJob(step, error)
                self._under_way.add_silent(self._saver.submit(failed, Described({}), Future(), Future()))
            raise
        uploaded, copied, ended = Future[str](), Outcome(), Future[str]()
        try:
            ended = self._saver.submit(job, described, uploaded, copied)
            self._under_way.add(ended)
            self._counts.begin(step, job.size_bytes, ended)
            if job.is_copied:
                self._stagings = [one for one in [*self._stagings, self._stagers.submit(job.stage)] if not one.done()]
            else:
                job.stage()
        except BaseException as error:  # the caller sees this error now
            job.abandon(error)
            self._under_way.forget(ended)
            raise
        seen = functools.partial(self._under_way.forget, ended)
        uploaded_there = uploaded if self._uploads else None
        handle = SaveHandle(step, job.size_bytes, ended, seen, uploaded_there, copied if self._keeps_copies else None)
        handle.stall_s = time.perf_counter() - started
        note_checkpoint_stall(handle.stall_s)
        self._counts.stalled(handle.stall_s)
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
        self._check_open()
        check_state(state, Mapping)
        self._preparation.begin(state)

    def restore(
        self,
        state: MutableMapping[str, Any],
        step: int | None = None,
        *,
        verify: bool = False,
        weights_only: bool = True,
        once: str | None = None,
    ) -> int | None:
        """Load the newest complete checkpoint, or that of ``step``, into ``state``.

        With ``upload``, that is the newest one of the folder and of the store. One that only the
        store has is read from there. Then the upload of what an earlier process has left begins.

        With ``peers``, a save that memory has too is read from there, and so is one that is newer
        than all others. If a copy cannot be read, a warning says so, and all ranks read what the
        folder or the store has.

        Waits for saves in progress. Afterwards memory for saves of ``state`` is made in the
        background, as by `prepare`, whether there was a checkpoint or not. Without a checkpoint,
        only models, optimizers and plain values are counted.

        An object that has a ``load_state_dict`` gets its part. In plain values, tensors are filled
        where they are, and other values are replaced in their dict; so are tensors that take no
        copy, as nested ones. Lists without tensors, empty dicts and None take all that was saved.
        Names that the checkpoint has and ``state`` does not have are ignored.

        With ``replicas``, one rank reads each piece, and passes it on (NCCL between GPUs, gloo on
        the CPU), as `gdsdata.load` does with ``group=``.

        Args:
            state: as for `save`.
            step: the step; None: the one that was saved last.
            verify: compare the checksum of every byte, as `load` does.
            weights_only: torch's rules for what a pickle may make (`torch.load`).
            once: with ``replicas``, how often a byte is read: for each ``"node"``, or once in the
                whole ``"job"``; see `gdsdata.load`.

        Returns:
            The step; None if there is no checkpoint. Nothing was changed then.

        Raises:
            FileNotFoundError: there is no checkpoint of that step, or a file of it is missing.
            CorruptData, IoError: the checkpoint is damaged, or cannot be read.
            PermissionError, IoError: the store cannot be listed, so it may have a newer one.
            ValueError: it has other names or shapes (then a part of ``state`` may have been
                changed), or another number of ranks saved it. A tensor of ``state`` is on the meta
                device, or ``step`` differs among the ranks.
            TypeError: an argument has another type.
            pickle.UnpicklingError: ``weights_only`` forbids something in the checkpoint.
            SaveAborted: another rank failed; its error is the cause. Replicas raise that itself.
            RankLost: a rank has ended, or was silent for too long.
            IoError, SaveAborted, ...: an earlier save failed in the background, and nobody has seen
                its error yet.
            Exception: whatever a ``load_state_dict`` of ``state`` raises.

        Stream semantics: the bytes are in place when this returns, for every stream.
        """

        def prepare() -> tuple[Held, int | None]:
            check_state(state, MutableMapping)
            asked = None if step is None else whole_number("step", step, 0)
            self.wait()
            self._memory.wait()
            return self._memory.held(), asked

        self._saver.reconnect()
        held, steps = zip(*self._ranks.each(prepare), strict=True)  # afterwards no rank has a save in progress
        same_on_all("step", steps)
        chosen = self._ranks.first(lambda: self._find(step, held))
        if chosen is None:
            self._begin_uploads()
            self._preparation.attempt({name: one for name, one in state.items() if is_counted(one)})
            return None
        # An error of a rank reaches the others before they read.
        targets = self._ranks.mine(lambda: {name: target_of(one) for name, one in state.items()})
        parts = {name: local_parts(target) for name, target in targets.items()}
        rules: Any = {"verify": verify, "weights_only": weights_only}

        def load(path: str, together: SharedReads | None) -> dict[str, Any]:
            return load_over(path, parts, plain=plain_values(state), **rules, options=self.options, together=together)

        with bar("restoring a checkpoint"):
            call = {"call": "AsyncCheckpointer.restore", **rules}
            found = self._restoring.read(chosen, load, lambda: self._replicas.reading(once, call, self.options))
        self._ranks.mine(lambda: load_states(state, targets, parts, found.content, found.place))
        self._preparation.attempt({name: one if is_counted(one) else targets[name] for name, one in state.items()})
        self._begin_uploads()
        return found.step

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, here and uploaded, the newest last."""
        return [one.manifest.step for one in self._checkpoints.complete()]

    @property
    def upload_status(self) -> UploadStatus | None:
        """The state of this process's uploads; None without ``upload``."""
        return None if self._uploads is None else self._uploads.status

    def wait(self) -> None:
        """Wait until every save has ended.

        Raises:
            IoError, SaveAborted, ...: as `save` does.
        """
        self._saver.check_not_forked()
        self._under_way.wait()

    def close(self, *, wait_for_uploads: bool = True) -> None:
        """Wait for every save and upload, and let others save into the folder. Raises as `wait`.

        With ``peers``, copies in progress are waited for too. They stay in memory: the next process
        restores from them.

        Memory that is being made is not waited for, but for the buffers in progress.

        May be called again. In a forked child it does nothing.

        Args:
            wait_for_uploads: False: the next process uploads what is left, and copies in progress
                are not waited for. An error that ends the ``with`` block does the same.
        """
        if self._saver.is_forked:
            return
        self._end_preparing()
        try:
            self.wait()
        finally:
            self._closed = True
            self._staging.close()
            self._saver.close(wait_for_uploads)
            self._memory.close(wait_for_uploads)
            self._stagers.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._under_way)} saves under way"
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
            self.close(wait_for_uploads=False)
        return None

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("this AsyncCheckpointer was closed; make a new one")

    def _begin_uploads(self) -> None:
        if not self._closed:
            self._under_way.add_silent(self._saver.begin_uploads())

    def _find(self, step: int | None, held: Sequence[Held]) -> Found | None:
        found = self._restoring.find(step, held)
        if self._uploads is not None:
            self._uploads.note(self._checkpoints.highest_sequence)
        return found
