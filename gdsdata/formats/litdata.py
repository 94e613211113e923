"""LitData's datasets: an index.json, and ``.bin`` files of samples.

A sample is the leaves of a tree of Python's containers. A shard here is a chunk in LitData.

Source of the format: https://github.com/Lightning-AI/litdata, ``src/litdata/streaming`` (writer,
item_loader, serializers).
"""

from __future__ import annotations

import itertools
import json
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gdsdata.errors import CorruptData
from gdsdata.formats import arrow, shards
from gdsdata.formats.caches import check_place
from gdsdata.formats.columns import FillNull, checked_fill
from gdsdata.formats.extents import Extents
from gdsdata.formats.fields import Field, FieldIndex
from gdsdata.formats.index import first_samples
from gdsdata.formats.litdata_frames import LEVELS, with_size
from gdsdata.formats.parsers.damage import damaged
from gdsdata.formats.shard_lists import checked, checked_paths, count_member, index_files, member, read_json, shard_path
from gdsdata.formats.shards import (
    ArrayFormat,
    ArrayHeads,
    Column,
    Shard,
    check_count,
    index_shards,
    missing_shards_named,
    refuse_no_shards,
    stat_shards,
    table_size,
)
from gdsdata.formats.tables import TableIndex
from gdsdata.formats.unpacking import unpacked
from gdsdata.storage.heads import read_heads
from gdsdata.storage.opened import Opened, open_file
from gdsdata.whole_numbers import shown, whole_number

# By code. None stands for torch's bfloat16: numpy has no equivalent, and LitData cannot write it
# either.
_TORCH_DTYPES = [
    *("<f4", "<f4", "<f8", "<f8", "<c8", "<c8", "<c16", "<c16", "<f2", "<f2", None),
    *("u1", "i1", "<i2", "<i2", "<i4", "<i4", "<i8", "<i8", "?", "<u2"),
]
_NUMPY_DTYPES = ["i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16", "?"]
_DTYPES = {
    kind: {code: np.dtype(name) for code, name in enumerate(names) if name is not None}
    for kind, names in (("tensor", _TORCH_DTYPES), ("numpy", _NUMPY_DTYPES))
}
_SCALARS = {"int": np.dtype("<i8"), "float": np.dtype("<f8"), "bool": np.dtype("?")}
_NO_HEADER = "no_header_"
# LitData's own (``serializers._SERIALIZERS``) whose leaves are their bytes; some write more behind
# a colon: video:mp4.
_BYTES = {
    *("str", "text", "bytes", "json", "file", "jpeg", "jpeg_array", "pil", "tif", "tifffile", "image", "video"),
    *("audio", "nifti", "mesh", "pdf", "graph"),
}
_PICKLE = "pickle"  # "graph:pickle" too
# The last bytes of shards of newer versions, whose rows are Arrow's.
_ARROW_MAGIC = b"LDARW01\0"
# Characters of a leaf's name. A key that stands once in index.json is in the names of all leaves
# below it.
_LONGEST_NAME = 1000
# The compression of shards whose zstd lies within them, by its level in index.json.
_WITHIN = {level: compression for compression, level in LEVELS.items()}
_LOADERS = ("PyTreeLoader", "TokensLoader")
# Types of data_spec whose context lists the keys of their children.
_DICTS = ("builtins.dict", "collections.OrderedDict")


@dataclass(frozen=True)
class LitData:
    """The samples of a LitData dataset. A sample is a tree, and a field is its leaf.

    A field is called as the keys and places on the way to it from the top, joined by dots: "image",
    "boxes.0"; "0" if the sample is that leaf itself. Numbers, tensors and numpy's arrays have a
    dtype; all other leaves are their bytes as they are encoded. Arrays of several axes whose shape
    varies from sample to sample, or whose dtype varies, are bytes too (see `decode_array`).

    LitData 0.2.76 writes samples of plain values, lists and dicts as rows of Arrow behind each
    shard. Their columns are then those that `Arrow` gives.

    Args:
        window_tokens: of a dataset written for TokensLoader: how many tokens a sample is (its
            ``block_size``). Windows do not overlap, and none crosses a shard's end.
        allow_pickle: give the bytes of leaves that are pickles, too. Nothing here unpickles them,
            which would run whatever code they name.
        serializers: names of serializers of your own (their data_format), whose leaves are given as
            their bytes. Any other name that LitData does not have is refused.
        unpacked: the place of shards that are compressed (zstd, ``compression_level="chunk"``,
            ``"batch"`` or ``"sample"``) once they are unpacked, as `Mds` has it; ``"user"`` is
            ``~/.cache/gdsdata/litdata``.
        without: paths of shards that are left out.
        fill_null: of rows of Arrow: takes the place of nulls among numbers, as `Arrow` has it.

    Raises:
        TypeError: ``window_tokens`` is no whole number, ``serializers`` no tuple of names,
            ``unpacked`` no place, or ``without`` no list of paths.
        ValueError: ``window_tokens`` is less than 1, or ``fill_null`` is no number.
    """

    window_tokens: int | None = None
    allow_pickle: bool = False
    serializers: tuple[str, ...] = ()
    unpacked: str | None = "user"
    without: tuple[str, ...] = ()
    fill_null: FillNull = None

    def __post_init__(self) -> None:
        if self.window_tokens is not None:
            object.__setattr__(self, "window_tokens", whole_number("window_tokens", self.window_tokens))
        if self.window_tokens is not None and self.window_tokens < 1:
            raise ValueError(f"{self}: a window has at least 1 token")
        if isinstance(self.serializers, str):
            raise ValueError(f'{self}: serializers is a tuple of names, as in ("{self.serializers}",)')
        names = tuple(self.serializers) if isinstance(self.serializers, Iterable) else (self.serializers,)
        if not all(isinstance(name, str) for name in names):
            raise TypeError(f'serializers={shown(self.serializers)} must be a tuple of names, as in ("own_format",)')
        object.__setattr__(self, "serializers", names)  # a list becomes what can be hashed
        check_place("unpacked", self.unpacked)
        object.__setattr__(self, "without", checked_paths("without", self.without))
        object.__setattr__(self, "fill_null", checked_fill(self.fill_null, "LitData"))

    def index(self, paths: list[str]) -> FieldIndex | TableIndex:
        """Find the samples of the shards that an index.json lists.

        Args:
            paths: as `Mds.index` takes them: an index.json, or a folder's files, one of which is
                called so.

        Raises:
            CorruptData: index.json or a shard is damaged, or they do not fit each other.
            ValueError: no index.json, pickles, a serializer that is not known, or several datasets
                of unlike samples. Shards that are encrypted, or of another layout (Parquet), or
                compressed otherwise than by zstd. ``window_tokens`` missing, of no use, or longer
                than every shard. Rows of Arrow that `Arrow` refuses.
            ImportError: shards are compressed with zstd, and the extra ``gdsdata[zstd]`` is
                lacking, or they have rows of Arrow, and ``gdsdata[tables]`` is.
            FileNotFoundError, IoError: a file is not available, or there is no space for unpacked
                shards.
        """
        found: list[Shard] = []
        tokens: list[int] = []
        samples: dict[str, Any] = {}
        index_paths = index_files(paths, "LitData")
        for path in index_paths:
            content = read_json(path)
            config = member(content, "config", dict, path)
            _refuse_other_layouts(config, path)
            if samples and (other := _samples(config, path)) != samples:
                raise ValueError(
                    f"{path} has samples {other}, and {index_paths[0]} {samples}: read them as separate datasets"
                )
            samples = _samples(config, path)
            for record in member(content, "chunks", list, path):
                record = checked(record, dict, path, "a chunk")
                shard = _shard(record, config, path)
                if shard.is_one_of(self.without):
                    continue
                found.append(with_size(shard) if shard.compression in LEVELS else shard)
                if samples["item_loader"] == "TokensLoader":
                    tokens.append(count_member(record, "dim", path))
        refuse_no_shards(found, index_paths)
        has_tokens = samples["item_loader"] == "TokensLoader"
        if self.window_tokens is not None and not has_tokens:
            raise ValueError(f"{path} was written for PyTreeLoader, so its samples are whole: leave window_tokens out")
        if not has_tokens and _has_rows(found[0]):
            return self._index_rows(found)
        if self.fill_null is not None:
            raise ValueError(f"{path}: its shards have no rows of Arrow: leave fill_null out")
        columns = self._columns(samples, path)
        found = unpacked(found, self.unpacked, "litdata")
        if has_tokens:
            return self._index_tokens(found, tokens, columns, path)
        return index_shards(found, columns)

    def _index_rows(self, found: list[Shard]) -> FieldIndex | TableIndex:
        """Index rows of Arrow behind each shard."""
        stat_shards(found, lambda shard: table_size(shard.samples))
        paths = [shard.path for shard in found]
        with missing_shards_named(found):
            index = arrow.index_files(paths, None, self.fill_null, _place_of_rows)
        for shard, rows in zip(found, np.diff(index.first_sample).tolist(), strict=True):
            if rows != shard.samples:
                said = f"it has {rows} rows, and {shard.listed_in} says {shard.samples}"
                raise damaged(shard.path, 0, shard.size_bytes, said)
        return index

    def _columns(self, samples: dict[str, Any], path: str) -> list[Column]:
        names = _leaf_names(samples["data_spec"], len(samples["data_format"]), path)
        for name, format in zip(names, samples["data_format"], strict=True):
            if _PICKLE in format.split(":") and not self.allow_pickle:
                raise ValueError(
                    f"{path}: leaf {name!r} holds pickles, which may run any code when they are read: write it as "
                    f"numbers, arrays, text or bytes, or have its bytes with LitData(allow_pickle=True)"
                )
            kind = format.partition(":")[0]
            known = kind in (*_SCALARS, *_BYTES, *_DTYPES, _PICKLE) or kind.startswith(_NO_HEADER)
            if not known and format not in self.serializers:
                raise ValueError(
                    f"{path}: leaf {name!r} has the data_format {reprlib.repr(format)}, which LitData does not have: "
                    f"if it is a serializer of your own, have its bytes with LitData(serializers=({format[:80]!r},)); "
                    f"else write the dataset again"
                )
        return [_column(name, format, path) for name, format in zip(names, samples["data_format"], strict=True)]

    def _index_tokens(self, found: list[Shard], tokens: list[int], columns: list[Column], path: str) -> FieldIndex:
        """Index windows of the ``tokens`` tokens that follow each shard's table.

        The table itself is of no use.
        """
        dtype = columns[0].field.dtype
        if len(columns) != 1 or dtype is None or columns[0].array is not None:
            raise CorruptData(f"{path}: data_format is {columns}, and not of one array, as TokensLoader has it", path)
        if self.window_tokens is None:
            raise ValueError(
                f"{path} was written for TokensLoader: say with window_tokens= how many tokens a sample is"
            )
        size_bytes, mtime_ns = stat_shards(found, lambda shard: table_size(shard.samples))
        heads, _, _ = read_heads([shard.path for shard in found], 4)
        for shard, head, count in zip(found, heads, tokens, strict=True):
            check_count(head, shard)
            if table_size(shard.samples) + count * dtype.itemsize != shard.size_bytes:
                raise CorruptData(
                    f"{shard.path}: index.json says {count} tokens of {dtype.str} behind {shard.samples} items' "
                    f"offsets, which do not make up its {shard.size_bytes} bytes; write it again",
                    shard.path,
                    table_size(shard.samples),
                    shard.size_bytes - table_size(shard.samples),
                )
        windows = [count // self.window_tokens for count in tokens]
        if not any(windows):
            raise ValueError(f"no shard of {path} has {self.window_tokens} tokens, the longest {max(tokens)}")
        window_bytes = self.window_tokens * dtype.itemsize
        begin = [
            table_size(shard.samples) + np.arange(count, dtype=np.int64) * window_bytes
            for shard, count in zip(found, windows, strict=True)
        ]
        begin_bytes = np.concatenate(begin)[:, None]
        return FieldIndex(
            paths=[shard.path for shard in found],
            size_bytes=size_bytes,
            mtime_ns=mtime_ns,
            first_sample=first_samples(windows),
            fields=(Field(columns[0].field.name, dtype, (self.window_tokens,)),),
            extents=Extents.of(begin_bytes, np.full_like(begin_bytes, window_bytes)),
        )


def _other_layout(path: str, what: str) -> ValueError:
    return ValueError(
        f"{path}: this dataset has {what}, which cannot be read: write it again without (see litdata.optimize)"
    )


def _refuse_other_layouts(config: dict[str, Any], path: str) -> None:
    if config.get("encryption") is not None:
        raise _other_layout(path, "encryption")
    if (level := config.get("compression_level")) not in (None, "", "chunk", *_WITHIN):
        raise _other_layout(path, f"compression_level={reprlib.repr(level)}")
    if (loader := config.get("item_loader", _LOADERS[0])) not in _LOADERS:
        raise _other_layout(path, f"the layout of {reprlib.repr(loader)}")


def _has_rows(shard: Shard) -> bool:
    """Return whether a shard has rows of Arrow behind it, as newer versions write."""
    if shard.packed is not None:  # they are not packed once more
        return False
    with missing_shards_named([shard]), open_file(shard.path) as file:
        if file.read(max(0, file.size_bytes - len(_ARROW_MAGIC)), len(_ARROW_MAGIC)) != _ARROW_MAGIC:
            return False
        end_of_samples = int.from_bytes(file.read(4 + 4 * shard.samples, 4), "little")
        return end_of_samples != file.size_bytes  # else the last sample just ends like that


def _place_of_rows(file: Opened) -> tuple[int, int]:
    """Return where the rows of Arrow lie in a shard: begin and length in bytes.

    Behind them are u32 their length, and the magic.
    """
    end = file.size_bytes - len(_ARROW_MAGIC) - 4
    tail = file.read(max(0, end), len(_ARROW_MAGIC) + 4)
    length = int.from_bytes(tail[:4], "little")
    if end < 0 or tail[4:] != _ARROW_MAGIC or not 0 < length <= end:
        raise damaged(
            file.path, max(0, end), len(tail), "it does not end as rows of Arrow do, and other shards have them"
        )
    return end - length, length


def _samples(config: dict[str, Any], path: str) -> dict[str, Any]:
    """Return data_format (list[str], not empty), data_spec and item_loader."""
    formats = [checked(one, str, path, "one of data_format") for one in member(config, "data_format", list, path)]
    if not formats:
        raise CorruptData(f"{path}: data_format is empty: write it again", path)
    # Old versions did not name it, and had this rule.
    implied = _LOADERS[len(formats) == 1 and formats[0].startswith("no_header_tensor")]
    return {
        "data_format": formats,
        "data_spec": member(config, "data_spec", (str, type(None)), path),
        "item_loader": config.get("item_loader", implied),
    }


def _shard(record: dict[str, Any], config: dict[str, Any], path: str) -> Shard:
    """Return a shard as listed in ``path``, unpacked."""
    name = member(record, "filename", str, path)
    packed = shard_path(name, path)
    if (compression := _WITHIN.get(config.get("compression_level") or "")) is not None:
        # Its size is known when its head is read.
        return Shard(f"{packed}.unpacked", 0, count_member(record, "chunk_size", path), path, packed, compression)
    size_bytes, samples = count_member(record, "chunk_bytes", path), count_member(record, "chunk_size", path)
    if not (compression := member(config, "compression", (str, type(None)), path)):
        return Shard(packed, size_bytes, samples, path)
    # "chunk-0-0.zstd.bin", unpacked "chunk-0-0.bin"
    return Shard(shard_path(name.replace(f".{compression}", ""), path), size_bytes, samples, path, packed, compression)


def _leaf_names(spec: str | None, count: int, path: str) -> list[str]:
    """Return the names of ``count`` leaves by data_spec, JSON of torch's pytree."""
    try:
        leaves = map(str, range(count)) if spec is None else _walk(json.loads(spec)[1], (), path)
        names = list(itertools.islice(leaves, count + 1))  # one more than there may be shows it
    except (ValueError, LookupError, TypeError, RecursionError) as reason:
        raise CorruptData(f"{path}: data_spec is no tree: {reason}; write it again", path) from None
    if len(names) != count or len(set(names)) < count:
        raise CorruptData(
            f"{path}: data_spec names {len(names)} leaves ({len(set(names))} different ones), and data_format has "
            f"{count}; write it again",
            path,
        )
    return names


def _walk(said: object, way: tuple[str, ...], path: str) -> Iterator[str]:
    node = checked(said, dict, path, "a node")
    children = member(node, "children_spec", list, path)
    if node.get("type") is None:
        if len(name := ".".join(way)) > _LONGEST_NAME:
            raise ValueError(f"a leaf's name of {len(name)} characters")
        yield name or "0"
        return
    keys = json.loads(node["context"]) if node["type"] in _DICTS else range(len(children))
    for key, child in zip(keys, children, strict=True):
        yield from _walk(child, (*way, str(key)), path)


def _column(name: str, format: str, path: str) -> Column:
    """Return the leaf that a data_format says; every leaf carries its size."""
    kind, _, code = format.partition(":")
    if kind in _SCALARS:
        return Column(Field(name, _SCALARS[kind], ()), _SCALARS[kind].itemsize, carries_size=True)
    if kind in _DTYPES:
        return Column(Field(name), None, carries_size=True, array=_array_format(kind))
    if kind.startswith(_NO_HEADER) and (dtypes := _DTYPES.get(kind.removeprefix(_NO_HEADER))):
        dtype = dtypes.get(int(code)) if code.isdecimal() and len(code) < 3 else None
        if dtype is None:
            raise CorruptData(
                f"{path}: leaf {name!r} has the unknown dtype {reprlib.repr(format)}; write it again", path
            )
        return Column(Field(name, dtype), None, carries_size=True)
    return Column(Field(name), None, carries_size=True)


def _array_format(kind: str) -> ArrayFormat:
    """Return the format of torch's tensors, or of numpy's arrays.

    A head is a u32 for the dtype, one for the number of axes, and one for each axis. Newer versions
    of LitData write those of torch's tensors, but not of numpy's arrays, big endian: small numbers
    show it.
    """

    def parse(heads: np.ndarray) -> ArrayHeads:
        words = np.ascontiguousarray(heads[:, :8]).view("<u4")
        big = words.max(axis=1) >= 1 << 24 if kind == "tensor" else np.zeros(len(words), bool)
        code, axes = np.where(big[:, None], words.byteswap(), words).astype(np.int64).T
        return ArrayHeads(code, axes, np.full(len(heads), 4), big, axes_at=8)

    return ArrayFormat(_DTYPES[kind], parse)


def decode_array(data: bytes, kind: Literal["tensor", "numpy"]) -> np.ndarray:
    """Return a sample's array, for leaves that `LitData` returns as bytes.

    Args:
        data: of the whole leaf of one sample; the result is a view of it.
        kind: its data_format.

    Raises:
        CorruptData: its head makes no sense or does not fit its length.
    """
    return shards.decode_array(data, _array_format(kind))
