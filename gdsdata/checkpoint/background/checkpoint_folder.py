"""A folder of checkpoints. A checkpoint exists if and only if its manifest does.

    runs/a/step-100/rank-0-5f2c91d0.pt     what rank 0 saved; torch.load reads it
    runs/a/step-100/manifest.json          written last: names the files of every rank
    runs/a/run-id                          the folder's random name, if copies are kept in memory

If a step is saved again, its new files have other names, and the rename of the new manifest
replaces one checkpoint by the other.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable, Collection, Sequence

from gdsdata.checkpoint.background.folder_lock import FolderLock
from gdsdata.checkpoint.background.manifest import (
    LONGEST_BYTES,
    MANIFEST,
    RANK_FILE,
    Kept,
    Manifest,
    SavedFile,
    folder_of_step,
    parsed_manifest,
    step_of_folder,
)
from gdsdata.checkpoint.file_writer import TEMPORARY, FileWriter
from gdsdata.checkpoint.synced_folders import make_folder, sync_folder
from gdsdata.checkpoint.urls import not_a_folder
from gdsdata.errors import CorruptData, IoError
from gdsdata.io.options import EngineOptions
from gdsdata.storage.regular import regular

_RUN_ID = "run-id"
_RUN_ID_CHARACTERS = 16
_OURS = re.compile(rf"{RANK_FILE}({TEMPORARY})?|manifest\.json{TEMPORARY}")


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
        return os.path.join(self.path, folder_of_step(step))

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
            if self.manifest_of(manifest.step) != manifest:
                message = f"step {manifest.step} in '{self.path}' was removed or saved again meanwhile: restore again"
            raise FileNotFoundError(errno.ENOENT, message) from error
        if size_bytes != file.size_bytes:
            message = f"'{path}' has {size_bytes} bytes, and its manifest says {file.size_bytes}. {remedy}"
            raise CorruptData(message, path, 0, size_bytes)
        return path

    def run_id(self) -> str | None:
        """Return the folder's random name, which copies in memory have; None: it has none.

        A file with anything else counts as none: the name is part of paths.
        """
        try:
            with open(os.path.join(self.path, _RUN_ID), "rb", opener=regular) as file:
                found = file.read(_RUN_ID_CHARACTERS + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.decode() if re.fullmatch(rb"[0-9a-f]{%d}" % _RUN_ID_CHARACTERS, found) else None

    def steps(self) -> list[int]:
        """Return the steps that have a folder, complete or not.

        Raises:
            IoError: the path is that of a file.
        """
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        except NotADirectoryError as error:
            raise not_a_folder("folder", self.path) from error
        return [step for step in map(step_of_folder, names) if step is not None]

    def manifest_of(self, step: int) -> Manifest | None:
        """Return the manifest of a step; None if the step has no complete checkpoint.

        Raises:
            CorruptData: the manifest is damaged.
        """
        path = self.file(step, MANIFEST)
        try:
            with open(path, "rb", opener=regular) as file:
                content = file.read(LONGEST_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return parsed_manifest(content, step, path)


def nothing_spared(leaving: Sequence[Manifest]) -> Collection[int]:
    """Spare nothing: see `LockedFolder.retain`."""
    return ()


def removed(folder: str) -> IoError:
    """Return the error for the folder of a step that somebody has removed during its save."""
    return IoError(errno.ENOENT, f"'{folder}' was removed while it was saved: save again", folder)


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
            IoError: another process has taken the lock over, or the folder is a link.
        """
        self._check_lock()
        folder = self._folder.folder_of(step)
        if os.path.islink(folder):
            raise IoError(
                errno.EEXIST,
                f"'{folder}' is a link to '{os.readlink(folder)}', and a save of step {step} would replace the "
                "checkpoint that is there. Remove the link, or save into another folder",
                folder,
            )
        make_folder(folder)
        return secrets.token_hex(4)

    def run_id(self) -> str:
        """Return the folder's random name. If it has none, it gets one.

        Raises:
            IoError: the name cannot be written.
        """
        found = self._folder.run_id()
        if found is None:
            found = secrets.token_hex(_RUN_ID_CHARACTERS // 2)
            content = found.encode()
            with FileWriter(os.path.join(self._folder.path, _RUN_ID), len(content), self._options) as writer:
                writer.write_bytes([(0, content)])
                writer.commit()
        return found

    def next_sequence(self, least_sequence: int) -> int:
        """Return the `Manifest.sequence` of the next checkpoint.

        Args:
            least_sequence: it is not lower, because there are newer checkpoints elsewhere.

        Raises:
            CorruptData: a manifest is damaged.
        """
        complete = self._known()
        return max(complete[-1].sequence + 1 if complete else 0, least_sequence)

    def commit(self, step: int, files: Sequence[SavedFile], least_sequence: int = 0) -> Manifest:
        """Write a checkpoint's manifest, whose files are on storage already.

        From then on the checkpoint exists.

        Args:
            step: the step.
            files: those of the ranks, in order.
            least_sequence: as of `next_sequence`.

        Raises:
            IoError: another process has taken the lock over, somebody has removed the folder, or
                the manifest cannot be written.
        """
        self._check_lock()
        if not os.path.isdir(folder := self._folder.folder_of(step)):
            raise removed(folder)
        complete = self._known()
        manifest = Manifest(step, self.next_sequence(least_sequence), tuple(files))
        content = manifest.content
        with FileWriter(self._folder.file(step, MANIFEST), len(content), self._options) as writer:
            writer.write_bytes([(0, content)])
            writer.commit()
        self._complete = [*(one for one in complete if one.step != step), manifest]
        return manifest

    def retain(self, kept: Kept, spared: Callable[[Sequence[Manifest]], Collection[int]] = nothing_spared) -> None:
        """Remove old checkpoints.

        From those that stay, remove the files that a later save of the same step has replaced.

        Args:
            kept: which of them stay.
            spared: called with the checkpoints that would be removed. Those whose sequence it
                returns stay until the next call.
        """
        older = list(self._known())
        newest: list[Manifest] = []
        while older and len(newest) < kept.last:
            manifest = older.pop()
            if os.path.exists(self._folder.file(manifest.step, MANIFEST)):  # else somebody has removed it
                newest.append(manifest)
        for manifest in newest:
            self._remove(manifest.step, kept=manifest.files)
        doomed = [one for one in older if not kept.for_ever(one.step)]
        leaving = {one.sequence for one in doomed} - set(spared(doomed))
        staying = []
        for manifest in older:
            if manifest.sequence not in leaving:
                staying.append(manifest)
                continue
            self._remove_checkpoint(manifest.step)
        self._complete = staying + newest[::-1]

    def _check_lock(self) -> None:
        if not self._lock.check():
            self._complete = None

    def _known(self) -> list[Manifest]:
        if self._complete is None:
            self._complete = self._folder.complete()
        return self._complete

    def _remove_checkpoint(self, step: int) -> None:
        folder = self._folder.folder_of(step)
        with contextlib.suppress(FileNotFoundError):
            if os.path.islink(folder):
                return os.unlink(folder)
            os.unlink(self._folder.file(step, MANIFEST))
            # The manifest must be gone before its files are: a manifest without files would be a
            # broken checkpoint.
            sync_folder(folder)
        return self._remove(step, kept=())

    def _remove(self, step: int, kept: Sequence[SavedFile]) -> None:
        """Remove our files from a step's folder, but for its manifest and ``kept``.

        Then the folder, if it is empty. Behind a link, everything stays: it belongs to another run.
        """
        names = {file.name for file in kept}
        folder = self._folder.folder_of(step)
        if os.path.islink(folder):
            return
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for name in os.listdir(folder):
                if name not in names and _OURS.fullmatch(name):
                    os.unlink(os.path.join(folder, name))
            if not names:
                with contextlib.suppress(OSError):  # somebody has put something there
                    os.rmdir(folder)
