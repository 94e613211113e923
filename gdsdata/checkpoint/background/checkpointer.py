"""`AsyncCheckpointer`: checkpoints that are written while training goes on."""

from __future__ import annotations

import collections
import contextlib
import operator
import os
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from gdsdata.checkpoint.api import load_over
from gdsdata.checkpoint.background.commit import Folder, Manifest, SavedFile
from gdsdata.checkpoint.background.staging import Snapshots, Staged, Staging, pieces
from gdsdata.checkpoint.dtensors import has_dtensors, local_parts, with_dtensors
from gdsdata.checkpoint.pause import collector_paused
from gdsdata.checkpoint.reading import bytes_of_storage
from gdsdata.checkpoint.tensor_kinds import check_has_values
from gdsdata.checkpoint.torch_zip.archive_writer import Layout
from gdsdata.checkpoint.torch_zip.pickling import pickle_with_storages
from gdsdata.checkpoint.writing import Writing, crc32_of_all
from gdsdata.errors import CorruptData, EngineClosed, SaveAborted
from gdsdata.io import engine
from gdsdata.io.options import EngineOptions
from gdsdata.observe.report import note_checkpoint_stall
from gdsdata.torch_private import init_optimizer_state

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class SaveHandle:
    """A save that is under way, or has ended.

    Attributes:
        step: of it.
        bytes: that this rank saves.
        stall_s: how long `AsyncCheckpointer.save` kept its caller.
    """

    def __init__(self, step: int, size_bytes: int, ended: Future[str], seen: Callable[[], None]) -> None:
        self.step = step
        self.bytes = size_bytes
        self.stall_s = 0.0
        self._ended, self._seen = ended, seen

    def __repr__(self) -> str:
        state = "under way"
        if self._ended.done():
            error = None if self._ended.cancelled() else self._ended.exception()
            state = f"failed: {error!r}" if error else "complete"
        return f"SaveHandle(step={self.step}, {self.bytes} bytes, {state})"

    def done(self) -> bool:
        return self._ended.done()

    def result(self, timeout_s: float | None = None) -> str:
        """The checkpoint's folder, once it is complete and on storage.

        Raises:
            TimeoutError: it is not yet, after ``timeout_s``.
            IoError, SaveAborted: why it never will be; see `AsyncCheckpointer.save`.
        """
        try:
            folder = self._ended.result(timeout_s)
        finally:
            if self._ended.done():
                self._seen()
        return folder


class AsyncCheckpointer:
    """Saves checkpoints into a folder in the background, and restores the newest complete one.

        ckpt = gdsdata.AsyncCheckpointer("runs/a", keep_last=3, keep_every=1000)
        start = ckpt.restore({"model": model, "optim": optim, "data": ds})   # the step, or None
        ...
        handle = ckpt.save(step, {"model": model, "optim": optim, "data": ds})

    A checkpoint is a folder ``step-N`` with a file of each rank, which `torch.load` reads, and a manifest, which is
    written when all of them are on storage: without it there is no checkpoint, and what a crash has left is neither
    restored nor kept. Saving a step anew replaces it by one rename.

    On several ranks (a `torch.distributed` that is initialised) all of them make one, save and restore together; each
    saves its own state, of a DTensor its own part, and the same number of ranks restores them. To change that number,
    save with torch.distributed.checkpoint and `GDSStorageWriter`.

    Memory: ``staging_bytes`` at most, pinned where CUDA is used, made when the first saves need it and kept for the
    next ones, and the engine's own (`EngineOptions`); and what ``device_staging_bytes`` allows, of torch's on GPUs.

    Args:
        folder: of the checkpoints, on storage that all ranks see. Only one may save into it at a time. On a file system
            without ``flock`` a lock file with a heartbeat ensures that, with a warning; if its holder was killed, the
            next one's first save waits a minute.
        keep_last: so many of the newest are kept; a save that is complete removes older ones.
        keep_every: those of steps that are multiples of it are kept as well, for ever.
        staging_bytes: most memory for states on their way: a number, or as "8GiB". A larger state flows through.
        device_staging_bytes: most memory of each GPU for copies of states: `save` then waits for nothing that GPUs or
            storage do. A state that does not fit into what is left of it is copied to the host's memory first.
        process_group: of gloo, with all ranks; None: one is made, by all ranks together.
        timeout_s: for which ranks wait for one another.
        options: of the engine.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument is of another type.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_last: int = 3,
        keep_every: int | None = None,
        staging_bytes: int | str = "8GiB",
        device_staging_bytes: int | str = 0,
        process_group: Any = None,
        timeout_s: float = 1800.0,
        options: EngineOptions | None = None,
    ) -> None:
        self.keep_last = _whole_number("keep_last", keep_last, 1)
        self.keep_every = None if keep_every is None else _whole_number("keep_every", keep_every, 1)
        self.options = options or EngineOptions()
        self._folder = Folder(os.fsdecode(folder), self.options)
        self._staging = Staging(_bytes_of("staging_bytes", staging_bytes))
        on_devices = _bytes_of("device_staging_bytes", device_staging_bytes) if device_staging_bytes else 0
        self._snapshots = Snapshots(on_devices)
        self._ranks = _Ranks(process_group, timeout_s)
        self._saves = ThreadPoolExecutor(1, thread_name_prefix="gdsdata-save")  # waited for before the program ends
        self._writers = _Threads(2, "gdsdata-write")  # pieces at a time, so that storage does not wait for the next one
        self._stagers = _Threads(1, "gdsdata-stage")
        self._stagings: list[Future[None]] = []  # of snapshots, under way
        self._under_way: list[Future[str]] = []  # saves, and those that only take part
        self._unseen: list[Future[str]] = []  # of saves whose error nobody has been told yet
        self._locked = self._closed = False

    def save(self, step: int, state: Mapping[str, Any]) -> SaveHandle:
        """Take a copy of ``state`` and write it in the background; everything in it may change when this returns.

        On a GPU the copy comes behind what the current stream has been given before. This waits for the copy to the
        host, and, where earlier saves or this one fill the staging memory, for storage to take some of it; with
        ``device_staging_bytes`` for neither, and what the current stream is given next comes behind the copy.

        Args:
            step: of the training: a number of 0 or more.
            state: by name: what has a ``state_dict``, or plain objects as `torch.save` takes them.

        Raises:
            ValueError, TypeError: an argument is not what it should be, or a tensor is on the meta device.
            pickle.PicklingError, TypeError, AttributeError: something in the state cannot be pickled; the message has
                its name.
            IoError, SaveAborted, ...: of an earlier save in the background, if nobody has been told yet. This one has
                not begun then.
            EngineClosed: after `close`.
        """
        started = time.perf_counter()
        try:
            self._check()
            step = _whole_number("step", step, 0)
            _check_state(state, Mapping)
            states = {name: local_parts(_state_of(one)) for name, one in state.items()}
            check_has_values(states)
            job = _Job(step, states, self._staging, self._snapshots)
        except Exception as error:
            if not self._closed:
                self._submit(_NoJob(step, error))  # the other ranks wait for this one
            raise
        if not job.is_copied:
            wait(self._stagings)  # which need memory that this one would keep until they have been written
        ended = self._submit(job)
        self._unseen.append(ended)
        handle = SaveHandle(step, job.size_bytes, ended, lambda: self._forget(ended))
        try:
            if job.is_copied:
                self._stagings = [one for one in self._stagings if not one.done()]
                self._stagings.append(self._stagers.submit(job.stage))
            else:
                job.stage()
        except BaseException:  # which is told now
            self._forget(ended)
            raise
        handle.stall_s = time.perf_counter() - started
        note_checkpoint_stall(handle.stall_s)
        return handle

    def restore(
        self,
        state: MutableMapping[str, Any],
        step: int | None = None,
        *,
        verify: bool = False,
        weights_only: bool = True,
    ) -> int | None:
        """Put the newest complete checkpoint, or that of ``step``, into ``state``; saves under way are waited for.

        What has a ``load_state_dict`` is given its part; of plain objects, tensors are filled where they are, and other
        values replaced in their dict. Among those are tensors that take no copy, as nested ones. Names that the
        checkpoint has beyond those of ``state`` are left alone.

        Args:
            state: as for `save`.
            step: None: the one that was saved last.
            verify: compare checksums on the way in.
            weights_only: torch's rules for what a pickle may make (`torch.load`).

        Returns:
            The step; None where there is no checkpoint at all, and then nothing was changed.

        Raises:
            FileNotFoundError: there is none of that step, or a file of it is gone.
            CorruptData, IoError: it is damaged, or cannot be read.
            ValueError: it has other names or shapes (``state`` may be changed in part then), was saved by another
                number of ranks, or ``state`` has tensors on the meta device.
            TypeError: an argument is of another type.
            pickle.UnpicklingError: something in it is not allowed with ``weights_only``.
            SaveAborted: another rank failed; its error is the cause.
            IoError, SaveAborted, ...: of an earlier save in the background, if nobody has been told yet.
            Whatever a ``load_state_dict`` of ``state`` raises besides.
        """

        def prepare() -> None:
            _check_state(state, MutableMapping)
            if step is not None:
                _whole_number("step", step, 0)
            self.wait()

        self._ranks.each(prepare)  # no save is under way on any of them
        chosen = self._ranks.agreed(lambda: self._find(step))
        if chosen is None:
            return None
        targets = {name: _target_of(one) for name, one in state.items()}
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
                state[name] = _put(one, whole[name])
        return chosen.step

    def _load_state(self, name: str, one: Any, found: Any, step: int) -> None:
        try:
            one.load_state_dict(found)
        except RuntimeError as error:
            if not isinstance(one, torch.nn.Module) or not str(error).startswith("Error(s) in loading state_dict"):
                raise
            message = f"step {step} in '{self._folder.path}' does not fit {name!r}: {error}"
            raise ValueError(message) from error

    def steps(self) -> list[int]:
        """Of the complete checkpoints, the newest last."""
        return [manifest.step for manifest in self._folder.complete()]

    def wait(self) -> None:
        """Until every save has ended.

        Raises:
            IoError, SaveAborted, ...: as `save` does.
        """
        wait(list(self._under_way))
        self._under_way.clear()
        self._tell()

    def close(self) -> None:
        """Wait for every save, and let others save into the folder. Raises as `wait` does; calling it again is fine."""
        try:
            self.wait()
        finally:
            self._closed = True
            self._saves.shutdown()
            self._writers.close()
            self._stagers.close()
            self._folder.unlock()

    def __repr__(self) -> str:
        under_way = sum(not one.done() for one in self._under_way)
        state = "closed" if self._closed else f"{under_way} saves under way"
        kept = f"keep_last={self.keep_last}, keep_every={self.keep_every}"
        rank = f"rank {self._ranks.rank} of {self._ranks.count}"
        return f"AsyncCheckpointer({self._folder.path!r}, {kept}, {rank}, {state})"

    def __enter__(self) -> AsyncCheckpointer:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            return self.close()
        with contextlib.suppress(Exception):  # the error that ends the block is the one to be told
            self.close()

    def _check(self) -> None:
        if self._closed:
            raise EngineClosed("this AsyncCheckpointer was closed; make a new one")
        self._under_way = [one for one in self._under_way if not one.done()]
        self._tell()

    def _submit(self, job: _Job | _NoJob) -> Future[str]:
        ended = self._saves.submit(self._save, job)
        self._under_way.append(ended)
        return ended

    def _tell(self) -> None:
        """Raises the first error that nobody has been told, of saves that have ended."""
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
        there = ", ".join(str(manifest.step) for manifest in complete) or "none"
        raise FileNotFoundError(f"'{self._folder.path}' has no complete checkpoint of step {step}; there are: {there}")

    def _save(self, job: _Job | _NoJob) -> str:
        """In the background, on every rank."""
        try:
            number, step = self._ranks.agreed(lambda: (self._begin(job), job.step))
            files = self._ranks.each(lambda: self._write(job, number, step))
            self._ranks.agreed(lambda: self._commit(step, files))
            return os.path.dirname(self._folder.file(job.step, ""))
        except BaseException:
            if self._locked:
                with contextlib.suppress(Exception):  # else the next one who saves does it
                    self._folder.tidy()
            raise
        finally:
            job.give_up()

    def _begin(self, job: _Job | _NoJob) -> str:
        job.check()
        if not self._locked:
            self._folder.lock()
            self._folder.tidy()
            self._locked = True
        return self._folder.begin(job.step)

    def _write(self, job: _Job | _NoJob, number: str, step: int) -> SavedFile:
        if job.step != step:
            raise SaveAborted(f"the ranks save different steps: this one {job.step}, and the first one {step}")
        name = f"rank-{self._ranks.rank}-{number}.pt"
        return SavedFile(name, job.write(self._folder.file(job.step, name), self._writers, self.options))

    def _commit(self, step: int, files: list[SavedFile]) -> None:
        self._folder.commit(step, files)
        try:
            self._folder.retain(self.keep_last, self.keep_every)
        except (OSError, CorruptData) as error:  # this checkpoint is there all the same
            engine.warn_once(f"older checkpoints in '{self._folder.path}' could not be removed: {error}")


class _Job:
    """A state on its way from the caller's thread to the one that writes it.

    Attributes:
        is_copied: the caller may go on before it has been staged.
    """

    @collector_paused()
    def __init__(self, step: int, state: dict[str, Any], staging: Staging, snapshots: Snapshots) -> None:
        self.step = step
        pickled, storages = pickle_with_storages(state)
        self._storages = [bytes_of_storage(storage) for storage in storages]
        self.size_bytes = sum(one.nbytes for one in self._storages)
        self.layout = Layout(pickled, [one.nbytes for one in self._storages])
        self._staging = staging
        self._staged: queue.SimpleQueue[Staged | BaseException | None] = queue.SimpleQueue()
        self._off = threading.Event()  # nobody will write what is staged
        # Writing begins when the state is staged, or has no room: two threads that ask for the GIL hold each other up.
        self._begun = threading.Event()
        self._snapshot = snapshots.take(self._storages)
        self.is_copied = self._snapshot is not None
        if self._snapshot is not None:
            self._storages = self._snapshot.storages

    def stage(self) -> None:
        """Copies the state to the host, as fast as there is room; ends early where its save has failed."""
        copied: dict[torch.device, torch.cuda.Event] = {}  # behind which all that was asked of each GPU is there
        try:
            try:
                with self._snapshot.streams() if self._snapshot else contextlib.nullcontext():
                    self._stage_pieces(copied)
            finally:
                for event in copied.values():
                    event.synchronize()
        except BaseException as error:
            self._staged.put(error)
            raise
        finally:
            self._storages = []
            if self._snapshot:
                self._snapshot.release()
            if self._off.is_set():
                self.give_up()
            self._staged.put(None)  # the last of all: whoever writes waits for it
            self._begun.set()

    def _stage_pieces(self, copied: dict[torch.device, torch.cuda.Event]) -> None:
        sizes = [one.nbytes for one in self._storages]
        for piece in pieces(self.layout.offsets, sizes, self._staging.piece_bytes):
            memory = self._staging.take(self._off.is_set, self._begun.set)
            if memory is None:
                return
            staged = Staged(piece, memory)
            try:
                staged.copy_from(self._storages)
            finally:
                copied |= staged.copied
                self._staged.put(staged)

    def check(self) -> None:
        """It can begin."""

    def write(self, path: str, writers: _Threads, options: EngineOptions) -> int:
        """The file, on storage; returns its bytes.

        Raises:
            IoError: it cannot be written, or space is lacking.
        """
        found: list[list[tuple[int, int, int]]] = [[] for _ in self.layout.offsets]  # begin, CRC-32, length
        with Writing(path, self.layout.end, options) as writing:
            written = []
            try:
                for staged in self._pieces():
                    written.append(writers.submit(lambda staged=staged: self._write_piece(writing, staged)))
            finally:
                wait(written)
            for one in written:
                for part, checksum in one.result():
                    found[part.storage].append((part.begin, checksum, part.size_bytes))
            checksums = [crc32_of_all(*(part[1:] for part in sorted(parts))) for parts in found]
            writing.write_bytes(self.layout.frame(checksums))
            writing.commit()
        return self.layout.end

    def give_up(self) -> None:
        """What is staged and not written goes back; so does what comes."""
        self._off.set()
        with contextlib.suppress(queue.Empty):
            while True:
                staged = self._staged.get_nowait()
                if isinstance(staged, Staged):
                    staged.wait()
                    self._staging.give_back(staged.memory)

    def _pieces(self) -> Iterator[Staged]:
        self._begun.wait()
        while (staged := self._staged.get()) is not None:
            if isinstance(staged, BaseException):
                raise RuntimeError(f"the state could not be copied: {staged!r}") from staged
            if self._off.is_set():
                staged.wait()
                self._staging.give_back(staged.memory)
            else:
                yield staged

    def _write_piece(self, writing: Writing, staged: Staged) -> list[tuple[Any, int]]:
        try:
            staged.wait()
            parts = staged.piece.parts
            if self._off.is_set():
                return []
            checksums = writing.write([(part.file_offset, staged.bytes_of(part)) for part in parts])
            return list(zip(parts, checksums, strict=True))
        except BaseException:
            self._off.set()
            raise
        finally:
            self._staging.give_back(staged.memory)


class _Threads:
    """They call what they are given, to the program's very end: an executor takes nothing any more by then."""

    def __init__(self, count: int, name: str) -> None:
        calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        for _ in range(count):
            threading.Thread(target=_make_calls, args=(calls,), name=name, daemon=True).start()
        self._calls = calls
        self.close = weakref.finalize(self, lambda: [calls.put(None) for _ in range(count)])

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        ended: Future[Any] = Future()
        self._calls.put((ended, call))
        return ended


def _make_calls(calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (one := calls.get()) is not None:
        ended, call = one
        try:
            ended.set_result(call())
        except BaseException as error:
            ended.set_exception(error)
        del one, ended, call


class _NoJob:
    """A save that cannot begin on this rank: it takes part for the others, who are told why."""

    def __init__(self, step: int, error: Exception) -> None:
        self.step, self._error = step, error

    def check(self) -> None:
        raise self._error

    def write(self, path: str, writers: _Threads, options: EngineOptions) -> int:
        raise self._error

    def give_up(self) -> None:
        pass


# ------------------------------------------------------------------------------------------------ ranks


class _Ranks:
    """Those who save together: one, or all of a process group."""

    def __init__(self, group: Any, timeout_s: float) -> None:
        distributed = torch.distributed
        together = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        if together and group is None:
            group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._group = group if together else None
        self.rank = distributed.get_rank(group) if together else 0
        self.count = distributed.get_world_size(group) if together else 1

    def agreed(self, call: Callable[[], Any]) -> Any:
        """What ``call`` returns on the first rank, on all of them.

        Raises:
            What it raises, there; and on other ranks `SaveAborted` with it as the cause.
        """
        if self._group is None:
            return call()
        value, error = _attempt(call) if self.rank == 0 else (None, None)
        (told,) = self._together(lambda: _broadcast((value, error), self._group))
        if error is not None:
            raise error
        _raise_of_others({0: told[1]})
        return told[0]

    def mine(self, call: Callable[[], Any]) -> Any:
        """What ``call`` returns here, once it has not failed anywhere. Raises as `each` does."""
        value = None

        def keep() -> None:
            nonlocal value
            value = call()

        self.each(keep)
        return value

    def each(self, call: Callable[[], Any]) -> list[Any]:
        """What ``call`` returns on each rank, on all of them.

        Raises:
            What it raises, there; `SaveAborted` where it failed on another rank.
        """
        value, error = _attempt(call)
        told = [(value, error)]
        if self._group is not None:
            told = self._together(lambda: _gathered((value, error), self._group, self.count))
        if error is not None:
            raise error
        _raise_of_others({rank: one[1] for rank, one in enumerate(told)})
        return [one[0] for one in told]

    def _together(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # gloo's own kinds
            raise SaveAborted(f"a rank is gone, or did not answer in time: {error}") from error


def _attempt(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error


def _raise_of_others(errors: dict[int, Exception | None]) -> None:
    for rank, error in errors.items():
        if error is not None:
            raise SaveAborted(f"rank {rank} failed: {type(error).__name__}: {error}", rank) from error


def _broadcast(value: Any, group: Any) -> list[Any]:
    values = [value]
    source = torch.distributed.get_global_rank(group, 0)
    torch.distributed.broadcast_object_list(values, src=source, group=group, device=torch.device("cpu"))
    return values


def _gathered(value: Any, group: Any, count: int) -> list[Any]:
    values = [None] * count
    torch.distributed.all_gather_object(values, value, group=group)
    return values


# ------------------------------------------------------------------------------------------------ states


def _bytes_of(name: str, size: int | str) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    if found is None or found[2].upper() not in _UNITS or float(found[1]) <= 0:
        raise ValueError(f"{name}={size!r} must be a number of bytes, or have a unit as in '8GiB' or '500MB'")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _whole_number(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r:.100} is of type {type(value).__name__}: give a whole number") from None
    if number < least:
        raise ValueError(f"{name}={number} must be {least} or more")
    return number


def _check_state(state: Any, kind: type) -> None:
    if not isinstance(state, kind):
        raise TypeError(
            f"state is of type {type(state).__name__}: give a dict, with a name for each thing to save, as "
            '{"model": model, "optim": optim}'
        )


def _state_of(one: Any) -> Any:
    return one.state_dict() if hasattr(one, "state_dict") else one


def _target_of(one: Any) -> Any:
    """What a checkpoint is read into: its tensors are what ``one`` uses, where it gives them away."""
    if isinstance(one, torch.optim.Optimizer) and not one.state and has_dtensors(one.param_groups):
        init_optimizer_state(one)  # made of DTensors as well, by itself
    return _state_of(one)


def _put(target: Any, found: Any) -> Any:
    """``target`` with the values of ``found`` (its tensors have theirs), or ``found`` where it is nothing to change."""
    if type(target) in (dict, collections.OrderedDict, list):
        for key, value in list(target.items() if isinstance(target, dict) else enumerate(target)):
            target[key] = _put(value, found[key])
        return target
    return found
