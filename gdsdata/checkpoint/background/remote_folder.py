"""`RemoteFolder`: checkpoints below a URL. One exists if its manifest and all its files do."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor

from gdsdata.checkpoint.background.manifest import (
    LONGEST_BYTES,
    MANIFEST,
    Kept,
    Manifest,
    SavedFile,
    folder_of_step,
    is_rank_file,
    parsed_manifest,
    step_of_folder,
)
from gdsdata.checkpoint.open_object import read_object
from gdsdata.checkpoint.urls import joined, store_and_key

_MANIFESTS_AT_A_TIME = 16

# The names of each step's objects, with size and tag.
Listed = dict[int, dict[str, tuple[int, str]]]


class RemoteFolder:
    """Checkpoints below a URL, laid out as in a `CheckpointFolder`. Any thread may call it.

    One run at a time may write into it. Each method raises what a `Store` raises.

    Args:
        url: of the folder. Nothing is requested yet.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._lock = threading.Lock()  # guards _read
        self._read: dict[tuple[int, str], Manifest] = {}  # of what was there last, by step and tag

    def folder_of(self, step: int) -> str:
        """Return the URL of a step's folder."""
        return joined(self.url, folder_of_step(step))

    def file(self, step: int, name: str) -> str:
        """Return the URL of an object in a step's folder."""
        return joined(self.folder_of(step), name)

    def complete(self) -> list[Manifest]:
        """Return the complete checkpoints, the newest last.

        Raises:
            CorruptData: a manifest is damaged.
        """
        return self._complete(self._list())

    def lacking(self, manifest: Manifest) -> list[str]:
        """Return the names of a checkpoint's files that are not there with their sizes."""
        there = self._list(folder_of_step(manifest.step) + "/").get(manifest.step, {})
        return [one.name for one in manifest.files if not _is_there(one, there)]

    def has(self, step: int, file: SavedFile) -> bool:
        """Return whether a file is there, with its size."""
        store, key = store_and_key(self.file(step, file.name))
        try:
            return store.head(key).size_bytes == file.size_bytes
        except FileNotFoundError:
            return False

    def commit(self, manifest: Manifest) -> None:
        """Put a checkpoint's manifest. From then on the checkpoint exists."""
        store, key = store_and_key(self.file(manifest.step, MANIFEST))
        store.put(key, manifest.content)

    def retain(self, kept: Kept, coming: Collection[Manifest]) -> None:
        """Remove old checkpoints, and files of saves that were not completed.

        Manifests are deleted first, so that no manifest ever names a file that was deleted.

        Args:
            kept: which of them stay.
            coming: checkpoints that are about to be uploaded. Files of theirs stay.

        Raises:
            CorruptData: a manifest is damaged.
        """
        listed = self._list()
        complete = self._complete(listed)
        staying = [one for one in complete[: -kept.last] if kept.for_ever(one.step)] + complete[-kept.last :]
        steps = {one.step for one in staying}
        names = {(one.step, file.name) for one in [*staying, *coming] for file in one.files}
        self._delete((step, MANIFEST) for step, there in listed.items() if MANIFEST in there and step not in steps)
        self._delete(
            (step, name)
            for step, there in listed.items()
            for name in there
            if is_rank_file(name) and (step, name) not in names
        )

    def _delete(self, places: Iterable[tuple[int, str]]) -> None:
        keys = [store_and_key(self.file(step, name))[1] for step, name in places]
        if keys:
            store_and_key(self.url)[0].delete(keys)

    def _list(self, below: str = "") -> Listed:
        store, prefix = store_and_key(joined(self.url, ""))
        listed: Listed = {}
        for one in store.list(prefix + below):
            if isinstance(one, str):
                continue
            folder, _, name = store_and_key(one.url)[1].removeprefix(prefix).partition("/")
            step = step_of_folder(folder)
            if step is not None:
                listed.setdefault(step, {})[name] = one.size_bytes, one.tag
        return listed

    def _complete(self, listed: Listed) -> list[Manifest]:
        with_manifest = [(step, there) for step, there in listed.items() if MANIFEST in there]
        with ThreadPoolExecutor(_MANIFESTS_AT_A_TIME, thread_name_prefix="gdsdata-manifests") as threads:
            found = list(threads.map(lambda one: self._manifest_of(one[0], one[1][MANIFEST][1]), with_manifest))
        there_now = {(step, there[MANIFEST][1]) for step, there in with_manifest}
        with self._lock:
            self._read = {place: manifest for place, manifest in self._read.items() if place in there_now}
        complete = [
            manifest
            for manifest, (_, there) in zip(found, with_manifest, strict=True)
            if manifest is not None and all(_is_there(file, there) for file in manifest.files)
        ]
        return sorted(complete, key=lambda one: one.sequence)

    def _manifest_of(self, step: int, tag: str) -> Manifest | None:
        """Return the manifest of a step; None if it is not there any more."""
        with self._lock:
            known = self._read.get((step, tag))
        if known is not None:
            return known
        url = self.file(step, MANIFEST)
        try:
            manifest = parsed_manifest(read_object(url, LONGEST_BYTES + 1), step, url)
        except FileNotFoundError:
            return None
        with self._lock:
            self._read[step, tag] = manifest
        return manifest


def _is_there(file: SavedFile, there: dict[str, tuple[int, str]]) -> bool:
    return file.name in there and there[file.name][0] == file.size_bytes
