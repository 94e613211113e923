"""Pickles of torch.save: their storages, and their objects if these are plain.

Plain parts are tensors, parameters, containers and numbers, all of which torch's rules allow.
Python's C unpickler makes them with a fixed vocabulary, ten times faster than torch's own
unpickler, which makes the rest.

Source: torch.serialization.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gdsdata import torch_private
from gdsdata.checkpoint.stored import Record, Stored, sealed, spanned
from gdsdata.errors import CorruptData
from gdsdata.io import engine


class SavedStorage(NamedTuple):
    """A storage that a pickle asks for.

    Attributes:
        key: its record is ``data/<key>``.
        dtype: of the elements in which its size is counted.
        size_bytes: its size.
        location: the device that it was saved from, as torch names it ("cpu", "cuda:0").
    """

    key: str
    dtype: torch.dtype
    size_bytes: int
    location: str

    def __setstate__(self, state: Any) -> None:
        raise sealed(self)


class NotPlain(Exception):
    """Only torch.load can read the file; the message has the reason."""


# The storage classes that a pickle names, and the dtype of their elements. Newer dtypes come with
# UntypedStorage.
_STORAGE_DTYPES = {
    "UntypedStorage": torch.uint8,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "BoolStorage": torch.bool,
    "ShortStorage": torch.int16,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "IntStorage": torch.int32,
    "FloatStorage": torch.float32,
    "LongStorage": torch.int64,
    "DoubleStorage": torch.float64,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "QInt8Storage": torch.qint8,
    "QUInt8Storage": torch.quint8,
    "QInt32Storage": torch.qint32,
}

_NEWER_DTYPES = [
    "uint16", "uint32", "uint64",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip

_FARTHEST_BYTES = 1 << 62  # where an empty tensor may begin, which takes no bytes there
_PROTOCOL = b"\x80\x02"  # the one that torch writes


class Unusual(Exception):
    """A pickle has more than plain tensors, parameters, containers and numbers."""


class _Storage(NamedTuple):
    """A storage of a plain pickle, as its tensors see it."""

    saved: SavedStorage
    record: Record

    def __setstate__(self, state: Any) -> None:
        raise sealed(self)


class _Tensors:
    """Makes a plain pickle's tensors."""

    __slots__ = ("unused", "_make_parameter", "_rebuild", "_record_of", "_storages")

    def __init__(
        self,
        record_of: Callable[[SavedStorage], Record],
        rebuild: Callable[[SavedStorage, Stored, bool], Any],
        make_parameter: Callable[[Any, bool], Any],
    ) -> None:
        self._record_of, self._rebuild, self._make_parameter = record_of, rebuild, make_parameter
        self._storages: dict[str, _Storage] = {}
        self.unused = 0  # references to storages that no tensor has used: the object itself has those storages

    def storage(self, saved: Any) -> _Storage:
        self.unused += 1
        _, dtype, key, location, elements = saved
        storage = self._storages.get(key)
        if storage is None:
            known = SavedStorage(key, dtype, elements * dtype.itemsize, location)
            storage = self._storages[key] = _Storage(known, self._record_of(known))
        if storage.saved.dtype is not dtype or location == "meta":  # torch makes a storage for each dtype
            raise Unusual
        return storage

    def tensor(
        self, storage: Any, offset: int, shape: Any, stride: Any, needs_grad: bool, hooks: Any, *more: Any
    ) -> Any:
        if hooks or more:  # more: it is a conjugate or a negative view
            raise Unusual
        return self._made(storage, storage.saved.dtype, offset, shape, stride, needs_grad)

    def tensor_of_newer_dtype(
        self, storage: Any, offset: int, shape: Any, stride: Any, needs_grad: bool, hooks: Any, dtype: Any, *more: Any
    ) -> Any:
        if hooks or more or not isinstance(dtype, torch.dtype):
            raise Unusual
        return self._made(storage, dtype, offset, shape, stride, needs_grad)

    def _made(self, storage: Any, dtype: torch.dtype, offset: int, shape: Any, stride: Any, needs_grad: bool) -> Any:
        if type(storage) is not _Storage or type(needs_grad) is not bool:
            raise Unusual
        self.unused -= 1
        saved, record = storage
        width = dtype.itemsize
        stored = Stored(record, offset * width, dtype, tuple(shape), tuple(stride), saved.location)
        elements = spanned(stored.shape, stored.stride)
        # An empty tensor may begin behind its storage, as the later rows of an empty matrix do.
        end_bytes = (offset + elements) * width
        is_within = end_bytes <= (record.size_bytes if elements else _FARTHEST_BYTES)
        if elements < 0 or offset < 0 or not is_within:
            raise CorruptData(
                f"'{record.path}': a tensor of {dtype}, shape {stored.shape}, strides {stored.stride} and offset "
                f"{offset} is not within its storage {saved.key} of {record.size_bytes} bytes",
                record.path,
                record.offset,
                record.size_bytes,
            )
        return self._rebuild(saved, stored, needs_grad)

    def parameter(self, data: Any, requires_grad: bool, hooks: Any) -> Any:
        if hooks or not isinstance(data, (torch.Tensor, Stored)) or type(requires_grad) is not bool:
            raise Unusual
        return self._make_parameter(data, requires_grad)


class _Plain(pickle.Unpickler):
    """Makes only what it is given by name.

    The class belongs to the module: a class made for each file would be garbage that only the
    collector frees, and the file's descriptors with it.
    """

    def __init__(self, pickled: bytes, known: dict[tuple[str, str], Any], storage: Callable[[Any], _Storage]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._known, self._storage = known, storage

    def persistent_load(self, saved: Any) -> _Storage:
        return self._storage(saved)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._known:
            raise Unusual
        return self._known[module, name]


def unpickle_plain(
    pickled: bytes,
    record_of: Callable[[SavedStorage], Record],
    rebuild: Callable[[SavedStorage, Stored, bool], Any],
    make_parameter: Callable[[Any, bool], Any],
) -> Any:
    """Unpickle an object that has only plain parts.

    Args:
        pickled: the pickle.
        record_of: returns a storage's record, or raises `CorruptData`.
        rebuild: makes a tensor of a storage, the tensor's place and requires_grad.
        make_parameter: makes a parameter of a tensor and requires_grad.

    Raises:
        Unusual: only torch can unpickle it.
        CorruptData: a storage is not in the file, or a tensor reaches beyond its storage.
    """
    if not pickled.startswith(_PROTOCOL) or engine.pickle_claims_too_much(pickled):
        raise Unusual
    tensors = _Tensors(record_of, rebuild, make_parameter)
    # `__call__`, because a function has a dict, in which a pickle could store what it likes.
    known: dict[tuple[str, str], Any] = {
        ("collections", "OrderedDict"): collections.OrderedDict,
        torch_private.REBUILD_TENSOR: tensors.tensor.__call__,  # type: ignore[operator]
        torch_private.REBUILD_TENSOR_OF_NEWER_DTYPE: tensors.tensor_of_newer_dtype.__call__,  # type: ignore[operator]
        torch_private.REBUILD_PARAMETER: tensors.parameter.__call__,  # type: ignore[operator]
    }
    known |= {("torch", name): dtype for name, dtype in _STORAGE_DTYPES.items()}
    known["torch.storage", "UntypedStorage"] = torch.uint8
    known |= {("torch", name): getattr(torch, name) for name in _NEWER_DTYPES if hasattr(torch, name)}

    try:
        found = _Plain(pickled, known, tensors.storage).load()
        if tensors.unused:
            raise Unusual
        return found
    except CorruptData:
        raise
    except Exception as error:  # torch raises its own error
        raise Unusual from error


class _Anything:
    """Stands for any object that a pickle makes: nothing that the pickle names is run."""

    def __new__(cls, *_: Any, **__: Any) -> _Anything:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def ignore(self, *_: Any) -> None:
        pass

    __call__ = __setstate__ = __setitem__ = append = extend = add = ignore


class StorageReferences(NamedTuple):
    """A pickle's references to storages.

    Attributes:
        storages: those that torch asks for while it unpickles, in order.
        total: how many references there are: one for each tensor, and for each storage that the
            object itself has.
    """

    storages: list[SavedStorage]
    total: int


def storages_of(pickled: bytes) -> StorageReferences:
    """Find the storages that a pickle asks for.

    Nothing that the pickle names is run.

    Raises:
        NotPlain: only torch.load can find out.
    """
    if engine.pickle_claims_too_much(pickled):
        raise NotPlain("its pickle is damaged: it speaks of more than it can have")
    known: dict[str, tuple[torch.dtype, int]] = {}
    asked: list[SavedStorage] = []
    count = 0

    def ask(saved: Any) -> _Anything:
        nonlocal count
        count += 1
        kind, of_type, key, location, elements = saved
        if kind != "storage" or not isinstance(location, str):
            raise NotPlain("its pickle refers to something that is no storage")
        if type(key) is not str:
            raise NotPlain("the key of a storage is no text")
        dtype = _STORAGE_DTYPES[of_type.__name__]
        size_bytes = elements * dtype.itemsize
        if key not in known:
            known[key] = dtype, size_bytes
        elif known[key][0] == dtype or known[key][1] == size_bytes:
            return _Anything()  # torch uses the same storage again
        asked.append(SavedStorage(key, dtype, size_bytes, location))
        return _Anything()

    kinds: dict[str, type] = {}  # made for this pickle, because it may change them

    class Scan(pickle.Unpickler):
        def persistent_load(self, saved: Any) -> _Anything:
            return ask(saved)

        def find_class(self, module: str, name: str) -> type:
            if name in torch_private.REBUILDERS_THAT_LOOK_AT_VALUES:
                raise NotPlain("it has sparse tensors, which torch checks")
            kind = name if name in _STORAGE_DTYPES else "other"
            if kind not in kinds:
                kinds[kind] = type(kind, (_Anything,), {})
            return kinds[kind]

    try:
        Scan(io.BytesIO(pickled)).load()
    except NotPlain:
        raise
    except Exception as error:  # a pickle can raise anything
        raise NotPlain(f"its pickle is unusual: {error!r}") from error
    if any(storage.location == "meta" for storage in asked):
        raise NotPlain("it has tensors on the meta device")
    return StorageReferences(asked, count)
