"""From an archive of `torch.save` to the object that was saved.

torch unpickles by its own rules. A pickle of plain tensors, containers and numbers alone, all of
which torch's rules allow, is unpickled here instead, ten times faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from gdsdata.checkpoint.stored import Record, Stored, bytes_of_storage
from gdsdata.checkpoint.tensor_reader import TensorReader
from gdsdata.checkpoint.torch_zip.archive import Archive, open_slice
from gdsdata.checkpoint.torch_zip.file_slice import FileSlice
from gdsdata.checkpoint.torch_zip.torch_unpickling import MapLocation, unpickle_by_torch
from gdsdata.checkpoint.torch_zip.unpickling import NotPlain, SavedStorage, Unusual, unpickle_plain
from gdsdata.errors import CorruptData
from gdsdata.io import engine
from gdsdata.io.new_memory import new_storage, new_tensor

_ERRORS_UNCHANGED = nullcontext()
_NOT_FOUND = object()  # no object that a pickle makes


def read(
    archive: Archive,
    reader: TensorReader,
    device_of: Callable[[SavedStorage], torch.device],
    map_location: MapLocation,
    weights_only: bool | None,
    explained: AbstractContextManager[None] = _ERRORS_UNCHANGED,
) -> Any:
    """Read the storages of an archive, and return the object that was saved.

    This runs ``reader``.

    Args:
        archive: the archive.
        reader: takes the reads of the storages.
        device_of: returns where ``map_location`` puts a storage.
        map_location: as in `torch.load`.
        weights_only: as in `torch.load`.
        explained: entered while torch unpickles, if it has to; changes the errors that torch
            raises.

    Raises:
        pickle.UnpicklingError: ``weights_only`` forbids something in the pickle.
        NotPlain: only torch.load can find out what the file has.
        CorruptData: the file lacks a storage, a tensor reaches beyond its storage, or as
            `TensorReader.run` does.
        FileNotFoundError, IoError: the file cannot be read.
    """
    storages = _Storages(archive, reader, device_of)
    try:
        found = unpickle_plain(archive.pickled, archive.record_of, storages.rebuild, torch.nn.Parameter)
    except Unusual:
        found = _NOT_FOUND
        in_order = storages.all_of_archive()
    except BaseException:
        reader.cancel()
        raise
    reader.run()
    if found is not _NOT_FOUND:
        return found
    assert archive.file is not None
    with explained:
        return unpickle_by_torch(archive.file, archive.storages, in_order, map_location, weights_only)


class _Storages:
    """Makes the storages of an archive when they are first asked for, and has them read."""

    def __init__(
        self, archive: Archive, reader: TensorReader, device_of: Callable[[SavedStorage], torch.device]
    ) -> None:
        self._archive, self._reader, self._device_of = archive, reader, device_of
        # By key: a storage, or the first tensor that has all of it.
        self._made: dict[str, tuple[SavedStorage, torch.UntypedStorage | torch.Tensor]] = {}

    def rebuild(self, saved: SavedStorage, stored: Stored, requires_grad: bool) -> torch.Tensor:
        """Return a tensor on its storage."""
        if saved.key not in self._made and stored.span_bytes == stored.size_bytes == saved.size_bytes:
            device = self._device_of(saved)
            if engine.reaches(device):
                tensor = new_tensor(stored.shape, stored.stride, stored.dtype, device)
                self._made[saved.key] = saved, tensor
                self._reader.bytes_into(tensor, stored.record, 0, (f"storage {saved.key}",))
                return tensor.requires_grad_() if requires_grad else tensor
        return rebuilt(self._storage(saved), stored, requires_grad)

    def all_of_archive(self) -> list[torch.UntypedStorage]:
        """Return ``archive.storages``.

        Raises:
            NotPlain: only torch.load can find out which there are.
            CorruptData: the file lacks one.
        """
        try:
            return [self._storage(saved) for saved in self._archive.storages]
        except BaseException:
            self._reader.cancel()
            raise

    def _storage(self, saved: SavedStorage) -> torch.UntypedStorage:
        known, made = self._made.get(saved.key, (None, None))
        if known != saved or made is None:
            made = new_storage(saved.size_bytes, self._device_of(saved))
            self._made[saved.key] = saved, made
            self._reader.bytes_into(
                bytes_of_storage(made), self._archive.record_of(saved), 0, (f"storage {saved.key}",)
            )
        return made.untyped_storage() if isinstance(made, torch.Tensor) else made


def unpickle(
    archive: Archive,
    storages: Sequence[torch.UntypedStorage],
    weights_only: bool | None,
    explained: AbstractContextManager[None] = _ERRORS_UNCHANGED,
) -> Any:
    """Return the object that was saved, on storages that the caller has made.

    Args:
        archive: the archive.
        storages: one on the CPU for each of ``archive.storages``.
        weights_only: as in `torch.load`.
        explained: as in `read`.

    Raises:
        pickle.UnpicklingError: ``weights_only`` forbids something in the pickle.
        CorruptData: a tensor reaches beyond its storage.
    """
    try:
        return _unpickle_plain(archive, storages)
    except Unusual:
        assert archive.file is not None
        with explained:
            return unpickle_by_torch(archive.file, archive.storages, storages, "cpu", weights_only)


def unpickle_structure(archive: Archive) -> Any | None:
    """Return the object with a `Stored` in the place of each tensor.

    None if only torch can make it.

    Raises:
        CorruptData: a tensor reaches beyond its storage.
    """

    def stored(_: SavedStorage, tensor: Stored, requires_grad: bool) -> Stored:
        return tensor

    def parameter(tensor: Stored, requires_grad: bool) -> Stored:
        return tensor

    try:
        return unpickle_plain(archive.pickled, archive.record_of, stored, parameter)
    except Unusual:
        return None


def open_tensor(archive: FileSlice) -> Stored:
    """Return where the one plain tensor of an archive lies.

    Such an archive is what `torch.save` makes of a tensor.

    Raises:
        NotPlain: the archive has something else, or only torch.load can read it.
        CorruptData: as `open_archive` does.
    """
    opened = open_slice(archive)
    record = opened.records.get("data/0")
    found = None if record is None else _tensor_of(opened.pickled, record.size_bytes)
    if record is None or found is None:
        _ = opened.storages  # raises if something is wrong with them
        raise NotPlain("it is no plain tensor")
    return Stored(record, found.offset, found.dtype, found.shape, found.stride)


@functools.lru_cache(maxsize=1024)  # layers repeat, and so do their pickles
def _tensor_of(pickled: bytes, size_bytes: int) -> Stored | None:
    """Return the tensor on a record of ``size_bytes`` in no file.

    None if it is not plain, or is damaged.
    """
    try:
        found = unpickle_structure(Archive(None, {"data/0": Record(None, 0, size_bytes)}, pickled))
    except (CorruptData, NotPlain):
        return None
    return found if isinstance(found, Stored) else None


def _unpickle_plain(archive: Archive, storages: Sequence[torch.UntypedStorage]) -> Any:
    by_key = {saved.key: storage for saved, storage in zip(archive.storages, storages, strict=True)}

    def rebuild(saved: SavedStorage, stored: Stored, requires_grad: bool) -> torch.Tensor:
        return rebuilt(by_key[saved.key], stored, requires_grad)

    return unpickle_plain(archive.pickled, archive.record_of, rebuild, torch.nn.Parameter)


def rebuilt(storage: torch.UntypedStorage, stored: Stored, requires_grad: bool) -> torch.Tensor:
    """Return a tensor on a storage, as torch makes it."""
    empty = torch.empty(0, dtype=stored.dtype, device=storage.device)
    first = stored.offset // stored.dtype.itemsize
    return empty.set_(storage, first, stored.shape, stored.stride).requires_grad_(requires_grad)
