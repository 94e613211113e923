"""A folder of checkpoints, of which each is there if and only if its manifest is.

    runs/a/lock                            held by the one who saves
    runs/a/step-100/rank-0-5f2c91d0.pt     what rank 0 saved; torch.load reads it
    runs/a/step-100/manifest.json          written last: names the files of every rank

A step that is saved anew gets files of other names, and the rename of its manifest replaces the one by the other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import socket
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from gdsdata.checkpoint.writing import TEMPORARY, Writing, make_folder, sync_folder
from gdsdata.errors import CorruptData, IoError
from gdsdata.options import EngineOptions

MANIFEST = "manifest.json"
_LOCK = "lock"
_FORMAT = 1
_STEP_FOLDER = re.compile(r"step-(0|[1-9][0-9]*)")
_OURS = re.compile(rf"rank-[0-9]+-[0-9a-f]{{8}}\.pt({TEMPORARY})?|manifest\.json{TEMPORARY}")


@dataclass(frozen=True)
class SavedFile:
    """What one rank saved.

    Attributes:
        name: in the step's folder.
        size_bytes: of the file.
    """

    name: str
    size_bytes: int


@dataclass(frozen=True)
class Manifest:
    """A checkpoint that is complete.

    Attributes:
        step: that the user gave it.
        sequence: how many were saved into the folder before: the newest has the highest.
        files: of each rank, in order.
    """

    step: int
    sequence: int
    files: tuple[SavedFile, ...]


# A forked child has a share in each lock, and would keep it when its parent lets go, or has crashed.
_locked: weakref.WeakSet[Folder] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [folder.drop_lock() for folder in list(_locked)])


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


class Folder:
    """Where checkpoints lie. Reading it needs no lock; whoever writes takes it first."""

    def __init__(self, path: str, options: EngineOptions) -> None:
        self.path = path
        self._options = options
        self._lock: int | None = None

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # then the modules that this needs are gone, and the system unlocks
            self.unlock()

    def file(self, step: int, name: str) -> str:
        return os.path.join(self._folder_of(step), name)

    def complete(self) -> list[Manifest]:
        """All that are there, the newest last.

        Raises:
            CorruptData: a manifest is damaged.
        """
        found = (self._manifest_of(step) for step in self._steps())
        return sorted((one for one in found if one is not None), key=lambda one: one.sequence)

    def check(self, manifest: Manifest, file: SavedFile) -> str:
        """The path of a file of a checkpoint.

        Raises:
            CorruptData: it is not as long as the manifest says.
            FileNotFoundError: it is gone.
        """
        path = self.file(manifest.step, file.name)
        remedy = f"Restore another step, and remove '{self._folder_of(manifest.step)}'"
        try:
            size_bytes = os.stat(path).st_size
        except FileNotFoundError as error:
            message = f"there is no file '{path}', which the manifest beside it names. {remedy}"
            raise FileNotFoundError(errno.ENOENT, message) from error
        if size_bytes != file.size_bytes:
            message = f"'{path}' has {size_bytes} bytes, and its manifest says {file.size_bytes}. {remedy}"
            raise CorruptData(message, path, 0, size_bytes)
        return path

    def lock(self) -> None:
        """Makes the folder and becomes the one who saves into it, until `unlock`, or until this process ends.

        Raises:
            IoError: another one is.
        """
        if self._lock is not None:
            return
        make_folder(self.path)
        path = os.path.join(self.path, _LOCK)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            who = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            remedy = "end it, or use another folder"
            if who == _this_process():
                who = "another AsyncCheckpointer of this process"
                remedy = "close() that one first, or use another folder"
            raise IoError(error.errno, f"{who} saves checkpoints to '{self.path}' now: {remedy}", path) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{_this_process()}\n".encode(), 0)
        self._lock = descriptor
        _locked.add(self)

    def unlock(self) -> None:
        """Also where a child has a share in it, which it has until it has been told of its fork, or runs a program."""
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        self.drop_lock()

    def drop_lock(self) -> None:
        """This process's share in it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            _locked.discard(self)

    def tidy(self) -> None:
        """Removes what saves that did not come to their end have left. With the lock, and with no save under way."""
        for step in self._steps():
            manifest = self._manifest_of(step)
            self._remove(step, kept=() if manifest is None else manifest.files)

    def begin(self, step: int) -> str:
        """Makes the folder of a checkpoint; returns what tells its files from those of another one of that step."""
        make_folder(self._folder_of(step))
        return secrets.token_hex(4)

    def commit(self, step: int, files: Sequence[SavedFile]) -> None:
        """The checkpoint is there when this returns, and was not before; its files are on storage already."""
        newest = self.complete()[-1:]
        sequence = newest[0].sequence + 1 if newest else 0
        content = json.dumps({"format": _FORMAT, **asdict(Manifest(step, sequence, tuple(files)))}, indent=1).encode()
        with Writing(self.file(step, MANIFEST), len(content), self._options) as writing:
            writing.write_bytes([(0, content)])
            writing.commit()

    def retain(self, keep_last: int, keep_every: int | None) -> None:
        """Removes all but the newest ``keep_last`` and those whose step is a multiple of ``keep_every``; of those that
        stay, what a save of the same step has replaced.
        """
        complete = self.complete()
        for manifest in complete[-keep_last:]:
            self._remove(manifest.step, kept=manifest.files)
        for manifest in complete[:-keep_last]:
            if keep_every is None or manifest.step % keep_every != 0:
                os.unlink(self.file(manifest.step, MANIFEST))
                sync_folder(self._folder_of(manifest.step))  # no manifest, then no files: never the other way round
                self._remove(manifest.step, kept=())

    def _folder_of(self, step: int) -> str:
        return os.path.join(self.path, f"step-{step}")

    def _steps(self) -> list[int]:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return [int(found[1]) for found in map(_STEP_FOLDER.fullmatch, names) if found]

    def _manifest_of(self, step: int) -> Manifest | None:
        path = self.file(step, MANIFEST)
        try:
            with open(path, "rb") as file:
                said = json.load(file)
            if said["format"] != _FORMAT:
                raise ValueError(f"it is of format {said['format']!r}, and this version knows {_FORMAT}")
            files = tuple(SavedFile(str(one["name"]), int(one["size_bytes"])) for one in said["files"])
            if said["step"] != step or not all(_OURS.fullmatch(one.name) for one in files):
                raise ValueError("it is of another step, or names files that are none of a checkpoint's")
            return Manifest(step, int(said["sequence"]), files)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, KeyError, TypeError) as error:
            message = f"'{path}' is no manifest: {error!r}; remove its folder to go on without it"
            raise CorruptData(message, path) from error

    def _remove(self, step: int, kept: Sequence[SavedFile]) -> None:
        """What is ours in a step's folder but its manifest and ``kept``; then the folder, where nothing is left."""
        names = {file.name for file in kept}
        folder = self._folder_of(step)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for name in os.listdir(folder):
                if name not in names and _OURS.fullmatch(name):
                    os.unlink(os.path.join(folder, name))
            if not names:
                with contextlib.suppress(OSError):  # somebody has put something there
                    os.rmdir(folder)
