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
import pickle
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from gdsdata.checkpoint.explanations import unpicklable
from gdsdata.checkpoint.open_file import OpenFile
from gdsdata.checkpoint.pages import PAGE_BYTES
from gdsdata.checkpoint.reading import Reading, Record, Stored, bytes_of_storage
from gdsdata.checkpoint.torch_zip import torch_config, zip_layout
from gdsdata.checkpoint.torch_zip.torch_unpickling import MapLocation, unpickle_by_torch
from gdsdata.checkpoint.torch_zip.unpickling import (
    NotPlain,
    SavedStorage,
    StorageReferences,
    Unusual,
    storages_of,
    unpickle_plain,
)
from gdsdata.checkpoint.writing import Extent, Writing, reached
from gdsdata.errors import CorruptData
from gdsdata.formats.parsers.zip_directory import LOCAL_BYTES, content_offsets, read_directory
from gdsdata.io import engine
from gdsdata.io.options import EngineOptions
from gdsdata.torch_private import (
    backward_hooks,
    is_zero_tensor,
    parts_of_typed_storage,
    rebuild_tensor,
    storage_id,
    storage_types,
)

_PREFIX = "archive/"
_VERSION = b"3\n"  # of the format, as torch.save writes it
_AS_IT_IS = nullcontext()
_LONGEST_BYTE_ORDER = 16  # "little", and a file may say that it is gigabytes


@dataclass(frozen=True)
class Archive:
    """A file of torch.save's.

    Attributes:
        file: that it is, or is a part of; None of what is nowhere.
        records: by name without the archive's own ("data.pkl", "data/0").
        pickled: the content of "data.pkl".
    """

    file: OpenFile | None
    records: dict[str, Record]
    pickled: bytes

    @property
    def path(self) -> str:
        return "" if self.file is None else self.file.path

    @functools.cached_property
    def references(self) -> StorageReferences:
        """What the pickle says of storages.

        Raises:
            NotPlain: torch.load has to find out.
            CorruptData: one of them is not in the file.
        """
        references = storages_of(self.pickled)
        for storage in references.storages:
            self.record_of(storage)
        return references

    @property
    def storages(self) -> list[SavedStorage]:
        """In the order in which torch asks for them while it unpickles. Raises as `references` does."""
        return self.references.storages

    def record_of(self, storage: SavedStorage) -> Record:
        record = self.records.get(f"data/{storage.key}")
        if record is None or record.size_bytes != storage.size_bytes:
            there = "is not there" if record is None else f"has {record.size_bytes} bytes"
            message = f"'{self.path}': storage {storage.key} of {storage.size_bytes} bytes {there}"
            raise CorruptData(message, self.path)
        return record


def recognises(head: bytes) -> bool:
    """Whether a file that begins so can be one."""
    return head.startswith(b"PK\x03\x04")


def open_archive(file: OpenFile) -> Archive:
    """What lies where in the file.

    Raises:
        NotPlain: it is an older or an unusual file: torch.load reads those.
        CorruptData: the zip's records do not lie in the file.
        IoError: the storage refuses it.
    """
    return Archive(file, *_contents_of(Slice(file, 0, file.size_bytes)))


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
        _ = Archive(archive.file, records, pickled).storages  # says what is wrong, where something is
        raise NotPlain("it is no plain tensor")
    return Stored(record, found.offset, found.dtype, found.shape, found.stride)


@functools.lru_cache(maxsize=1024)  # the same layer comes again and again, and so do its pickles
def _tensor_of(pickled: bytes, size_bytes: int) -> Stored | None:
    """On a record of ``size_bytes`` that is nowhere; None where it is no plain tensor, or a damaged one."""
    try:
        found = unpickle_structure(Archive(None, {"data/0": Record(None, 0, size_bytes)}, pickled))
    except (CorruptData, NotPlain):
        return None
    return found if isinstance(found, Stored) else None


# Of an archive of one tensor, all but the tensor lies in so many bytes at its beginning and at its end.
_ENDS_BYTES = 1024


class Slice:
    """Bytes of an open file that are a file by themselves.

    Args:
        file: that they are in.
        begin, size_bytes: where they lie there.
    """

    def __init__(self, file: OpenFile, begin: int, size_bytes: int) -> None:
        self.file, self.path, self.begin, self.size_bytes = file, file.path, begin, size_bytes
        self._tail_offset = max(size_bytes - _ENDS_BYTES, 0)
        self._head = self._tail = b""  # until they are read

    @staticmethod
    def read_ends(slices: Iterable[Slice]) -> None:
        """Have the ends of many there, all asked for before the first is waited for.

        Raises:
            IoError: the storage refuses it.
        """
        in_order = sorted(slices, key=lambda one: (one.path, one.begin))
        for _, grouped in itertools.groupby(in_order, key=lambda one: one.path):
            of_file = list(grouped)
            offsets = [at for one in of_file for at in (one.begin, one.begin + one._tail_offset)]
            file = of_file[0].file.file()
            found = engine.read_each(file.descriptor, of_file[0].path, offsets, _ENDS_BYTES)
            for one, at in zip(of_file, itertools.count(0, 2 * _ENDS_BYTES)):
                count = min(_ENDS_BYTES, one.size_bytes)
                one._head, one._tail = found[at : at + count], found[at + _ENDS_BYTES : at + _ENDS_BYTES + count]

    def at_each(self, offsets: Sequence[int], size_bytes: int) -> bytes:
        """What lies at places within it, one behind the other: `engine.read_each`."""
        file = self.file.file()
        return engine.read_each(file.descriptor, self.path, [self.begin + offset for offset in offsets], size_bytes)

    def at(self, offset: int, size_bytes: int) -> bytes:
        """Fewer than ``size_bytes`` where it ends, and none of what is not in it."""
        end = min(offset + size_bytes, self.size_bytes)
        if not 0 <= offset < end:
            return b""
        if not self._head:
            self.read_ends([self])
        if end <= len(self._head):
            return self._head[offset:end]
        if offset >= self._tail_offset:
            return self._tail[offset - self._tail_offset : end - self._tail_offset]
        return self.at_each([offset], end - offset)


def read(
    archive: Archive,
    reading: Reading,
    devices: Sequence[torch.device],
    map_location: MapLocation,
    weights_only: bool | None,
    within: AbstractContextManager[None] = _AS_IT_IS,
) -> Any:
    """The object, its storages new ones: of ``archive.storages``, each on its device. Runs ``reading``.

    Args:
        devices: where ``map_location`` puts them.
        within: entered while torch unpickles, if it has to: what becomes of its errors.

    Raises:
        pickle.UnpicklingError: what is in it is not allowed with ``weights_only``.
        CorruptData: a tensor reaches beyond its storage, or as `Reading.run` does.
        FileNotFoundError, IoError: the file is not to be had.
    """
    storages = []
    for saved, device in zip(archive.storages, devices, strict=True):
        storage = engine.new_storage(saved.size_bytes, device)
        reading.bytes_into(bytes_of_storage(storage), archive.record_of(saved), 0, f"storage {saved.key}")
        storages.append(storage)
    by_torch = False
    try:
        found = _unpickle_plain(archive, storages)  # beside reading
    except Unusual:
        by_torch = True
    finally:
        reading.run()
    if not by_torch:
        return found
    with within:
        return unpickle_by_torch(archive.file, archive.storages, storages, map_location, weights_only)


def unpickle(
    archive: Archive,
    storages: Sequence[torch.UntypedStorage],
    weights_only: bool | None,
    within: AbstractContextManager[None] = _AS_IT_IS,
) -> Any:
    """The object, its tensors on these storages for ``archive.storages``, all on the CPU. ``within``: as of `read`.

    Raises:
        pickle.UnpicklingError: what is in it is not allowed with ``weights_only``.
        CorruptData: a tensor reaches beyond its storage.
    """
    try:
        return _unpickle_plain(archive, storages)
    except Unusual:
        with within:
            return unpickle_by_torch(archive.file, archive.storages, storages, "cpu", weights_only)


def _unpickle_plain(archive: Archive, storages: Sequence[torch.UntypedStorage]) -> Any:
    by_key = {saved.key: storage for saved, storage in zip(archive.storages, storages, strict=True)}

    def rebuild(saved: SavedStorage, stored: Stored, requires_grad: bool) -> torch.Tensor:
        storage = by_key[saved.key]
        empty = torch.empty(0, dtype=stored.dtype, device=storage.device)
        first = stored.offset // stored.dtype.itemsize
        return empty.set_(storage, first, stored.shape, stored.stride).requires_grad_(requires_grad)

    return unpickle_plain(archive.pickled, archive.record_of, rebuild, torch.nn.Parameter)


def unpickle_structure(archive: Archive) -> Any | None:
    """The object with a `Stored` in the place of each tensor; None where torch has to make it.

    Raises:
        CorruptData: a tensor reaches beyond its storage.
    """
    try:
        return unpickle_plain(
            archive.pickled, archive.record_of, lambda _, stored, __: stored, lambda stored, _: stored
        )
    except Unusual:
        return None


def save(value: Any, path: str, options: EngineOptions) -> None:
    """Write what `torch.save` would write, with its storages at multiples of a page.

    Raises:
        RuntimeError: storages that share memory are counted in different dtypes, which the format cannot say.
        IoError: the file cannot be written, or space is lacking.
        pickle.PicklingError, TypeError, AttributeError: something in it cannot be pickled.
    """
    pickled, storages = pickled_by_storages(value)
    flat = [reached(bytes_of_storage(storage)) for storage in storages]
    sizes_bytes = [one.nbytes for one in flat]
    alignment, has_checksums = torch_config.alignment_bytes(), torch_config.has_checksums()
    layout = Layout(pickled, sizes_bytes, alignment=alignment, has_checksums=has_checksums)
    write_archives(path, [(layout, flat)], [], options)


class Layout:
    """Where the parts of an archive go, before a byte of it is written.

    Args:
        pickled: the content of "data.pkl".
        sizes_bytes: of the storages that it refers to as "0", "1" and so on.
        begin: where it begins in its file.
        alignment: of every record in bytes; those of a page and more lie on whole pages.
        has_checksums: False: zeros stand in the place of every CRC-32, as torch writes them.

    Attributes:
        begin, end: where it lies in its file.
        offsets: of its storages in the file: on whole pages of it, where they are not short.
    """

    def __init__(
        self,
        pickled: bytes,
        sizes_bytes: Sequence[int],
        begin: int = 0,
        alignment: int = torch_config.SMALL_ALIGNMENT,
        has_checksums: bool = True,
    ) -> None:
        self._has_checksums = has_checksums
        self._contents = {"data.pkl": pickled, "byteorder": sys.byteorder.encode(), "version": _VERSION}
        records = [(f"{_PREFIX}{name}", len(content), alignment) for name, content in self._contents.items()]
        for key, size_bytes in enumerate(sizes_bytes):
            records.append((f"{_PREFIX}data/{key}", size_bytes, PAGE_BYTES if size_bytes >= PAGE_BYTES else alignment))
        self._placed = zip_layout.place(records, begin)
        self.begin = begin
        self.end = begin + self._placed[-1].end + zip_layout.directory_bytes(self._placed)
        self.offsets = [begin + record.offset for record in self._placed[len(self._contents) :]]

    def frame(self, checksums: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """All but the storages, whose CRC-32s it holds: bytes, and where they go in the file, as checksums come."""
        contents = itertools.chain(self._contents.values(), itertools.repeat(b""))
        all_checksums = []
        for crc32 in itertools.chain(map(zlib.crc32, self._contents.values()), checksums):
            record = self._placed[len(all_checksums)]
            all_checksums.append(crc32 if self._has_checksums else 0)
            yield self.begin + record.header_offset, record.header(all_checksums[-1]) + next(contents)
        directory = zip_layout.directory(self._placed, all_checksums)
        yield self.end - len(directory), directory


def write_archives(
    path: str,
    archives: Sequence[tuple[Layout, Sequence[torch.Tensor]]],
    others: Sequence[Extent],
    options: EngineOptions,
) -> list[list[int]]:
    """A file of archives, each with its storages (uint8, one dimension), and of other bytes.

    Returns:
        The CRC-32 of each archive's storages.

    Raises:
        IoError: the file cannot be written, or space is lacking.
    """
    ends = [layout.end for layout, _ in archives] + [offset + content.nbytes for offset, content in others]
    storages = [extent for layout, flat in archives for extent in zip(layout.offsets, flat, strict=True)]
    checksums: list[list[int]] = []
    with Writing(path, max(ends, default=0), options) as writing:
        with closing(writing.written([*storages, *others])) as taken:
            for layout, flat in archives:
                checksums.append([])
                writing.write_bytes(layout.frame(_noted(itertools.islice(taken, len(flat)), checksums[-1])))
            collections.deque(taken, maxlen=0)  # those of the others
        writing.commit()
    return checksums


def _noted(values: Iterable[int], where: list[int]) -> Iterator[int]:
    for value in values:
        where.append(value)
        yield value


@functools.lru_cache(maxsize=1024)  # the same layer comes again and again
def pickled_tensor(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """Of a tensor on the CPU whose storage has just its elements, without gaps."""
    untouched = torch.empty_strided(shape, stride, dtype=dtype)  # memory that costs nothing
    return pickled_by_storages(untouched)[0]


# Types of most of what is in a pickle.
_NO_STORAGES = frozenset({str, int, bool, tuple, type(None), dict, collections.OrderedDict, torch.Tensor})


@dataclass(slots=True)
class _Elements:
    """What a plain tensor refers to, in the place of torch's TypedStorage, which is slow to make."""

    storage: torch.UntypedStorage
    dtype: torch.dtype


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether torch pickles a `torch.Tensor` by `_rebuild_tensor_v2`, without state, metadata or a warning."""
    return (
        tensor.dtype in storage_types()  # `_rebuild_tensor_v3` is for newer ones
        and tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.is_cuda)
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and not (tensor.__dict__ or backward_hooks(tensor) or is_zero_tensor(tensor))  # torch refuses the last
    )


def pickled_by_storages(value: Any) -> tuple[bytes, list[torch.UntypedStorage]]:
    """As torch pickles it, and the storages that it refers to: the i-th as key "i".

    Raises:
        RuntimeError, pickle.PicklingError, TypeError, AttributeError: as `save` does.
    """
    pickler = _Pickler()
    try:
        pickler.dump(value)
    except Exception as error:
        explained = unpicklable(value, error, lambda leaf: _Pickler().dump(leaf))
        if explained is error:
            raise
        raise explained from error
    return pickler.pickled(), pickler.storages


class _Pickler(pickle.Pickler):
    """A class of the module: one made for each save would be garbage that only the collector frees, and with it the
    storages.

    Attributes:
        storages: that were referred to.
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
        # The same as torch and Python reduce them to; their own ways there took more than half of all the time.
        if type(saved) is torch.Tensor and _is_plain(saved):
            elements = _Elements(saved.untyped_storage(), saved.dtype)
            place = saved.storage_offset(), tuple(saved.shape), saved.stride()
            hooks = collections.OrderedDict()  # each tensor its own: one for all would be pickled as shared
            return rebuild_tensor, (elements, *place, saved.requires_grad, hooks)
        if type(saved) is collections.OrderedDict and not (saved or saved.__dict__):  # a tensor's hooks
            return collections.OrderedDict, ()
        return NotImplemented

    def persistent_id(self, saved: Any) -> tuple[str, type, str, str, int] | None:
        if type(saved) in _NO_STORAGES:
            return None
        if type(saved) is _Elements:
            storage, dtype, elements = saved.storage, saved.dtype, saved.storage.nbytes() // saved.dtype.itemsize
            of_type = getattr(torch, storage_types()[dtype])
        elif isinstance(saved, torch.storage.TypedStorage):
            storage, elements, name = parts_of_typed_storage(saved)
            dtype, of_type = saved.dtype, getattr(torch, name)
        elif torch.is_storage(saved):
            storage, dtype, elements, of_type = saved, torch.uint8, saved.nbytes(), torch.UntypedStorage
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


def _contents_of(archive: Slice) -> tuple[dict[str, Record], bytes]:
    """The records by name without the archive's own, and the pickle."""
    records, prefix = _records_of(archive)

    def content(name: str, most_bytes: int) -> bytes:
        record = records[prefix + name]
        return archive.at(record.offset - archive.begin, min(record.size_bytes, most_bytes))

    is_said = prefix + "byteorder" in records
    order = content("byteorder", _LONGEST_BYTE_ORDER) if is_said else torch_config.assumed_byte_order()
    if order != sys.byteorder.encode():
        raise NotPlain(f"its byte order is {order.decode(errors='replace')}")
    pickled = content("data.pkl", archive.size_bytes)
    return {name.removeprefix(prefix): record for name, record in records.items()}, pickled


def _records_of(archive: Slice) -> tuple[dict[str, Record], str]:
    """The zip's records by name, and what every name begins with."""
    path = archive.path
    if not recognises(archive.at(0, 4)):
        raise NotPlain("it is no zip file")
    records = {}
    try:
        directory, members = read_directory(archive.at, path, archive.size_bytes)
        for member in members:
            if member.hindrance:
                raise NotPlain(f"of record {member.name!r}, {member.hindrance}")
        headers = archive.at_each([member.header_offset for member in members], LOCAL_BYTES)
        for member, begin in zip(members, content_offsets(headers, members, directory, path), strict=True):
            name, _, size_bytes, crc32, *_ = member
            # Zero is what torch writes where it was told to take no checksums.
            known = crc32 if crc32 != 0 or size_bytes == 0 else None
            records[name] = Record(archive.file, archive.begin + begin, size_bytes, known)
    except CorruptData as error:
        if archive.begin == 0:
            raise
        message = f"{error} (counted from {archive.begin}, where its archive begins)"
        raise CorruptData(message, path, archive.begin + error.offset, error.length) from None
    pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1 or any(name.endswith("constants.pkl") for name in records):
        raise NotPlain("it is a TorchScript archive, or no archive of torch's")
    return records, pickles[0].removesuffix("data.pkl")
