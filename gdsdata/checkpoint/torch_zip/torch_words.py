"""The names and functions of torch that the engine's pickler of states needs.

See csrc/python/state_pickler.cpp.
"""

from __future__ import annotations

import codecs
import collections
import copyreg
import operator
import pickle
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gdsdata.torch_private import (
    backward_hooks,
    parts_of_typed_storage,
    rebuild_tensor,
    storage_id,
    storage_types,
)

_attributes = operator.attrgetter("__dict__")


class StorageReference(NamedTuple):
    """A storage that an object refers to.

    Attributes:
        storage: the storage.
        dtype: of the elements in which its size is counted.
        storage_class: the class that pickles name for it.
        location: its device, as torch names it ("cpu", "cuda:0").
        device: the number of its GPU; -1: the CPU.
        elements: its size.
    """

    storage: torch.UntypedStorage
    dtype: torch.dtype
    storage_class: type
    location: str
    device: int
    elements: int


class TorchWords:
    """torch's names and functions, read once by the engine's pickler.

    Args:
        name_of: returns the bytes by which a pickle names a class or a function.

    Attributes:
        types: for each dtype that pickles have a storage class for: DLPack's code, the size of an
            element in bytes, the dtype, and the class.
        refusals: functions that return something true for a tensor that is not plain.
    """

    def __init__(self, name_of: Callable[[Any], bytes]) -> None:
        self.tensor = torch.Tensor
        self.rebuild_tensor = rebuild_tensor
        self.ordered_dict = collections.OrderedDict
        self.new_object = copyreg.__newobj__  # type: ignore[attr-defined]
        self.storage_reference = StorageReference
        self.is_conjugate = torch.Tensor.is_conj
        self.refusals = torch.Tensor.is_neg, _attributes, backward_hooks
        self.untyped_storage = torch.Tensor.untyped_storage
        self.storage_id = storage_id
        self.storage_address = torch.UntypedStorage.data_ptr
        self.storage_bytes = torch.UntypedStorage.nbytes
        self.storage_offset = torch.Tensor.storage_offset
        self.location_of = torch.serialization.location_tag
        self._name_of = name_of
        self.types = [
            (_dlpack_code(dtype), dtype.itemsize, dtype, getattr(torch, name))
            for dtype, name in storage_types().items()
            if not _is_quantized(dtype)
        ]

    def pickled_int(self, number: int) -> bytes:
        """Return the part of a pickle that makes a number."""
        return pickle.dumps(number, 2)[2:-1]  # without the protocol and the end

    def described(self, one: Any) -> bytes | StorageReference | tuple[Any, Any, Any, Any, Any]:
        """Describe an object that is no container, number, text or plain tensor.

        Returns:
            The bytes by which a pickle names it, a storage, or the call that makes it: function,
            arguments, state, items of a list, and items of a dict.

        Raises:
            Exception: only Python's pickler can pickle it.
        """
        if isinstance(one, (type, types.FunctionType)):
            return self._name_of(one)
        if isinstance(one, torch.storage.TypedStorage):
            storage, elements, name = parts_of_typed_storage(one)
            return _reference(storage, one.dtype, getattr(torch, name), elements)
        if torch.is_storage(one):
            return _reference(one, torch.uint8, torch.UntypedStorage, one.nbytes())
        reduced = _reduced(one)
        if isinstance(reduced, str):
            return self._name_of(one)
        function, arguments, *more = reduced
        if getattr(function, "__name__", "") == "__newobj_ex__" or len(more) > 3:
            raise ValueError("Python's pickler treats it specially")
        return function, arguments, *more, *[None] * (3 - len(more))


def number_of(device: torch.device) -> int:
    """Return the number of a GPU, or -1 for the CPU."""
    return -1 if device.type == "cpu" else device.index or 0


def _reduced(one: Any) -> Any:
    """Return what makes an object, as Python's pickler in protocol 2 asks for it."""
    kind = type(one)
    if kind is bytes:
        return (codecs.encode, (str(one, "latin1"), "latin1")) if one else (bytes, ())
    if kind is set or kind is frozenset:
        return kind, ([*one],)
    if kind is bytearray:
        raise ValueError("Python's pickler treats it specially")
    if (function := copyreg.dispatch_table.get(kind)) is not None:
        return function(one)
    return one.__reduce_ex__(2)


def _reference(storage: Any, dtype: torch.dtype, storage_class: Any, elements: int) -> StorageReference:
    location = torch.serialization.location_tag(storage)
    return StorageReference(storage, dtype, storage_class, location, number_of(storage.device), elements)


def _is_quantized(dtype: torch.dtype) -> bool:
    return str(dtype).startswith("torch.q")


def _dlpack_code(dtype: torch.dtype) -> int:
    if dtype is torch.bool:
        return 6
    if dtype is torch.bfloat16:
        return 4
    if dtype.is_complex or dtype.is_floating_point:
        return 5 if dtype.is_complex else 2
    return 0 if dtype.is_signed else 1
