"""The archive that `torch.save` writes: a zip of plain records.

``data.pkl`` has the pickled object, ``data/N`` the bytes of a storage. Opening an archive reads the
zip's directory and the pickle. It finds the storages that the pickle refers to, so they can be read
before anything is unpickled.

Sources: PKWARE's APPNOTE.TXT 4.3 for the zip, torch.serialization for what is in it.
"""

from __future__ import annotations

import sys
import zlib
from dataclasses import dataclass
from typing import BinaryIO

from gdsdata.checkpoint.open_file import OpenFile
from gdsdata.checkpoint.record_checksums import warn_of_none
from gdsdata.checkpoint.stored import Record
from gdsdata.checkpoint.torch_zip.file_slice import FileSlice
from gdsdata.checkpoint.torch_zip.unpickling import NotPlain, SavedStorage, StorageReferences, storages_of
from gdsdata.errors import CorruptData
from gdsdata.fork_safe import cached_property
from gdsdata.formats.parsers.zip_directory import LOCAL_BYTES, content_offsets, read_directory

_PIECE_BYTES = 1 << 20
_MOST_BYTE_ORDER_BYTES = 16  # it says "little" or "big"; a damaged file may claim gigabytes


@dataclass(frozen=True)
class Archive:
    """A file that `torch.save` wrote, or a part of a file.

    Attributes:
        file: the file; None if the archive is in no file.
        records: where each record lies, by its name within the archive ("data.pkl", "data/0").
        pickled: the content of "data.pkl".
    """

    file: OpenFile | None
    records: dict[str, Record]
    pickled: bytes

    @property
    def path(self) -> str:
        return "" if self.file is None else self.file.path

    @cached_property
    def references(self) -> StorageReferences:
        """The pickle's references to storages.

        Raises:
            NotPlain: only torch.load can find them.
            CorruptData: the file does not have one of these storages.
        """
        references = storages_of(self.pickled)
        for storage in references.storages:
            self.record_of(storage)
        return references

    @property
    def storages(self) -> list[SavedStorage]:
        """The storages in the order in which torch requests them while it unpickles.

        Raises as `references` does.
        """
        return self.references.storages

    def record_of(self, storage: SavedStorage) -> Record:
        """Return the record of a storage.

        Raises:
            CorruptData: the file has no such record, or one of another size.
        """
        record = self.records.get(f"data/{storage.key}")
        if record is None or record.size_bytes != storage.size_bytes:
            there = "is not there" if record is None else f"has {record.size_bytes} bytes"
            message = f"'{self.path}': storage {storage.key} of {storage.size_bytes} bytes {there}"
            raise CorruptData(message, self.path)
        return record


def is_zip(head: bytes) -> bool:
    """Return whether a file that begins with these bytes can be an archive."""
    return head.startswith(b"PK\x03\x04")


def checksum_of(crc32: int, size_bytes: int) -> int | None:
    """Return the checksum of a record that says ``crc32``.

    None if torch's checksums were switched off: it writes zero then.
    """
    return crc32 if crc32 != 0 or size_bytes == 0 else None


def open_archive(file: OpenFile) -> Archive:
    """Find the place of each record in a file.

    Raises:
        NotPlain: the file is old or unusual, and torch.load reads it.
        CorruptData: the zip is damaged: its records do not lie within the file.
        IoError: the storage refuses the read.
    """
    return open_slice(FileSlice(file, 0, file.size_bytes, file.ends_bytes))


def open_slice(archive: FileSlice) -> Archive:
    """Do as `open_archive` does, in a part of a file."""
    records, prefix = _records_of(archive)

    def content(name: str, most_bytes: int) -> bytes:
        record = records[prefix + name]
        return archive.at(record.offset - archive.begin, min(record.size_bytes, most_bytes))

    if prefix + "byteorder" in records:
        order = content("byteorder", _MOST_BYTE_ORDER_BYTES)
    else:
        from gdsdata.checkpoint.torch_zip import torch_config  # late: it takes 2 ms, and few files need it

        order = torch_config.assumed_byte_order()
    if order != sys.byteorder.encode():
        raise NotPlain(f"its byte order is {order.decode(errors='replace')}")
    pickled = content("data.pkl", archive.size_bytes)
    _check_pickle(pickled, records[prefix + "data.pkl"], archive.path)
    by_name = {name.removeprefix(prefix): record for name, record in records.items()}
    return Archive(archive.file, by_name, pickled)


def check_records(reader: BinaryIO, path: str, place: str) -> None:
    """Compare the checksum of each record of an archive that torch itself reads: it compares none.

    A file from before torch 1.6 is no zip, and has none. A warning says that.

    Args:
        reader: at the archive's beginning.
        path: of its file.
        place: words for it, with the path.

    Raises:
        CorruptData: one differs, or a record cannot be unpacked.
        OSError: the storage refuses the read.
    """
    if not is_zip(reader.read(4)):
        return warn_of_none(path)
    import zipfile  # late: few files need it

    name = "the zip's directory"
    try:
        archive = zipfile.ZipFile(reader)
        for member in archive.infolist():
            name = member.filename
            if checksum_of(member.CRC, member.file_size) is None:
                warn_of_none(path)
            else:
                with archive.open(member) as record:
                    while record.read(_PIECE_BYTES):
                        pass
    except OSError:
        raise
    except Exception as error:  # zipfile, its packers and struct raise many kinds
        message = f"{place}: {name} is damaged: {error or type(error).__name__}. Fetch the file again"
        raise CorruptData(message, path) from error


def _check_pickle(pickled: bytes, record: Record, path: str) -> None:
    """Compare the checksum of a pickle, whose numbers and names could be wrong in silence.

    Raises:
        CorruptData: it differs.
    """
    if record.crc32 is not None and zlib.crc32(pickled) != record.crc32:
        message = f"'{path}': the checksum of data.pkl differs, in which names and numbers stand: write the file again"
        raise CorruptData(message, path, record.offset, record.size_bytes)


def _records_of(archive: FileSlice) -> tuple[dict[str, Record], str]:
    """Return the zip's records by full name, and the prefix that all names share."""
    path = archive.path
    if not is_zip(archive.at(0, 4)):
        raise NotPlain("it is no zip file")
    records = {}
    try:
        directory, members = read_directory(archive.at, path, archive.size_bytes)
        for member in members:
            if member.hindrance:
                raise NotPlain(f"record {member.name!r}: {member.hindrance}")
        headers = archive.at_each([member.header_offset for member in members], LOCAL_BYTES)
        for member, begin in zip(members, content_offsets(headers, members, directory, path), strict=True):
            name, _, size_bytes, crc32, *_ = member
            records[name] = Record(archive.file, archive.begin + begin, size_bytes, checksum_of(crc32, size_bytes))
    except CorruptData as error:
        if archive.begin == 0:
            raise
        message = f"{error} (counted from {archive.begin}, where its archive begins)"
        raise CorruptData(message, path, archive.begin + error.offset, error.length) from None
    pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1 or any(name.endswith("constants.pkl") for name in records):
        raise NotPlain("it is a TorchScript archive, or no archive of torch's")
    return records, pickles[0].removesuffix("data.pkl")
