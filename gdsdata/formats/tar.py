"""WebDataset's tar shards.

A sample is the neighboring members whose paths are equal up to the first dot of the name. One pass
follows the headers of a file and leaves the payloads alone (`tar_members`, `tar_reading`). Its
result is kept (`tar_index`), and used while size and mtime of the file are the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np

from gdsdata.errors import CorruptData
from gdsdata.formats import caches, tar_index
from gdsdata.formats.extents import ExtentsBuilder
from gdsdata.formats.field import are_names
from gdsdata.formats.fields import Field, FieldIndex
from gdsdata.formats.index import first_samples
from gdsdata.formats.parsers.tar_members import KEY, Members, read_members, refuse_torn_samples
from gdsdata.formats.tar_reading import HeaderReader
from gdsdata.storage.opened import of_each, open_file
from gdsdata.warn import warn

# With fields=None: the samples that are looked at, and the fields that they may have. More of them
# are a mistake in the names.
_FIRST_SAMPLES = 100
_MOST_FIELDS = 64
# Files indexed at a time, so that slow storage has several opens and reads to serve. Two cores: 300
# tars take 0.56 s and not 2.33 if an open takes 2 ms. In memory 100 tars of 10,000 samples take 4.9
# s with one thread, and 8.7 with eight. benchmarks/index_starts.py shows both.
_READERS = 8

# The members of a file, its size in bytes and its last modification in ns.
_Found = tuple[Members, int, int]


@dataclass(frozen=True)
class Tar:
    """Tar shards as webdataset has them: ustar, GNU and pax, not compressed.

    A field is a member's bytes.

    A member's path up to the first dot of its name is the key, the rest is the field's name, in
    lower case: ``train/0001.seg.png`` is the field ``seg.png`` of the sample ``train/0001``.
    Members next to each other with equal keys are one sample. Left out are: what is no regular
    file, names without a dot or with one in front, and paths that begin with a part like
    ``__meta__``.

    Args:
        fields: the extensions that are wanted; others are passed over. None: all that the first 100
            samples have, with a warning of others. ``"__key__"`` is the sample's key, UTF-8: have
            it as text with ``gdsdata.Fields(decode={"__key__": "txt"})``.
        index_cache: where the index of each file is kept for the next time. ``"user"``: in
            ``~/.cache/gdsdata/tar`` (``XDG_CACHE_HOME`` moves it); ``"beside"``: in a hidden file
            beside the data; else in the folder of this path; None: nowhere.

    Raises:
        ValueError: ``fields`` is empty, a string, or names one twice.
    """

    fields: tuple[str, ...] | None = None
    index_cache: str | None = "user"

    def __post_init__(self) -> None:
        caches.check_place("index_cache", self.index_cache)
        if self.fields is None:
            return
        if not are_names(self.fields):
            raise ValueError(f'{self}: fields names extensions, each once, as in ("jpg", "cls")')
        object.__setattr__(self, "fields", tuple(self.fields))  # a list becomes what can be compared and hashed

    def index(self, paths: list[str]) -> FieldIndex:
        """Follow the headers of ``paths``, or take their kept indexes.

        A field that a sample lacks has the length -1. That no sample of any file has a field is an
        error. Indexes of other projects (``.idx``) among them are passed over.

        Raises:
            CorruptData: a header is damaged or lies, a file was cut short, members follow zeros
                that end a tar, a name has a part "..", or a sample has a field twice.
            ValueError: a compressed file, a sparse member, no samples, a field that no sample has,
                (``fields=None``) more fields than samples have, or keys are wanted and a ustar
                header has a name in two parts. Most samples have members that are not side by side.
            FileNotFoundError, IoError: a file is not available.
        """
        paths = self.data_files(paths)
        size_bytes, mtime_ns = np.empty(len(paths), np.int64), np.empty(len(paths), np.int64)
        names, counts, builder = self.fields, [], ExtentsBuilder()
        extensions: dict[str, str] = {}  # that some sample has, and the first file with it
        with_keys = self.fields is not None and KEY in self.fields
        # A kept index has no keys.
        index_cache = None if with_keys else self.index_cache
        found = of_each(
            partial(_members_of, index_cache=index_cache, with_keys=with_keys), paths, _READERS, only_if_slow=True
        )
        first = [] if names else _first_samples(found)
        names = names or first_extensions([members for members, *_ in first], paths[0])
        for i, (path, (members, size, mtime)) in enumerate(zip(paths, chain(first, found), strict=True)):
            size_bytes[i], mtime_ns[i] = size, mtime
            counts.append(members.samples)
            if members.samples:
                builder.add(*field_table(members, names))
                for extension in members.extensions[:_MOST_FIELDS]:
                    extensions.setdefault(extension, path)
        if not any(counts):
            raise ValueError(f"no samples in {paths[0]} (of {len(paths)} files): a sample's file has a name with a dot")
        extents = builder.extents()
        for field, name in enumerate(names):
            if extents.lacks_everywhere(field):
                raise ValueError(
                    f"no sample of {paths[0]} (of {len(paths)} files) has the field {name!r}: they have "
                    f"{', '.join(map(repr, extensions))}, and the key as '__key__'"
                )
        if self.fields is None:
            _warn_of_other_fields({name: path for name, path in extensions.items() if name not in names}, names)
        return FieldIndex(
            paths=paths,
            size_bytes=size_bytes,
            mtime_ns=mtime_ns,
            first_sample=first_samples(counts),
            fields=tuple(map(Field, names)),
            extents=extents,
        )

    @staticmethod
    def data_files(paths: list[str]) -> list[str]:
        """Return ``paths`` without other projects' indexes, unless only these are left."""
        return [path for path in paths if not path.endswith(".idx")] or paths


def _warn_of_other_fields(others: dict[str, str], names: tuple[str, ...]) -> None:
    """Warn of fields that are not read, because none of the first samples has them.

    Args:
        others: these fields, with a file of each.
        names: the fields that are read.
    """
    if others:
        name, path = next(iter(others.items()))
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        warn(
            f"{path}: samples have fields ({name!r}{more}) that none of the first {_FIRST_SAMPLES} samples has. They "
            f"are not read: name all that are wanted, as in format=Tar(fields={(*names, name)})"
        )


def _first_samples(found: Iterator[_Found]) -> list[_Found]:
    """Take so many files that they have the first samples."""
    first, samples = [], 0
    for one in found:
        first.append(one)
        samples += one[0].samples
        if samples >= _FIRST_SAMPLES:
            break
    return first


def first_extensions(files: Sequence[Members], path: str) -> tuple[str, ...]:
    """Return the fields that the first samples have, in the order in which they come.

    Args:
        files: the first ones.
        path: of one of them, for the error.

    Raises:
        ValueError: they are too many: the names have dots at which a key should not end.
    """
    names: dict[str, None] = {}
    left = _FIRST_SAMPLES
    for members in files:
        first = members.extension[: np.searchsorted(members.sample, left)]
        names.update((members.extensions[i], None) for i in dict.fromkeys(first.tolist()))
        left = max(0, left - members.samples)
    found = list(names)
    if len(found) > _MOST_FIELDS:
        raise ValueError(
            f"{path}: the first {_FIRST_SAMPLES} samples have {len(found)} fields ({found[0]!r}, {found[1]!r}, ...): a "
            f"sample's key ends at the first dot of the name; name the fields that are wanted, or write other names"
        )
    return tuple(found)


def field_table(members: Members, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return offset and length (bytes) of fields ``names``: int64 (samples, K) each.

    A length of -1: the sample lacks the field.
    """
    begin_bytes = np.zeros((members.samples, len(names)), np.int64)
    length_bytes = np.full_like(begin_bytes, -1)
    column_of = {name: column for column, name in enumerate(names)}
    columns = np.array([column_of.get(extension, -1) for extension in members.extensions], np.int64)
    column = columns[members.extension]
    wanted = column >= 0
    place = members.sample[wanted], column[wanted]
    begin_bytes[place], length_bytes[place] = members.begin_bytes[wanted], members.length_bytes[wanted]
    return begin_bytes, length_bytes


def _members_of(path: str, index_cache: str | None, with_keys: bool) -> _Found:
    """Return the members of a file, its size in bytes and its last modification in ns."""
    with open_file(path, at_random=True) as file:  # what is read ahead is HeaderReader's business
        said = file.size_bytes, file.mtime_ns
        kept_at = tar_index.place_of(path, index_cache)
        members = tar_index.kept_members(kept_at, *said)
        if members is None:
            key_hashes, read = array("q"), HeaderReader(file).read
            members = read_members(read, file.size_bytes, path, with_keys, key_hashes)
            refuse_torn_samples(members, key_hashes, read, path)
            if file.has_changed():
                message = f"{path} changed while it was indexed: index it when it is complete"
                raise CorruptData(message, path, 0, file.size_bytes)
            tar_index.keep(kept_at, tar_index.pack_members(members, *said))
    return members, *said
