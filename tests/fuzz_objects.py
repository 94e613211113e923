"""Objects of a hostile server, which claims other sizes than it has: a target of `fuzz.py`.

An input is a folder of objects, and a file with the sizes that the server claims for them. Ranges
are read as the engine would read them, but from memory.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import test_formats
import test_litdata
import test_mds
import test_megatron
import test_tar
import test_tfrecord
from fuzz_target import Files, Target, each
from safetensors.numpy import save_file

from gdsdata.errors import IoError
from gdsdata.formats import (
    Arrow,
    LitData,
    Mds,
    Megatron,
    Npy,
    Npz,
    Parquet,
    Safetensors,
    Tar,
    TFRecord,
    tar_reading,
)
from gdsdata.storage import objects, ranges, remote_file, stores
from gdsdata.storage.store import ObjectInfo

_CLAIMS = "sizes"
_OBJECTS = "s3://lies/"


class _Liar:
    """A bucket whose sizes are those of a file, and whose bytes are those that are there."""

    def __init__(self, folder: Path) -> None:
        self.content = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != _CLAIMS}
        words = [line.split() for line in (folder / _CLAIMS).read_text("latin-1").splitlines()]
        self.claims = {pair[1]: int(pair[0]) for pair in words if len(pair) == 2 and re.fullmatch(r"\d{1,18}", pair[0])}

    def head(self, key: str) -> ObjectInfo:
        if key not in self.content:
            raise objects.missing(_OBJECTS + key)
        return ObjectInfo(_OBJECTS + key, self.claims.get(key, len(self.content[key])), "tag")

    def begin(
        self, urls: list[str], files: list[int], offsets: list[int], lengths: list[int], memory: np.ndarray
    ) -> "_Read":
        at, error = 0, None
        for file, offset, length in zip(files, offsets, lengths, strict=True):
            url = urls[file]
            assert url.startswith(_OBJECTS) and 0 <= offset and 0 < length, "no range of an object"
            assert offset + length <= self.head(url.removeprefix(_OBJECTS)).size_bytes, "a range leaves its object"
            part = self.content[url.removeprefix(_OBJECTS)][offset : offset + length]
            memory[at : at + len(part)] = np.frombuffer(part, np.uint8)
            if len(part) < length:
                error = IoError(5, f"{url}: the body is short", url, offset, length)
            at += length
        return _Read(error)


class _Read:
    def __init__(self, error: IoError | None) -> None:
        self._error = error

    def wait(self, seconds: float) -> bool:
        return True

    def ended(self) -> bool:
        return True

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        pass

    abandon = cancel


@contextlib.contextmanager
def _lying(folder: Path) -> Iterator[None]:
    """Have the objects of a folder be those of a bucket. Ranges are read from memory."""
    liar = _Liar(folder)
    before = ranges.engine, ranges._begin
    ranges.engine = SimpleNamespace(table_of=lambda urls, identities, formats: urls)  # type: ignore[assignment]
    ranges._begin = liar.begin  # type: ignore[assignment]
    stores._stores["s3", "lies"] = liar  # type: ignore[assignment]
    objects.forget(_OBJECTS)
    try:
        yield
    finally:
        ranges.engine, ranges._begin = before


_READ_AS: dict[str, Callable[[], Iterable[Any]]] = {
    "x.npy": lambda: (Npy("file"), Npy("row")),
    "x.npz": lambda: (Npz("file"),),
    "x.safetensors": lambda: (Safetensors("file"),),
    "x.tar": lambda: (Tar(index_cache=None),),
    "index.json": lambda: (Mds(), LitData()),
    "x.bin": lambda: (Megatron(),),
    "x.tfrecord": lambda: (TFRecord(check_data=False),),
    "x.arrow": lambda: (Arrow(),),
    "x.parquet": lambda: (Parquet(),),
}


def read_objects(folder: Path) -> None:
    def one(name: str, format: Any) -> None:
        with _lying(folder):
            index = format.index([_OBJECTS + name])
            assert all(path.startswith(_OBJECTS) for path in index.paths), "a path leaves the bucket"
            assert not any("\0" in path or ".." in path.split("/") for path in index.paths), "a path leaves its folder"

    names = [name for name in _READ_AS if (folder / name).exists()]
    each(functools.partial(one, name, format) for name in names for format in _READ_AS[name]())


def with_claims(write: Callable[[Path], object], claim: int | None = None) -> Callable[[Path], None]:
    """Return a seed that also writes the sizes that are claimed: the right ones, or ``claim``."""

    def write_both(folder: Path) -> None:
        write(folder)
        sizes = {path.name: claim or path.stat().st_size for path in folder.iterdir()}
        (folder / _CLAIMS).write_text("".join(f"{size} {name}\n" for name, size in sizes.items()))

    return write_both


def _write_tar(folder: Path) -> None:
    test_tar.shard(folder / "x.tar", [("0.x", b"abc"), ("0.y", b"d" * 700)], "ustar")
    (folder / "x.tar.idx").write_bytes(np.array([0, 2560], "<u8").tobytes())
    (folder / "x.idx").write_text("v1.2 1\n.x 512 3 0.x .y 1536 700 0.y\n")


def _write_safetensors(folder: Path) -> None:
    save_file({"a": np.ones((4, 4), "f4")}, folder / "x.safetensors")


def _write_arrow(folder: Path) -> None:
    table = pa.table({"a": [1, 2, 3]})
    with pa.OSFile(str(folder / "x.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    pq.write_table(table, folder / "x.parquet")


def mend_claims(files: Files) -> Files:
    """Claim again what each object has, unless a claim is far from it."""
    if len(files[_CLAIMS]) > 4096:
        return files
    lines = []
    for line in files[_CLAIMS].decode("latin-1").splitlines():
        size, _, name = line.partition(" ")
        there = len(files.get(name, b""))
        is_near = size.isdecimal() and len(size) < 19 and int(size) < 4 * there
        lines.append(f"{there if is_near else size} {name}\n")
    return {**files, _CLAIMS: "".join(lines).encode("latin-1")}


OBJECTS = Target(
    "server-objects",
    (remote_file, ranges, objects, tar_reading),
    [
        with_claims(write, claim)
        for claim in (None, 10**17)
        for write in (
            lambda folder: test_formats.write_npy(folder / "x.npy", np.ones((3, 4), "<f4"), (1, 0)),
            lambda folder: np.savez(folder / "x.npz", a=np.ones((4, 3)), b=np.arange(4, dtype=">i2")),
            _write_safetensors,
            _write_tar,
            test_mds.write_plain,
            test_litdata.write_plain,
            lambda folder: test_megatron.write_pair(folder, "x", [3, 0, 8, 5]),
            lambda folder: test_formats.write(folder / "x.tfrecord", *map(test_tfrecord.record, (b"abc", b"d" * 300))),
            _write_arrow,
        )
    ],
    read_objects,
    mend_claims,
    (b"9" * 18, b"1000000000000 ", b"../", b"\\u0000", b'"../x"', b"/etc/passwd", b"s3://other/", b"\xff" * 8),
    named=(_OBJECTS,),
)
