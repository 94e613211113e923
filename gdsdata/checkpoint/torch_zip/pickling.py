"""Pickles as `torch.save` makes them, byte for byte, and their storages."""

from __future__ import annotations

import collections
import functools
import io
import pickle
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gdsdata.checkpoint.explanations import unpicklable
from gdsdata.checkpoint.torch_zip.torch_words import TorchWords, number_of
from gdsdata.io import engine
from gdsdata.torch_private import (
    backward_hooks,
    is_zero_tensor,
    parts_of_typed_storage,
    rebuild_tensor,
    storage_id,
    storage_types,
    warn_if_newer,
)


class Pickled(NamedTuple):
    """A value as torch pickles it, and the storages that the pickle names.

    The pickle refers to the i-th storage as key "i". Arrays have one element for each storage.

    Attributes:
        pickle: the bytes.
        storages: the storages.
        addresses: where they lie in memory.
        sizes_bytes: their sizes.
        devices: the number of the GPU that each lies on; -1: the CPU.
        has_only_plain_tensors: whether all tensors of the value are plain. False: perhaps.
    """

    pickle: bytes
    storages: list[torch.UntypedStorage]
    addresses: NDArray[np.uint64]
    sizes_bytes: NDArray[np.int64]
    devices: NDArray[np.int32]
    has_only_plain_tensors: bool


def pickle_with_storages(value: Any) -> Pickled:
    """Return a value as torch pickles it, and its storages.

    Raises:
        RuntimeError: storages that share memory are counted in different dtypes.
        pickle.PicklingError, TypeError, AttributeError: a value cannot be pickled; the message has
            its name.
    """
    warn_if_newer()
    by_engine = _state_pickler()
    found = None if by_engine is None else by_engine.pickled(value)
    return pickle_by_python(value) if found is None else Pickled(*found)


def pickle_by_python(value: Any) -> Pickled:
    """Do what `pickle_with_storages` does, by Python's own pickler.

    It takes five times as long, pickles anything, and raises the errors.
    """
    pickler = _Pickler()
    try:
        pickler.dump(value)
    except Exception as error:
        explained = unpicklable(value, error, lambda leaf: _Pickler().dump(leaf))
        if explained is error:
            raise
        raise explained from error
    storages = pickler.storages
    return Pickled(
        pickler.pickled(),
        storages,
        np.array([one.data_ptr() for one in storages], np.uint64),
        np.array([one.nbytes() for one in storages], np.int64),
        np.array([number_of(one.device) for one in storages], np.int32),
        has_only_plain_tensors=False,
    )


@functools.cache
def _state_pickler() -> Any:
    """Return the engine's pickler; None if this torch has another version of DLPack."""
    try:
        return engine.StatePickler(TorchWords(_name_of))
    except (AttributeError, ImportError):
        return None


def _name_of(one: Any) -> bytes:
    """Return the bytes by which a pickle names a class, a function, or an object like a dtype.

    Raises:
        Exception: it has no such name.
    """
    pickler = _Pickler()
    pickler.dump(one)
    name = _NAME.fullmatch(pickler.pickled())
    if name is None:
        raise ValueError(f"{one!r:.100} has no name in pickles")
    return name[1]


@functools.lru_cache(maxsize=1024)  # layers repeat
def pickle_tensor(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """Return the pickle of a tensor on the CPU that fills its storage."""
    untouched = torch.empty_strided(shape, stride, dtype=dtype)  # memory that is not touched costs nothing
    return pickle_with_storages(untouched).pickle


# A pickle of a name alone: the protocol, the instruction with module and name, its number, the end.
_NAME = re.compile(rb"\x80\x02(c[^\n]*\n[^\n]*\n)q\x00\.")

# Most objects in a pickle are of these types, and none of them is a storage.
_NO_STORAGES = frozenset({str, int, bool, tuple, type(None), dict, collections.OrderedDict, torch.Tensor})


@dataclass(slots=True)
class _Elements:
    """A plain tensor's storage and dtype. torch's TypedStorage is slow to make."""

    storage: torch.UntypedStorage
    dtype: torch.dtype


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether torch pickles a `torch.Tensor` as `REBUILD_TENSOR` alone.

    Other tensors add state, metadata, or a warning.
    """
    return (
        tensor.dtype in storage_types()  # newer dtypes have a function of their own
        and tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.is_cuda)
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and not (tensor.__dict__ or backward_hooks(tensor) or is_zero_tensor(tensor))  # torch refuses the last
    )


class _Pickler(pickle.Pickler):
    """Pickles as torch does, and collects storages.

    The class belongs to the module: a class made for each save would be garbage that only the
    collector frees, and the storages with it.

    Attributes:
        storages: those that the pickle refers to, in order.
    """

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        super().__init__(self._buffer, protocol=2)
        self.storages: list[torch.UntypedStorage] = []
        self._keys: dict[int, str] = {}
        self._dtypes: dict[tuple[torch.device, int], torch.dtype] = {}

    def pickled(self) -> bytes:
        return self._buffer.getvalue()

    def reducer_override(self, saved: Any) -> Any:
        # torch and Python would return the same, but take more than half of the whole time.
        if type(saved) is torch.Tensor and _is_plain(saved):
            elements = _Elements(saved.untyped_storage(), saved.dtype)
            place = saved.storage_offset(), tuple(saved.shape), saved.stride()
            # Each tensor gets a dict of hooks of its own: one for all would be pickled as shared.
            hooks: collections.OrderedDict[int, Any] = collections.OrderedDict()
            return rebuild_tensor, (elements, *place, saved.requires_grad, hooks)
        if type(saved) is collections.OrderedDict and not (saved or saved.__dict__):  # a tensor's hooks
            return collections.OrderedDict, ()
        return NotImplemented

    def persistent_id(self, saved: Any) -> tuple[str, type, str, str, int] | None:
        if type(saved) in _NO_STORAGES:
            return None
        storage: torch.UntypedStorage
        if isinstance(saved, _Elements):
            storage, dtype, elements = saved.storage, saved.dtype, saved.storage.nbytes() // saved.dtype.itemsize
            of_type = getattr(torch, storage_types()[dtype])
        elif isinstance(saved, torch.storage.TypedStorage):
            storage, elements, name = parts_of_typed_storage(saved)
            dtype, of_type = saved.dtype, getattr(torch, name)
        elif torch.is_storage(saved):
            storage, dtype, elements, of_type = saved, torch.uint8, saved.nbytes(), torch.UntypedStorage  # type: ignore[assignment]
        else:
            return None
        if storage.nbytes() > 0 and self._dtypes.setdefault((storage.device, storage.data_ptr()), dtype) != dtype:
            torchs_words = "Cannot save multiple tensors or storages that view the same data as different types"
            raise RuntimeError(f"{torchs_words}: save a copy of one")
        identity = storage_id(storage)
        if identity not in self._keys:
            self._keys[identity] = str(len(self._keys))
            self.storages.append(storage)
        return "storage", of_type, self._keys[identity], torch.serialization.location_tag(storage), elements
