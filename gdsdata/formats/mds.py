"""MosaicML Streaming's shards: an index.json, and ``.mds`` files, or shards of text (`mds_text`).

A sample has named columns.

Source of the format: https://github.com/mosaicml/streaming, ``streaming/base/format/mds`` (version
2). Between a shard's table of offsets and its samples stands a copy of what index.json says of it,
which is not read.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gdsdata.errors import CorruptData
from gdsdata.formats import mds_text, shards
from gdsdata.formats.caches import check_place
from gdsdata.formats.fields import Field, FieldIndex
from gdsdata.formats.mds_text import TextFile, index_text, text_file
from gdsdata.formats.shard_lists import (
    LARGEST_BYTES,
    checked,
    checked_paths,
    count_member,
    index_files,
    member,
    read_json,
    shard_path,
)
from gdsdata.formats.shards import ArrayFormat, ArrayHeads, Column, Shard, index_shards, refuse_no_shards
from gdsdata.formats.tables import TableIndex
from gdsdata.formats.unpacking import unpacked

_VERSION = 2

# The codes of an array's dtype; the names are encodings of single elements too.
_ARRAY_DTYPES = {
    **dict(zip((8, 16, 32, 64), ("uint8", "uint16", "uint32", "uint64"), strict=True)),
    **dict(zip((9, 17, 33, 65), ("int8", "int16", "int32", "int64"), strict=True)),
    **dict(zip((18, 34, 66), ("float16", "float32", "float64"), strict=True)),
}
_SCALARS = {"int": np.dtype("<i8"), **{name: np.dtype(name).newbyteorder("<") for name in _ARRAY_DTYPES.values()}}
# Text, media and JSON, as they were encoded.
_BYTES = {
    *("bytes", "str", "str_int", "str_float", "str_decimal", "json"),
    *("jpeg", "png", "pil", "jpeg_array", "jpegarray", "list[jpeg]", "list[png]", "list[pil]"),
}
_PICKLE = "pkl"
_NDARRAY = re.compile(r"ndarray(:(?P<dtype>\w+)(:(?P<shape> *[1-9]\d{0,9} *(, *[1-9]\d{0,9} *){0,63}))?)?", re.ASCII)


@dataclass(frozen=True)
class Mds:
    """The samples of a MosaicML Streaming dataset; a field is a column.

    Numbers ("int", "uint8" to "float64") and arrays ("ndarray") have a dtype; all other columns are
    their bytes as they are encoded: UTF-8, JSON, JPEG, PNG. Arrays of several axes whose shape
    varies from sample to sample, or whose dtype varies, are bytes too (see `decode_array`).

    Shards of JSON, CSV, TSV and XSV have columns of the encodings "int" (int64), "float" (float64)
    and "str" (UTF-8). They are read and decoded as a whole, as Parquet's row groups are
    (`gdsdata.RowGroups`). A line takes up to 48 times its bytes while it is decoded, so samples of
    many MB belong in shards of MDS.

    Args:
        allow_pickle: give the bytes of columns that are pickles ("pkl"), too. Nothing here
            unpickles them, which would run whatever code they name.
        unpacked: the place of shards that are compressed as a whole (zstd, gz, bz2, br, snappy)
            once they are unpacked. That is done once, by the processor, and they are kept while the
            compressed file is the same. They are compared with a hash that index.json has, if it
            has one (``MDSWriter(hashes=["sha1"])``): zstd itself notices little damage. ``"user"``:
            in ``~/.cache/gdsdata/mds`` (``XDG_CACHE_HOME`` moves it); ``"beside"``: in hidden files
            beside the data; else in the folder of this path; None: such shards are refused. Shards
            that already lie unpacked beside themselves are read there in any case.
        without: paths of shards that are left out.

    Raises:
        TypeError: ``unpacked`` is no place, or ``without`` no list of paths.
    """

    allow_pickle: bool = False
    unpacked: str | None = "user"
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_place("unpacked", self.unpacked)
        object.__setattr__(self, "without", checked_paths("without", self.without))

    def index(self, paths: list[str]) -> FieldIndex | TableIndex:
        """Find the samples of the shards that an index.json lists.

        Args:
            paths: an index.json, or a folder's files, one of which is called so; those beside it
                are not looked at, because it says what they are. If there are several, one dataset
                follows the other. Shards lie in its folder or below.

        Raises:
            CorruptData: index.json or a shard is damaged, or they do not fit each other.
            ValueError: no index.json, an encoding that is not known, a pickle, or shards of unlike
                columns or formats, or that are compressed otherwise.
            ImportError: shards are compressed, or text, and the extra is lacking:
                ``gdsdata[zstd]``, or ``gdsdata[tables]`` for br, snappy, and text.
            FileNotFoundError, IoError: a file is not available, or there is no space for unpacked
                shards.
        """
        found: list[Shard] = []
        texts: list[TextFile] = []
        columns: list[Column] = []
        index_paths = index_files(paths, "Mds")
        for path in index_paths:
            for record in _records(path):
                shard = _shard(record, path)
                if shard.is_one_of(self.without):
                    continue
                if record["format"] in mds_text.FORMATS:
                    texts.append(text_file(record, path))
                elif not columns:
                    first, columns = _declared(record, path), self._columns(_declared(record, path), path)
                elif (declared := _declared(record, path)) != first:
                    raise ValueError(
                        f"{found[0].path} has the columns {first}, and {shard.path} {declared}: read them as separate "
                        f"datasets"
                    )
                found.append(shard)
        if texts and (columns or len(texts) < len(found)):
            raise ValueError(f"{', '.join(index_paths)}: some shards are text, and others MDS: read them separately")
        refuse_no_shards(found, index_paths)
        found = unpacked(found, self.unpacked, "mds")
        return index_text(found, texts) if texts else index_shards(found, columns)

    def _columns(self, declared: list[tuple[str, str, int | None]], path: str) -> list[Column]:
        columns = [_column(name, encoding, size, path) for name, encoding, size in declared]
        for name, encoding, _ in declared:
            if encoding == _PICKLE and not self.allow_pickle:
                raise ValueError(
                    f"{path}: column {name!r} holds pickles, which may run any code when they are read: encode it "
                    f"otherwise, or have its bytes with Mds(allow_pickle=True)"
                )
        return columns


def _records(path: str) -> Iterator[dict[str, Any]]:
    """Yield what an index.json says of each shard, of a format that is known."""
    content = read_json(path)
    if (version := member(content, "version", int, path)) != _VERSION:
        raise ValueError(
            f"{path} is of version {version} of MDS: write it with a mosaicml-streaming of version 2's time"
        )
    for record in member(content, "shards", list, path):
        record = checked(record, dict, path, "a shard")
        if (format := member(record, "format", str, path)) not in ("mds", *mds_text.FORMATS):
            raise ValueError(
                f"{path} lists shards of format {format!r}: write the dataset with a writer of mosaicml-streaming, as "
                f"MDSWriter"
            )
        if (version := member(record, "version", int, path)) != _VERSION:
            raise ValueError(f"{path} lists a shard of version {version} of MDS: write it with version {_VERSION}")
        yield record


def _shard(record: dict[str, Any], path: str) -> Shard:
    """Return a shard that is listed in ``path``."""
    raw = member(record, "raw_data", dict, path)
    shard = Shard(
        shard_path(raw.get("basename"), path),
        count_member(raw, "bytes", path),
        count_member(record, "samples", path),
        path,
    )
    if packed := member(record, "zip_data", (dict, type(None)), path):
        shard = shard._replace(
            packed=shard_path(packed.get("basename"), path),
            compression=member(record, "compression", str, path),
            packed_bytes=count_member(packed, "bytes", path),
            hashes=_hashes(raw, path),
        )
    return shard


def _hashes(raw: dict[str, Any], path: str) -> dict[str, str]:
    """Return the hashes of a shard's bytes, by algorithm, in lower case."""
    hashes = member(raw, "hashes", (dict, type(None)), path) or {}
    return {name: checked(digest, str, path, f"its hash {name}").lower() for name, digest in hashes.items()}


def _declared(record: dict[str, Any], path: str) -> list[tuple[str, str, int | None]]:
    """Return the columns of a shard: name, encoding, size in bytes."""

    def values(key: str, *kinds: type) -> list[Any]:
        return [checked(value, kinds, path, f"one of {key}") for value in member(record, key, list, path)]

    names, encodings = values("column_names", str), values("column_encodings", str)
    sizes = values("column_sizes", int, type(None))
    if not len(names) == len(encodings) == len(sizes) or len(set(names)) < len(names) or not names:
        raise CorruptData(
            f"{path}: a shard has {len(names)} column_names ({len(set(names))} different ones), {len(encodings)} "
            f"column_encodings and {len(sizes)} column_sizes; write it again",
            path,
        )
    return list(zip(names, encodings, sizes, strict=True))


def _column(name: str, encoding: str, size_bytes: int | None, path: str) -> Column:
    """Return a column as declared in ``path``."""
    array = None
    if encoding in _SCALARS:
        field = Field(name, _SCALARS[encoding], ())
    elif encoding in _BYTES or encoding == _PICKLE:
        field = Field(name)
    elif encoding.split(":")[0] == "ndarray":
        dtype, shape = _parse_ndarray(encoding, path)
        field = Field(name, dtype, shape)
        array = _array_format(dtype) if shape is None else None
    else:
        known = ", ".join(sorted({*_SCALARS, *_BYTES, "ndarray"}))
        raise ValueError(
            f"{path}: column {name!r} has the encoding {reprlib.repr(encoding)}; what can be read is {known}"
        )
    expected = None
    if field.dtype is not None and field.shape is not None:
        expected = field.dtype.itemsize * math.prod(field.shape)
    if size_bytes != expected or (expected or 0) > LARGEST_BYTES:
        raise CorruptData(
            f"{path}: column {name!r} has a size of {size_bytes} bytes, and its encoding {encoding!r} has {expected}; "
            f"write it again",
            path,
        )
    return Column(field, size_bytes, carries_size=size_bytes is None, array=array)


def _parse_ndarray(encoding: str, path: str) -> tuple[np.dtype | None, tuple[int, ...] | None]:
    """Return dtype and shape of ``ndarray[:dtype[:shape]]``; None: samples differ."""
    said = _NDARRAY.fullmatch(encoding)
    if said is None or (said["dtype"] is not None and said["dtype"] not in _ARRAY_DTYPES.values()):
        raise CorruptData(f"{path}: there is no encoding {reprlib.repr(encoding)}; write it again", path)
    dtype = None if said["dtype"] is None else _SCALARS[said["dtype"]]
    shape = None if said["shape"] is None else tuple(map(int, said["shape"].split(",")))
    return dtype, shape


def _array_format(dtype: np.dtype | None) -> ArrayFormat:
    """Return the format of arrays with their own shape and, without ``dtype``, dtype.

    A head is the dtype's code, a byte of axes, then the axes' sizes.
    """
    dtypes = {code: _SCALARS[name] for code, name in _ARRAY_DTYPES.items() if dtype is None or dtype == _SCALARS[name]}
    axes_byte = 1 if dtype is None else 0

    def parse(heads: np.ndarray) -> ArrayHeads:
        code = heads[:, 0].astype(np.int64) if dtype is None else np.full(len(heads), next(iter(dtypes)))
        form = heads[:, axes_byte].astype(np.int64)
        return ArrayHeads(code, form >> 2, 1 << (form & 3), np.zeros(len(heads), bool), axes_at=axes_byte + 1)

    return ArrayFormat(dtypes, parse)


def decode_array(data: bytes, encoding: str = "ndarray") -> np.ndarray:
    """Return a sample's array, for columns that `Mds` returns as bytes.

    Args:
        data: of the whole column of one sample; the result is a view of it.
        encoding: of the column, without a shape.

    Raises:
        CorruptData: its head makes no sense or does not fit its length, or there is no such
            encoding.
    """
    dtype, shape = _parse_ndarray(encoding, "decode_array")
    if shape is not None:
        raise ValueError(f"decode_array: columns of {encoding!r} have no heads; their fields have dtype and shape")
    return shards.decode_array(data, _array_format(dtype))
