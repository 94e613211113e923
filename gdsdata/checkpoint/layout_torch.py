"""What torch.save writes: a zip of plain records, ``data.pkl`` with the object and ``data/N`` with a storage's bytes.

The pickle is looked through for what storages it asks for, so that they can be read before. Then torch unpickles, by
its own rules; but what is made of plain tensors, containers and numbers alone, all of which torch's rules allow, is
unpickled here, ten times faster. Sources: PKWARE's APPNOTE.TXT 4.3 for the zip, torch.serialization for what is in it.
"""

from __future__ import annotations

import collections
import io
import os
import pickle
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gdsdata.checkpoint import zip_layout
from gdsdata.checkpoint.reading import Reading, Record, Stored, bytes_of_storage
from gdsdata.checkpoint.writing import PAGE_BYTES, Writing, bytes_tensor, reached
from gdsdata.errors import CorruptData
from gdsdata.options import EngineOptions

_PREFIX = "archive/"
_VERSION = b"3\n"  # of the format, as torch.save writes it
_SMALL_ALIGNMENT = 64

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a record: its magic, the lengths of name and extra field


@dataclass(frozen=True)
class SavedStorage:
    """A storage that the pickle asks for.

    Attributes:
        key: its record is ``data/<key>``.
        dtype: of the elements it is counted in.
        size_bytes: that it has.
        location: the device that it was on, as torch names it ("cpu", "cuda:0").
    """

    key: str
    dtype: torch.dtype
    size_bytes: int
    location: str


@dataclass(frozen=True)
class Archive:
    """A file of torch.save's.

    Attributes:
        path: of the file.
        records: by name without the archive's own ("data.pkl", "data/0").
        pickled: the content of "data.pkl".
        storages: in the order in which torch asks for them while it unpickles.
    """

    path: str
    records: dict[str, Record]
    pickled: bytes
    storages: list[SavedStorage]


class NotPlain(Exception):
    """The file is for torch.load alone; the message says why."""


def recognises(head: bytes) -> bool:
    """Whether a file that begins so can be one."""
    return head.startswith(b"PK\x03\x04")


def open_archive(path: str) -> Archive:
    """What lies where in the file.

    Raises:
        NotPlain: it is an older or an unusual file: torch.load reads those.
        CorruptData: the zip's records do not lie in the file.
        FileNotFoundError, OSError: the file is not to be had.
    """
    with open(path, "rb") as file:
        records, prefix = _records_of(file, path)
        pickled = _content(file, records, prefix + "data.pkl")
        order = _content(file, records, prefix + "byteorder") if prefix + "byteorder" in records else b"little"
    if order != sys.byteorder.encode():
        raise NotPlain(f"its byte order is {order.decode(errors='replace')}")
    records = {name.removeprefix(prefix): record for name, record in records.items()}
    storages = _storages_of(pickled)
    for storage in storages:
        record = records.get(f"data/{storage.key}")
        if record is None or record.size_bytes != storage.size_bytes:
            there = "is not there" if record is None else f"has {record.size_bytes} bytes"
            raise CorruptData(f"'{path}': storage {storage.key} of {storage.size_bytes} bytes {there}", path)
    return Archive(path, records, pickled, storages)


def read_storages(archive: Archive, reading: Reading, device: torch.device) -> list[torch.UntypedStorage]:
    """A storage for each of ``archive.storages``, filled when ``reading`` has run."""
    made = []
    for saved in archive.storages:
        storage = torch.UntypedStorage(saved.size_bytes, device=device)
        reading.bytes_into(bytes_of_storage(storage), archive.records[f"data/{saved.key}"], 0, f"storage {saved.key}")
        made.append(storage)
    return made


_PROTOCOL = b"\x80\x02"  # of the pickle: the one that torch writes


def unpickle(archive: Archive, storages: Sequence[torch.UntypedStorage], weights_only: bool) -> Any:
    """The object, its tensors on these storages for ``archive.storages``.

    Raises:
        pickle.UnpicklingError: what is in it is not allowed with ``weights_only``.
        CorruptData: a tensor reaches beyond its storage.
    """

    def rebuild(i: int, stored: Stored, requires_grad: bool) -> torch.Tensor:
        empty = torch.empty(0, dtype=stored.dtype, device=storages[i].device)
        first = stored.offset // stored.dtype.itemsize
        return empty.set_(storages[i], first, stored.shape, stored.stride).requires_grad_(requires_grad)

    try:
        return _unpickle_plain(archive, rebuild, torch.nn.Parameter)
    except _Unusual:
        return _unpickle_by_torch(archive, storages, weights_only)


def unpickle_structure(archive: Archive) -> Any | None:
    """The object with a `Stored` in the place of each tensor; None where torch has to make it.

    Raises:
        CorruptData: a tensor reaches beyond its storage.
    """
    try:
        return _unpickle_plain(archive, lambda i, stored, _: stored, lambda stored, _: stored)
    except _Unusual:
        return None


def _unpickle_by_torch(archive: Archive, storages: Sequence[torch.UntypedStorage], weights_only: bool) -> Any:
    asked = 0

    def next_storage(_: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        nonlocal asked
        if asked >= len(archive.storages) or location != archive.storages[asked].location:
            raise CorruptData(f"'{archive.path}': its pickle asks for other storages than it names", archive.path)
        asked += 1
        return storages[asked - 1]

    with torch.serialization.skip_data():
        return torch.load(archive.path, map_location=next_storage, weights_only=weights_only, mmap=False)


class _Unusual(Exception):
    """The pickle names more than plain tensors, parameters, containers and numbers."""


class _Made:
    """A function or a type that a plain pickle may name. Has nothing that the pickle could change."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        object.__setattr__(self, "_make", make)

    def __call__(self, *arguments: Any) -> Any:
        return self._make(*arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)


def _unpickle_plain(
    archive: Archive, rebuild: Callable[[int, Stored, bool], Any], make_parameter: Callable[[Any, bool], Any]
) -> Any:
    """The object, with ``rebuild(i, stored, requires_grad)`` for a tensor on ``archive.storages[i]``, and
    ``make_parameter(tensor, requires_grad)``.

    Raises:
        _Unusual: torch has to do it.
        CorruptData: a tensor reaches beyond its storage.
    """
    if not archive.pickled.startswith(_PROTOCOL):
        raise _Unusual
    index_of = {storage.key: i for i, storage in enumerate(archive.storages)}

    def tensor(storage: Any, offset: int, shape: Any, stride: Any, requires_grad: bool, hooks: Any, *more: Any) -> Any:
        i, dtype = storage
        if hooks or more:  # more: it is a conjugate or a negative view
            raise _Unusual
        return rebuild(i, _within(archive, i, dtype, offset, shape, stride), requires_grad)

    def parameter(data: Any, requires_grad: bool, hooks: Any) -> Any:
        if hooks:
            raise _Unusual
        return make_parameter(data, requires_grad)

    known: dict[tuple[str, str], Any] = {
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): _Made(tensor),
        ("torch._utils", "_rebuild_parameter"): _Made(parameter),
    }
    known |= {("torch", name): dtype for name, dtype in _STORAGE_DTYPES.items() if name != "UntypedStorage"}

    class Plain(pickle.Unpickler):
        def persistent_load(self, saved: Any) -> tuple[int, torch.dtype]:
            _, dtype, key, _, _ = saved
            i = index_of[key]
            if archive.storages[i].dtype != dtype:  # torch gives a storage of its own to each dtype
                raise _Unusual
            return i, dtype

        def find_class(self, module: str, name: str) -> Any:
            if (module, name) not in known:
                raise _Unusual
            return known[module, name]

    try:
        return Plain(io.BytesIO(archive.pickled)).load()
    except CorruptData:
        raise
    except Exception as error:  # torch will say what is wrong with it
        raise _Unusual from error


def _within(archive: Archive, i: int, dtype: torch.dtype, offset: int, shape: Any, stride: Any) -> Stored:
    storage = archive.storages[i]
    record = archive.records[f"data/{storage.key}"]
    stored = Stored(record, offset * dtype.itemsize, dtype, tuple(shape), tuple(stride))
    least = min((offset, *stored.shape, *stored.stride))
    if len(shape) != len(stride) or least < 0 or stored.offset + stored.span_bytes > record.size_bytes:
        raise CorruptData(
            f"'{archive.path}': a tensor of {dtype}, shape {stored.shape}, strides {stored.stride} and offset {offset} "
            f"is not within its storage {storage.key} of {record.size_bytes} bytes",
            record.path,
            record.offset,
            record.size_bytes,
        )
    return stored


def save(value: Any, path: str, options: EngineOptions) -> None:
    """Write what `torch.save` would write, with its storages at multiples of a page.

    Raises:
        RuntimeError: storages that share memory are counted in different dtypes, which the format cannot say.
        IoError: the file cannot be written, or space is lacking.
        pickle.PicklingError, TypeError, AttributeError: something in it cannot be pickled.
    """
    pickled, storages = _pickled(value)
    contents = {"data.pkl": pickled, "byteorder": sys.byteorder.encode(), "version": _VERSION}
    flat = [reached(bytes_of_storage(storage)) for storage in storages]
    records = [(f"{_PREFIX}{name}", len(content), _SMALL_ALIGNMENT) for name, content in contents.items()]
    for key, one in enumerate(flat):
        alignment = PAGE_BYTES if one.nbytes >= PAGE_BYTES else _SMALL_ALIGNMENT
        records.append((f"{_PREFIX}data/{key}", one.nbytes, alignment))
    placed = zip_layout.place(records)
    size_bytes = placed[-1].end + len(zip_layout.directory(placed, [0] * len(placed)))
    writing = Writing(path, size_bytes, options)
    of_storages = placed[len(contents) :]
    checksums = [zlib.crc32(content) for content in contents.values()]
    extents = [(record.offset, one) for record, one in zip(of_storages, flat, strict=True)]
    checksums += writing.write(extents, with_checksums=True)
    rest = [(record.header_offset, record.header(crc32)) for record, crc32 in zip(placed, checksums, strict=True)]
    rest += [(record.offset, content) for record, content in zip(placed, contents.values(), strict=False)]
    rest.append((placed[-1].end, zip_layout.directory(placed, checksums)))
    writing.write([(offset, bytes_tensor(content)) for offset, content in rest])
    writing.commit()


def _pickled(value: Any) -> tuple[bytes, list[torch.UntypedStorage]]:
    """As torch pickles it, and the storages that it refers to: the i-th as key "i"."""
    keys: dict[int, str] = {}
    storages: list[torch.UntypedStorage] = []
    dtypes: dict[tuple[torch.device, int], torch.dtype] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, saved: Any) -> tuple[str, type, str, str, int] | None:
            if isinstance(saved, torch.storage.TypedStorage):
                storage, dtype, elements = saved._untyped_storage, saved.dtype, saved._size()
                of_type = getattr(torch, saved._pickle_storage_type())
            elif torch.is_storage(saved):
                storage, dtype, elements, of_type = saved, torch.uint8, saved.nbytes(), torch.UntypedStorage
            else:
                return None
            if storage.nbytes() > 0 and dtypes.setdefault((storage.device, storage.data_ptr()), dtype) != dtype:
                raise RuntimeError("tensors or storages that share memory have different dtypes: save a copy of one")
            if storage._cdata not in keys:
                keys[storage._cdata] = str(len(keys))
                storages.append(storage)
            return "storage", of_type, keys[storage._cdata], torch.serialization.location_tag(storage), elements

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump(value)
    return buffer.getvalue(), storages


def _records_of(file: Any, path: str) -> tuple[dict[str, Record], str]:
    """The zip's records by name, and what every name begins with."""
    size_bytes = os.fstat(file.fileno()).st_size
    try:
        entries = zipfile.ZipFile(file).infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OverflowError) as error:
        if recognises(os.pread(file.fileno(), 4, 0)):
            raise CorruptData(f"'{path}' is a zip file that was cut or damaged: {error}", path) from error
        raise NotPlain("it is no zip file") from error
    records = {}
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise NotPlain(f"record {entry.filename!r} is compressed")
        header = os.pread(file.fileno(), _LOCAL_HEADER.size, entry.header_offset)
        if len(header) < _LOCAL_HEADER.size or not recognises(header):
            raise CorruptData(f"'{path}': record {entry.filename!r} is not where its zip says", path)
        _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        begin = entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if begin + entry.file_size > size_bytes:
            raise CorruptData(f"'{path}' of {size_bytes} bytes ends before its record {entry.filename!r} does", path)
        # Zero is what torch writes where it was told to take no checksums.
        crc32 = entry.CRC if entry.CRC != 0 or entry.file_size == 0 else None
        records[entry.filename] = Record(path, begin, entry.file_size, crc32)
    pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1 or "constants.pkl" in {name.rpartition("/")[2] for name in records}:
        raise NotPlain("it is a TorchScript archive, or no archive of torch's")
    return records, pickles[0].removesuffix("data.pkl")


def _content(file: Any, records: dict[str, Record], name: str) -> bytes:
    record = records[name]
    return os.pread(file.fileno(), record.size_bytes, record.offset)


class _Anything:
    """Stands for whatever a pickle makes: nothing of what it names is run."""

    def __new__(cls, *_: Any, **__: Any) -> _Anything:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def ignore(self, *_: Any) -> None:
        pass

    __call__ = __setstate__ = __setitem__ = append = extend = add = ignore


# As the pickle names them, in which tensors are counted; newer dtypes come with UntypedStorage.
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

# torch builds these by looking at values that only it knows how to check.
_LOOKS_AT_VALUES = {"_rebuild_sparse_tensor", "_rebuild_sparse_csr_tensor"}


def _storages_of(pickled: bytes) -> list[SavedStorage]:
    """The storages that torch asks for while it unpickles, in that order."""
    known: dict[str, tuple[torch.dtype, int]] = {}
    asked: list[SavedStorage] = []

    def ask(saved: Any) -> _Anything:
        kind, of_type, key, location, elements = saved
        if kind != "storage" or not isinstance(location, str):
            raise NotPlain("its pickle refers to something that is no storage")
        dtype = _STORAGE_DTYPES[of_type.__name__]
        size_bytes = elements * dtype.itemsize
        if key not in known:
            known[key] = dtype, size_bytes
        elif known[key][0] == dtype or known[key][1] == size_bytes:
            return _Anything()  # torch gives the same again
        asked.append(SavedStorage(key, dtype, size_bytes, location))
        return _Anything()

    class Scan(pickle.Unpickler):
        def persistent_load(self, saved: Any) -> _Anything:
            return ask(saved)

        def find_class(self, module: str, name: str) -> type:
            if name in _LOOKS_AT_VALUES:
                raise NotPlain("it has sparse tensors, which torch checks")
            return type(name, (_Anything,), {"__module__": module})

    try:
        Scan(io.BytesIO(pickled)).load()
    except NotPlain:
        raise
    except Exception as error:  # whatever a pickle that is not plain data can raise
        raise NotPlain(f"its pickle is unusual: {error!r}") from error
    if any(storage.location == "meta" for storage in asked):
        raise NotPlain("it has tensors on the meta device")
    return asked
