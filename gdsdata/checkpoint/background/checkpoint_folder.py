"""A folder of checkpoints. A checkpoint exists if and only if its manifest does.

    runs/a/step-100/rank-0-5f2c91d0.pt     what rank 0 saved; torch.load reads it
    runs/a/step-100/manifest.json          written last: names the files of every rank

If a step is saved again, its new files have other names, and the rename of the new manifest
replaces one checkpoint by the other.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from gdsdata.checkpoint.background.folder_lock import FolderLock
from gdsdata.checkpoint.file_writer import TEMPORARY, FileWriter, make_folder, sync_folder
from gdsdata.errors import CorruptData
from gdsdata.io.options import EngineOptions

MANIFEST = "manifest.json"
_FORMAT = 1
_STEP_FOLDER = re.compile(r"step-(0|[1-9][0-9]*)")
_OURS = re.compile(rf"rank-[0-9]+-[0-9a-f]{{8}}\.pt({TEMPORARY})?|manifest\.json{TEMPORARY}")


@dataclass(frozen=True)
class SavedFile:
    """The file that one rank saved.

    Attributes:
        name: in the step's folder.
        size_bytes: its size.
    """

    name: str
    size_bytes: int


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint.

    Attributes:
        step: the step.
        sequence: how many checkpoints were committed in the folder before this one; the newest has
            the highest.
        files: those of the ranks, in order.
    """

    step: int
    sequence: int
    files: tuple[SavedFile, ...]


class CheckpointFolder:
    """A folder of checkpoints, to be read.

    Reading needs no lock; writing does: see `LockedFolder`.

    Args:
        path: of the folder.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def folder_of(self, step: int) -> str:
        """Return the path of a step's folder."""
        return os.path.join(self.path, f"step-{step}")

    def file(self, step: int, name: str) -> str:
        """Return the path of a file in a step's folder."""
        return os.path.join(self.folder_of(step), name)

    def complete(self) -> list[Manifest]:
        """Return the complete checkpoints, the newest last.

        Raises:
            CorruptData: a manifest is damaged.
        """
        found = map(self.manifest_of, self.steps())
        return sorted((one for one in found if one is not None), key=lambda one: one.sequence)

    def check(self, manifest: Manifest, file: SavedFile) -> str:
        """Check that a file of a checkpoint exists with its size, and return its path.

        Raises:
            FileNotFoundError: the file does not exist.
            CorruptData: it has another size than the manifest says.
        """
        path = self.file(manifest.step, file.name)
        remedy = f"Restore another step, and remove '{self.folder_of(manifest.step)}'"
        try:
            size_bytes = os.stat(path).st_size
        except FileNotFoundError as error:
            message = f"there is no file '{path}', which the manifest beside it names. {remedy}"
            raise FileNotFoundError(errno.ENOENT, message) from error
        if size_bytes != file.size_bytes:
            message = f"'{path}' has {size_bytes} bytes, and its manifest says {file.size_bytes}. {remedy}"
            raise CorruptData(message, path, 0, size_bytes)
        return path

    def steps(self) -> list[int]:
        """Return the steps that have a folder, complete or not."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return [int(found[1]) for found in map(_STEP_FOLDER.fullmatch, names) if found]

    def manifest_of(self, step: int) -> Manifest | None:
        """Return the manifest of a step; None if the step has no complete checkpoint.

        Raises:
            CorruptData: the manifest is damaged.
        """
        path = self.file(step, MANIFEST)
        try:
            with open(path, "rb") as file:
                content = json.load(file)
            if content["format"] != _FORMAT:
                raise ValueError(f"it is of format {content['format']!r}, and this version knows {_FORMAT}")
            files = tuple(SavedFile(str(one["name"]), int(one["size_bytes"])) for one in content["files"])
            if content["step"] != step or not all(_OURS.fullmatch(one.name) for one in files):
                raise ValueError("it is of another step, or names files that are none of a checkpoint's")
            return Manifest(step, int(content["sequence"]), files)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, KeyError, TypeError) as error:
            message = f"'{path}' is no manifest: {error!r}; remove its folder to go on without it"
            raise CorruptData(message, path) from error


class LockedFolder:
    """The right to write into a folder of checkpoints.

    It is held from construction until `release` or the process's end.

    Construction removes what incomplete saves have left. One thread at a time may call it.

    Args:
        folder: the folder; it is made if it does not exist.
        options: of the engine.

    Raises:
        IoError: another process or object writes into the folder, or the folder cannot be locked.
        CorruptData: a manifest is damaged.
    """

    def __init__(self, folder: CheckpointFolder, options: EngineOptions) -> None:
        self._folder, self._options = folder, options
        self._lock = FolderLock(folder.path)
        # Remembered because reading thousands of manifests for each save takes long. Nobody else
        # adds a checkpoint.
        self._complete: list[Manifest] | None = None
        try:
            self.tidy()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let others write into the folder. May be called again."""
        self._lock.release()

    def tidy(self) -> None:
        """Remove what incomplete saves have left. No save may be in progress.

        Raises:
            IoError: another process has taken the lock over.
            CorruptData: a manifest is damaged.
        """
        self._lock.check()
        self._complete = None
        for step in self._folder.steps():
            manifest = self._folder.manifest_of(step)
            self._remove(step, kept=() if manifest is None else manifest.files)

    def begin(self, step: int) -> str:
        """Make the folder of a step.

        Returns:
            A part for the names of its files that distinguishes them from those of an earlier save
            of the step.

        Raises:
            IoError: another process has taken the lock over.
        """
        self._lock.check()
        make_folder(self._folder.folder_of(step))
        return secrets.token_hex(4)

    def commit(self, step: int, files: Sequence[SavedFile]) -> None:
        """Write a checkpoint's manifest, whose files are on storage already.

        From then on the checkpoint exists.

        Raises:
            IoError: another process has taken the lock over, or the manifest cannot be written.
        """
        complete = self._known()
        sequence = complete[-1].sequence + 1 if complete else 0
        manifest = Manifest(step, sequence, tuple(files))
        content = json.dumps({"format": _FORMAT, **asdict(manifest)}, indent=1).encode()
        self._lock.check()
        with FileWriter(self._folder.file(step, MANIFEST), len(content), self._options) as writer:
            writer.write_bytes([(0, content)])
            writer.commit()
        self._complete = [*(one for one in complete if one.step != step), manifest]

    def retain(self, keep_last: int, keep_every: int | None) -> None:
        """Remove old checkpoints.

        From those that stay, remove the files that a later save of the same step has replaced.

        Args:
            keep_last: how many of the newest checkpoints stay.
            keep_every: those of steps that are multiples of it stay too.
        """
        older = list(self._known())
        newest: list[Manifest] = []
        while older and len(newest) < keep_last:
            manifest = older.pop()
            if os.path.exists(self._folder.file(manifest.step, MANIFEST)):  # else somebody has removed it
                newest.append(manifest)
        for manifest in newest:
            self._remove(manifest.step, kept=manifest.files)
        kept = []
        for manifest in older:
            if keep_every is not None and manifest.step % keep_every == 0:
                kept.append(manifest)
                continue
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._folder.file(manifest.step, MANIFEST))
                # The manifest must be gone before its files are: a manifest without files would be
                # a broken checkpoint.
                sync_folder(self._folder.folder_of(manifest.step))
            self._remove(manifest.step, kept=())
        self._complete = kept + newest[::-1]

    def _known(self) -> list[Manifest]:
        if self._complete is None:
            self._complete = self._folder.complete()
        return self._complete

    def _remove(self, step: int, kept: Sequence[SavedFile]) -> None:
        """Remove our files from a step's folder, but for its manifest and ``kept``.

        Then the folder, if it is empty.
        """
        names = {file.name for file in kept}
        folder = self._folder.folder_of(step)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for name in os.listdir(folder):
                if name not in names and _OURS.fullmatch(name):
                    os.unlink(os.path.join(folder, name))
            if not names:
                with contextlib.suppress(OSError):  # somebody has put something there
                    os.rmdir(folder)
