"""torch.load on storages that have been made before.

torch makes the object, and reads no storage.
"""

from __future__ import annotations

import os
import pickle
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gdsdata import torch_private
from gdsdata.checkpoint.open_file import OpenFile
from gdsdata.checkpoint.torch_zip.unpickling import SavedStorage
from gdsdata.errors import CorruptData

# Where torch.load puts a file's storages. It also takes functions: see `mapped_storages`.
MapLocation = str | torch.device | dict[str, str] | None


def unpickle_by_torch(
    file: OpenFile,
    saved: Sequence[SavedStorage],
    storages: Sequence[torch.UntypedStorage],
    map_location: MapLocation,
    weights_only: bool | None,
) -> Any:
    """Return what torch.load returns for a file, on storages that the caller has made.

    Args:
        file: a file that torch.save wrote.
        saved: the storages that its pickle asks for, in order.
        storages: the storage that torch gets for each of them.
        map_location: as in `torch.load`. Tensor subclasses without a storage of their own ask for
            it.
        weights_only: as in `torch.load`.

    Raises:
        pickle.UnpicklingError: ``weights_only`` forbids something in the pickle.
        CorruptData: the pickle asks for other storages.
    """
    return _unpickled(file, _Locations(map_location, _Supply(file.path, saved, storages)), weights_only)


def unpickle_by_torch_with(file: OpenFile, function: Callable[[Any, str], Any], weights_only: bool | None) -> Any:
    """Return what torch.load returns for a file, on storages that a function returns.

    Args:
        file: a file that torch.save wrote.
        function: a ``map_location``. It gets each storage before torch has read it.
        weights_only: as in `torch.load`.

    Raises:
        pickle.UnpicklingError: ``weights_only`` forbids something in the pickle.
    """
    return _unpickled(file, _OwnFunction(function), weights_only)


def is_own(map_location: Any) -> bool:
    """Return whether this module calls torch with this ``map_location``."""
    return isinstance(map_location, (_Locations, _OwnFunction))


def _unpickled(file: OpenFile, locations: Any, weights_only: bool | None) -> Any:
    with file.reader() as reader, torch_private.map_location_restored():
        # torch refuses a pickle_module if the environment forbids weights_only=False. Then it reads
        # the storages too.
        if "TORCH_FORCE_WEIGHTS_ONLY_LOAD" in os.environ:
            return torch.load(reader, map_location=locations, weights_only=weights_only, mmap=False)
        if weights_only is False:
            return torch.load(reader, map_location=locations, pickle_module=_PICKLE, weights_only=False, mmap=False)
        try:
            return torch.load(reader, map_location=locations, pickle_module=_STRICT, weights_only=False, mmap=False)
        except pickle.UnpicklingError as error:
            words = f"weights_only=True does not allow it: {error}. If you trust the file, pass weights_only=False"
            raise pickle.UnpicklingError(words) from None


class _Supply:
    """Supplies storages in the order in which torch asks for them."""

    def __init__(self, path: str, saved: Sequence[SavedStorage], storages: Sequence[torch.UntypedStorage]) -> None:
        self._path = path
        self._left = iter(list(zip(saved, storages, strict=True)))

    def next(self, made_by_torch: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        saved, storage = next(self._left, (None, None))
        if saved is None or storage is None or (saved.location, saved.size_bytes) != (location, made_by_torch.nbytes()):
            raise CorruptData(f"'{self._path}': its pickle asks for other storages than it names", self._path)
        return storage


class _OwnFunction:
    """A function as ``map_location``."""

    def __init__(self, function: Callable[[Any, str], Any]) -> None:
        self._function = function

    def __call__(self, storage: Any, location: str) -> Any:
        return self._function(storage, location)


class _Location(str):
    """A location for torch that also carries the supply of storages to `_supplied`.

    Attributes:
        saved: the location in the file.
        supply: has the storage already.
    """

    saved: str
    supply: _Supply


class _Locations(dict[Any, Any]):
    """A ``map_location`` that answers by locations that carry the supply.

    The locations are those of the caller's ``map_location``.

    It is a dict, because torch asks a dict, but never a function, for the device of a wrapper
    subclass.
    """

    def __init__(self, map_location: MapLocation, supply: _Supply) -> None:
        super().__init__()
        self._map_location, self._supply = map_location, supply

    def get(self, location: Any, default: Any = None) -> Any:
        if isinstance(self._map_location, dict):
            found = self._map_location.get(location, default)
        else:
            found = default if self._map_location is None else self._map_location
        if not isinstance(location, str):  # the device of a wrapper subclass
            return found
        place = _Location(found)
        place.saved, place.supply = location, self._supply
        return place


def _untagged(storage: object) -> str | None:
    return None


def _supplied(storage: Any, location: str) -> torch.UntypedStorage | None:
    return location.supply.next(storage, location.saved) if isinstance(location, _Location) else None


# torch sorts registrations by this number, and fails if two are equal, so nobody else may have this
# one.
_BEFORE_ALL_OTHERS = -1_000_000_007
torch.serialization.register_package(_BEFORE_ALL_OTHERS, _untagged, _supplied)


class _WithoutData:
    """Keeps torch from reading a storage while it makes one, and only then.

    Other code that the pickle calls may load other files by torch, which need their values.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, _without_data(value) if name == "persistent_load" else value)


def _without_data(load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a ``persistent_load`` that makes the storages of `storages_of`, in their order.

    It asks torch for bytes, and once for each storage. While torch 2.9 skips data, it multiplies
    the number of elements by their size twice. It also makes an empty storage once for each
    reference to it.
    """
    made: dict[str, tuple[torch.dtype, int, torch.TypedStorage]] = {}

    def load_without_data(saved_id: Any) -> Any:
        kind, of_type, key, location, elements = saved_id
        dtype = torch.uint8 if of_type is torch.UntypedStorage else of_type.dtype
        size_bytes = elements * dtype.itemsize
        if key in made:
            known_dtype, known_bytes, storage = made[key]
            if known_dtype == dtype:
                return storage
            if known_bytes == size_bytes:
                return torch_private.retyped_storage(storage, dtype)
            key += " again"  # no name of a record: torch reads none
        with torch.serialization.skip_data():
            of_bytes = load((kind, torch.UntypedStorage, key, location, size_bytes))
        storage = torch_private.retyped_storage(of_bytes, dtype)
        made.setdefault(key, (dtype, size_bytes, storage))
        return storage

    return load_without_data


class _Unpickler(_WithoutData, pickle.Unpickler):
    """Makes any object."""


class _StrictUnpickler(_WithoutData, torch_private.weights_only_pickle_module().Unpickler):  # type: ignore[misc]
    """Makes what ``weights_only=True`` allows."""


_PICKLE = types.SimpleNamespace(__name__="pickle", Unpickler=_Unpickler, load=pickle.load)
_STRICT = types.SimpleNamespace(__name__="weights_only", Unpickler=_StrictUnpickler)
