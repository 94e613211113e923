"""What torch.save writes: a zip of plain records, ``data.pkl`` with the object and ``data/N`` with a storage's bytes.

The pickle is looked through for what storages it asks for, so that they can be read before. Then torch unpickles, by
its own rules; but what is made of plain tensors, containers and numbers alone, all of which torch's rules allow, is
unpickled here, ten times faster. Sources: PKWARE's APPNOTE.TXT 4.3 for the zip, torch.serialization for what is in it.
"""

from __future__ import annotations

import collections
import functools
import io
import itertools
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
from gdsdata.checkpoint.reading import Reading, Record, Sealed, Stored, bytes_of_storage, seen
from gdsdata.checkpoint.writing import PAGE_BYTES, Extent, Writing, reached
from gdsdata.errors import CorruptData
from gdsdata.options import EngineOptions

_PREFIX = "archive/"
_VERSION = b"3\n"  # of the format, as torch.save writes it
_SMALL_ALIGNMENT = 64

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a record: its magic, the lengths of name and extra field


@dataclass(frozen=True)
class SavedStorage(Sealed):
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
        path: of the file that it is, or is a part of.
        records: by name without the archive's own ("data.pkl", "data/0").
        pickled: the content of "data.pkl".
    """

    path: str
    records: dict[str, Record]
    pickled: bytes

    @functools.cached_property
    def storages(self) -> list[SavedStorage]:
        """In the order in which torch asks for them while it unpickles.

        Raises:
            NotPlain: torch.load has to find out.
            CorruptData: one of them is not in the file.
        """
        storages = _storages_of(self.pickled)
        for storage in storages:
            self.record_of(storage)
        return storages

    def record_of(self, storage: SavedStorage) -> Record:
        record = self.records.get(f"data/{storage.key}")
        if record is None or record.size_bytes != storage.size_bytes:
            there = "is not there" if record is None else f"has {record.size_bytes} bytes"
            message = f"'{self.path}': storage {storage.key} of {storage.size_bytes} bytes {there}"
            raise CorruptData(message, self.path)
        return record


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
        return Archive(path, *_contents_of(Slice(path, file.fileno(), 0, os.fstat(file.fileno()).st_size)))


def open_tensor(archive: Slice) -> Stored:
    """The one plain tensor of an archive: what torch.save made of a tensor.

    Raises:
        NotPlain: torch.load has to read it, or it is something else.
        CorruptData: as `open_archive` does.
    """
    records, pickled = _contents_of(archive)
    record = records.get("data/0")
    found = None if record is None else _tensor_of(pickled, record.size_bytes)
    if record is None or found is None:
        _ = Archive(archive.path, records, pickled).storages  # says what is wrong, where something is
        raise NotPlain("it is no plain tensor")
    return Stored(record, found.offset, found.dtype, found.shape, found.stride)


@functools.lru_cache(maxsize=1024)  # the same layer comes again and again, and so do its pickles
def _tensor_of(pickled: bytes, size_bytes: int) -> Stored | None:
    """On a record of ``size_bytes`` that is nowhere; None where it is no plain tensor, or a damaged one."""
    try:
        found = unpickle_structure(Archive("", {"data/0": Record("", 0, size_bytes)}, pickled))
    except (CorruptData, NotPlain):
        return None
    return found if isinstance(found, Stored) else None


# Of an archive of one tensor, all but the tensor lies in so many bytes at its beginning and at its end.
_ENDS_BYTES = 1024


class Slice:
    """Bytes of an open file that are a file by themselves, as far as `zipfile` asks.

    Args:
        path, descriptor: of the file.
        begin, size_bytes: where it lies there.
    """

    def __init__(self, path: str, descriptor: int, begin: int, size_bytes: int) -> None:
        self.path, self.begin, self.size_bytes = path, begin, size_bytes
        self.seen = seen(descriptor)
        self._descriptor = descriptor
        self._at = 0

    def ask_for_ends(self) -> None:
        """Has storage bring its ends, and waits for nothing: of many slices, all come at once."""
        for offset in (0, self._tail_offset):
            os.posix_fadvise(self._descriptor, self.begin + offset, _ENDS_BYTES, os.POSIX_FADV_WILLNEED)

    def at(self, offset: int, size_bytes: int) -> bytes:
        """Fewer than ``size_bytes`` where it ends."""
        end = min(offset + size_bytes, self.size_bytes)
        for begin, known in ((0, self._head), (self._tail_offset, self._tail)):
            if begin <= offset and end <= begin + len(known):
                return known[offset - begin : end - begin]
        return os.pread(self._descriptor, max(end - offset, 0), self.begin + offset)

    @functools.cached_property
    def _head(self) -> bytes:
        return os.pread(self._descriptor, min(_ENDS_BYTES, self.size_bytes), self.begin)

    @functools.cached_property
    def _tail(self) -> bytes:
        return os.pread(self._descriptor, self.size_bytes - self._tail_offset, self.begin + self._tail_offset)

    @property
    def _tail_offset(self) -> int:
        return max(self.size_bytes - _ENDS_BYTES, 0)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self.size_bytes)[whence]
        if self._at < 0:
            raise OSError(f"'{self.path}': a place before the beginning")
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size_bytes: int = -1) -> bytes:
        found = self.at(self._at, self.size_bytes if size_bytes < 0 else size_bytes)
        self._at += len(found)
        return found


def read_storages(
    archive: Archive, reading: Reading, devices: Sequence[torch.device]
) -> list[torch.UntypedStorage]:
    """A storage for each of ``archive.storages``, each on its device, filled when ``reading`` has run."""
    made = []
    for saved, device in zip(archive.storages, devices, strict=True):
        storage = torch.UntypedStorage(saved.size_bytes, device=device)
        reading.bytes_into(bytes_of_storage(storage), archive.record_of(saved), 0, f"storage {saved.key}")
        made.append(storage)
    return made


_PROTOCOL = b"\x80\x02"  # of the pickle: the one that torch writes


def unpickle(archive: Archive, storages: Sequence[torch.UntypedStorage], weights_only: bool | None) -> Any:
    """The object, its tensors on these storages for ``archive.storages``.

    Raises:
        pickle.UnpicklingError: what is in it is not allowed with ``weights_only``.
        CorruptData: a tensor reaches beyond its storage.
    """

    by_key = {saved.key: storage for saved, storage in zip(archive.storages, storages, strict=True)}

    def rebuild(saved: SavedStorage, stored: Stored, requires_grad: bool) -> torch.Tensor:
        storage = by_key[saved.key]
        empty = torch.empty(0, dtype=stored.dtype, device=storage.device)
        first = stored.offset // stored.dtype.itemsize
        return empty.set_(storage, first, stored.shape, stored.stride).requires_grad_(requires_grad)

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
        return _unpickle_plain(archive, lambda _, stored, __: stored, lambda stored, _: stored)
    except _Unusual:
        return None


def _unpickle_by_torch(
    archive: Archive, storages: Sequence[torch.UntypedStorage], weights_only: bool | None
) -> Any:
    asked = 0

    def next_storage(_: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        nonlocal asked
        if asked >= len(archive.storages) or location != archive.storages[asked].location:
            raise CorruptData(f"'{archive.path}': its pickle asks for other storages than it names", archive.path)
        asked += 1
        return storages[asked - 1]

    with open(archive.path, "rb") as file, torch.serialization.skip_data():
        if seen(file.fileno()) != archive.records["data.pkl"].seen:
            raise CorruptData(f"'{archive.path}' was replaced while it was being loaded: load it again", archive.path)
        return torch.load(file, map_location=next_storage, weights_only=weights_only, mmap=False)


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
    archive: Archive, rebuild: Callable[[SavedStorage, Stored, bool], Any], make_parameter: Callable[[Any, bool], Any]
) -> Any:
    """The object, with ``rebuild(storage, stored, requires_grad)`` for a tensor, and
    ``make_parameter(tensor, requires_grad)``.

    Raises:
        _Unusual: torch has to do it.
        CorruptData: a storage is not in the file, or a tensor reaches beyond its.
    """
    if not archive.pickled.startswith(_PROTOCOL):
        raise _Unusual
    storages: dict[str, SavedStorage] = {}
    unused = 0  # storages that are no tensor's: the object has them themselves

    def made(storage: Any, dtype: Any, offset: int, shape: Any, stride: Any, requires_grad: bool) -> Any:
        nonlocal unused
        if not isinstance(storage, SavedStorage) or not isinstance(dtype, torch.dtype):
            raise _Unusual
        unused -= 1
        return rebuild(storage, _within(archive, storage, dtype, offset, shape, stride), requires_grad)

    def tensor(storage: Any, offset: int, shape: Any, stride: Any, requires_grad: bool, hooks: Any, *more: Any) -> Any:
        if hooks or more:  # more: it is a conjugate or a negative view
            raise _Unusual
        return made(storage, storage.dtype, offset, shape, stride, requires_grad)

    def tensor_of_newer_dtype(
        storage: Any, offset: int, shape: Any, stride: Any, requires_grad: bool, hooks: Any, dtype: Any, *more: Any
    ) -> Any:
        if hooks or more:
            raise _Unusual
        return made(storage, dtype, offset, shape, stride, requires_grad)

    def parameter(data: Any, requires_grad: bool, hooks: Any) -> Any:
        if hooks or not isinstance(data, (torch.Tensor, Stored)):
            raise _Unusual
        return make_parameter(data, requires_grad)

    known: dict[tuple[str, str], Any] = {
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): _Made(tensor),
        ("torch._utils", "_rebuild_tensor_v3"): _Made(tensor_of_newer_dtype),
        ("torch._utils", "_rebuild_parameter"): _Made(parameter),
    }
    known |= {("torch", name): dtype for name, dtype in _STORAGE_DTYPES.items()}
    known["torch.storage", "UntypedStorage"] = torch.uint8
    known |= {("torch", name): getattr(torch, name) for name in _NEWER_DTYPES if hasattr(torch, name)}

    class Plain(pickle.Unpickler):
        def persistent_load(self, saved: Any) -> SavedStorage:
            nonlocal unused
            unused += 1
            _, dtype, key, location, elements = saved
            storage = storages.get(key)
            if storage is None:
                storage = storages[key] = SavedStorage(key, dtype, elements * dtype.itemsize, location)
                archive.record_of(storage)
            if storage.dtype != dtype or location == "meta":  # torch gives a storage of its own to each dtype
                raise _Unusual
            return storage

        def find_class(self, module: str, name: str) -> Any:
            if (module, name) not in known:
                raise _Unusual
            return known[module, name]

    try:
        found = Plain(io.BytesIO(archive.pickled)).load()
        if unused:
            raise _Unusual
        return found
    except CorruptData:
        raise
    except Exception as error:  # torch will say what is wrong with it
        raise _Unusual from error


def _within(
    archive: Archive, storage: SavedStorage, dtype: torch.dtype, offset: int, shape: Any, stride: Any
) -> Stored:
    record = archive.records[f"data/{storage.key}"]
    stored = Stored(record, offset * dtype.itemsize, dtype, tuple(shape), tuple(stride), storage.location)
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
    pickled, storages = pickled_by_storages(value)
    flat = [reached(bytes_of_storage(storage)) for storage in storages]
    write_archives(path, [(Layout(pickled, [one.nbytes for one in flat]), flat)], [], options)


class Layout:
    """Where the parts of an archive go, before a byte of it is written.

    Args:
        pickled: the content of "data.pkl".
        sizes_bytes: of the storages that it refers to as "0", "1" and so on.
        begin: where it begins in its file.

    Attributes:
        begin, end: where it lies in its file.
        offsets: of its storages in the file: on whole pages of it, where they are not short.
    """

    def __init__(self, pickled: bytes, sizes_bytes: Sequence[int], begin: int = 0) -> None:
        self._contents = {"data.pkl": pickled, "byteorder": sys.byteorder.encode(), "version": _VERSION}
        records = [(f"{_PREFIX}{name}", len(content), _SMALL_ALIGNMENT) for name, content in self._contents.items()]
        for key, size_bytes in enumerate(sizes_bytes):
            alignment = PAGE_BYTES if size_bytes >= PAGE_BYTES else _SMALL_ALIGNMENT
            records.append((f"{_PREFIX}data/{key}", size_bytes, alignment))
        self._placed = zip_layout.place(records, begin)
        self.begin = begin
        self.end = begin + self._placed[-1].end + len(zip_layout.directory(self._placed, [0] * len(self._placed)))
        self.offsets = [begin + record.offset for record in self._placed[len(self._contents) :]]

    def frame(self, checksums: Sequence[int]) -> list[tuple[int, bytes]]:
        """All but the storages, whose CRC-32s it holds: bytes, and where they go in the file."""
        all_checksums = [*map(zlib.crc32, self._contents.values()), *checksums]
        parts = []
        contents = itertools.chain(self._contents.values(), itertools.repeat(b""))
        for record, crc32, content in zip(self._placed, all_checksums, contents, strict=False):
            parts.append((self.begin + record.header_offset, record.header(crc32) + content))
        directory = zip_layout.directory(self._placed, all_checksums)
        return [*parts, (self.end - len(directory), directory)]


def write_archives(
    path: str,
    archives: Sequence[tuple[Layout, Sequence[torch.Tensor]]],
    others: Sequence[Extent],
    options: EngineOptions,
) -> None:
    """A file of archives, each with its storages (uint8, one dimension), and of other bytes.

    Raises:
        IoError: the file cannot be written, or space is lacking.
    """
    ends = [layout.end for layout, _ in archives] + [offset + content.nbytes for offset, content in others]
    storages = [extent for layout, flat in archives for extent in zip(layout.offsets, flat, strict=True)]
    with Writing(path, max(ends, default=0), options) as writing:
        checksums = iter(writing.write([*storages, *others], with_checksums=True))
        writing.write_bytes(
            part for layout, flat in archives for part in layout.frame(list(itertools.islice(checksums, len(flat))))
        )
        writing.commit()


@functools.lru_cache(maxsize=1024)  # the same layer comes again and again
def pickled_tensor(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """Of a tensor on the CPU whose storage has just its elements, without gaps."""
    untouched = torch.empty_strided(shape, stride, dtype=dtype)  # memory that costs nothing
    return pickled_by_storages(untouched)[0]


def pickled_by_storages(value: Any) -> tuple[bytes, list[torch.UntypedStorage]]:
    """As torch pickles it, and the storages that it refers to: the i-th as key "i".

    Raises:
        RuntimeError, pickle.PicklingError, TypeError, AttributeError: as `save` does.
    """
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


def _contents_of(archive: Slice) -> tuple[dict[str, Record], bytes]:
    """The records by name without the archive's own, and the pickle."""
    records, prefix = _records_of(archive)
    contents = {
        name: archive.at(records[prefix + name].offset - archive.begin, records[prefix + name].size_bytes)
        for name in ("data.pkl", "byteorder")
        if prefix + name in records
    }
    order = contents.get("byteorder", b"little")
    if order != sys.byteorder.encode():
        raise NotPlain(f"its byte order is {order.decode(errors='replace')}")
    return {name.removeprefix(prefix): record for name, record in records.items()}, contents["data.pkl"]


def _records_of(archive: Slice) -> tuple[dict[str, Record], str]:
    """The zip's records by name, and what every name begins with."""
    path = archive.path
    try:
        entries = zipfile.ZipFile(archive).infolist()  # type: ignore[arg-type]
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OverflowError) as error:
        if recognises(archive.at(0, 4)):
            raise CorruptData(f"'{path}' is a zip file that was cut or damaged: {error}", path) from error
        raise NotPlain("it is no zip file") from error
    records = {}
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise NotPlain(f"record {entry.filename!r} is compressed")
        header = archive.at(entry.header_offset, _LOCAL_HEADER.size)
        if len(header) < _LOCAL_HEADER.size or not recognises(header):
            raise CorruptData(f"'{path}': record {entry.filename!r} is not where its zip says", path)
        _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        begin = entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if begin + entry.file_size > archive.size_bytes:
            size_bytes = archive.size_bytes
            raise CorruptData(f"'{path}' of {size_bytes} bytes ends before its record {entry.filename!r} does", path)
        # Zero is what torch writes where it was told to take no checksums.
        crc32 = entry.CRC if entry.CRC != 0 or entry.file_size == 0 else None
        records[entry.filename] = Record(path, archive.begin + begin, entry.file_size, crc32, archive.seen)
    pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1 or "constants.pkl" in {name.rpartition("/")[2] for name in records}:
        raise NotPlain("it is a TorchScript archive, or no archive of torch's")
    return records, pickles[0].removesuffix("data.pkl")


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

_NEWER_DTYPES = [
    "uint16", "uint32", "uint64",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip

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
