"""torch.load with a function as ``map_location``.

The function gets each storage on the CPU, with its values, and returns the one that tensors get.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gdsdata import torch_private
from gdsdata.checkpoint.stored import Stored, bytes_of_storage
from gdsdata.checkpoint.tensor_reader import TensorReader
from gdsdata.checkpoint.torch_zip.archive import Archive
from gdsdata.checkpoint.torch_zip.archive_reader import rebuilt
from gdsdata.checkpoint.torch_zip.torch_unpickling import unpickle_by_torch_with
from gdsdata.checkpoint.torch_zip.unpickling import SavedStorage, Unusual, unpickle_plain
from gdsdata.errors import CorruptData
from gdsdata.io.new_memory import new_storage
from gdsdata.io.options import EngineOptions

Function = Callable[[torch.UntypedStorage, str], Any]

# The most that is read ahead of the function, or one larger storage. If it moves storages to a GPU,
# the CPU never has more of them.
_AHEAD_BYTES = 1 << 30


def read_mapped(archive: Archive, function: Function, weights_only: bool, options: EngineOptions) -> Any:
    """Return the object that was saved, on the storages that a function returns.

    The function is called once for each storage, in torch's order.

    Args:
        archive: the archive.
        function: the ``map_location`` of `torch.load`.
        weights_only: as in `torch.load`.
        options: of the engine.

    Raises:
        pickle.UnpicklingError: ``weights_only`` forbids something in the pickle.
        NotPlain: only torch.load can find out what the file has. The function has not been called.
        CorruptData, IoError: as `TensorReader.run`.
        Exception: the function's own, or torch's about a storage that it returned.
    """
    saved = _plain_storages(archive)
    storages = _MappedStorages(archive, archive.storages if saved is None else saved, function, options)
    if saved is None:
        assert archive.file is not None
        return unpickle_by_torch_with(archive.file, storages.next, weights_only)
    try:
        return unpickle_plain(archive.pickled, archive.record_of, storages.rebuild, torch.nn.Parameter)
    except Unusual as unusual:  # not the pickle, which was found to be plain
        raise (unusual.__cause__ or unusual) from None


def _plain_storages(archive: Archive) -> list[SavedStorage] | None:
    """Return the storages of a plain pickle in torch's order; None if it is not plain.

    Raises:
        CorruptData: the file lacks a storage, or a tensor reaches beyond its storage.
    """
    found: dict[SavedStorage, None] = {}

    def note(saved: SavedStorage, stored: Stored, requires_grad: bool) -> Stored:
        found.setdefault(saved)
        return stored

    def parameter(stored: Stored, requires_grad: bool) -> Stored:
        return stored

    try:
        unpickle_plain(archive.pickled, archive.record_of, note, parameter)
    except Unusual:
        return None
    return list(found)


class _MappedStorages:
    """Reads storages ahead, and maps each when it is first asked for."""

    def __init__(
        self, archive: Archive, saved: Sequence[SavedStorage], function: Function, options: EngineOptions
    ) -> None:
        self._archive, self._saved, self._function, self._options = archive, saved, function, options
        self._read: list[torch.UntypedStorage] = []  # not mapped yet, the next one last
        self._read_count = 0
        self._mapped: list[torch.UntypedStorage] = []  # in the order of `_saved`
        self._by_key: dict[str, torch.UntypedStorage] = {}

    def rebuild(self, saved: SavedStorage, stored: Stored, requires_grad: bool) -> torch.Tensor:
        """Return a tensor on its mapped storage."""
        storage = self._by_key.get(saved.key)
        if storage is None:
            storage = self._by_key[saved.key] = self._map_next(saved)
        return rebuilt(storage, stored, requires_grad)

    def next(self, made_by_torch: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        """Return the next mapped storage, in the place of one that torch has not read."""
        at = len(self._mapped)
        saved = self._saved[at] if at < len(self._saved) else None
        if saved is None or (saved.location, saved.size_bytes) != (location, made_by_torch.nbytes()):
            path = self._archive.path
            raise CorruptData(f"'{path}': its pickle asks for other storages than it names", path)
        return self._map_next(saved)

    def _map_next(self, saved: SavedStorage) -> torch.UntypedStorage:
        if not self._read:
            self._read_ahead()
        storage = self._read.pop()
        mapped = self._function(storage, saved.location)
        if mapped is None:
            mapped = torch_private.restored(storage, saved.location)
        torch_private.check_is_storage(mapped, saved.dtype)
        self._mapped.append(mapped)
        return mapped

    def _read_ahead(self) -> None:
        reader = TensorReader(self._options, verify=False)
        size_bytes = 0
        try:
            for saved in self._saved[self._read_count :]:
                size_bytes += saved.size_bytes
                if size_bytes > _AHEAD_BYTES and self._read:
                    break
                storage = new_storage(saved.size_bytes, torch.device("cpu"))
                reader.bytes_into(
                    bytes_of_storage(storage), self._archive.record_of(saved), 0, (f"storage {saved.key}",)
                )
                self._read.append(storage)
                self._read_count += 1
        except BaseException:
            reader.cancel()
            raise
        reader.run()
        self._read.reverse()
