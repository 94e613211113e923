"""A small data set of every format, for tests that hold for all formats."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import safetensors.numpy
import test_litdata
import test_mds
import test_megatron
import test_tfrecord
import zstandard
from helpers import write_records
from shard_files import edit_json, set_at

from gdsdata import formats


class Source(NamedTuple):
    """A kind of data.

    Attributes:
        write: writes files of some samples into an existing folder; 0.* first.
        format: of them.
        other: another format that finds other samples in the same files, or None.
    """

    write: Callable[[Path], object]
    format: Callable[[], object]
    other: Callable[[], object] | None = None


def _records(folder: Path) -> None:
    for i in range(3):
        write_records(folder / f"{i}.bin", 20 + i, 64, i)


def _npy(folder: Path) -> None:
    for i in range(7):
        np.save(folder / f"{i}.npy", np.full((4, 3), i, np.float32))


def _tar(folder: Path) -> None:
    for i in range(2):
        with tarfile.open(folder / f"{i}.tar", "w") as tar:
            for k in range(15):
                for extension in ("cls", "txt"):
                    member = tarfile.TarInfo(f"{k:03}.{extension}")
                    member.size = len(data := f"{extension}{i * 100 + k}".encode() * (k + 1))
                    tar.addfile(member, io.BytesIO(data))


def _npz(folder: Path) -> None:
    for i in range(2):
        np.savez(folder / f"{i}.npz", x=np.arange(30.0).reshape(10, 3) + 100 * i, y=np.arange(10) + 100 * i)


def _safetensors(folder: Path) -> None:
    for i in range(2):
        arrays = {"x": np.arange(30.0).reshape(10, 3) + 100 * i, "y": np.arange(10) + 100 * i}
        safetensors.numpy.save_file(arrays, folder / f"{i}.safetensors")


def _tfrecord(folder: Path) -> None:
    for i in range(2):
        records = [test_tfrecord.record(f"{i}-{k}".encode() * k) for k in range(12)]
        (folder / f"{i}.tfrecord").write_bytes(b"".join(records))


def _table(i: int, rows: int) -> pa.Table:
    return pa.table({"x": np.arange(rows) + 1000 * i, "text": [f"{i}-{k}" * (k % 5) for k in range(rows)]})


def _parquet(folder: Path) -> None:
    for i in range(2):
        pa.parquet.write_table(_table(i, 40 + i), folder / f"{i}.parquet", row_group_size=9)


def _arrow(folder: Path) -> None:
    for i in range(2):
        with pa.ipc.new_stream(folder / f"{i}.arrow", _table(i, 20).schema) as writer:
            writer.write_table(_table(i, 20 + i), max_chunksize=7)


def _packed_mds(folder: Path) -> None:
    test_mds.write_plain(folder, 10)
    for i in range(2):
        shard = folder / f"shard.{i:05}.mds"
        packed = zstandard.ZstdCompressor().compress(shard.read_bytes())
        shard.unlink()
        shard.with_name(f"{shard.name}.zstd").write_bytes(packed)
        edit_json(folder / "index.json", set_at(["shards", i, "compression"], "zstd"))
        said = {"basename": f"{shard.name}.zstd", "bytes": len(packed), "hashes": {}}
        edit_json(folder / "index.json", set_at(["shards", i, "zip_data"], said))


def _megatron(folder: Path) -> None:
    test_megatron.write_pair(folder, "0", [7, 30, 2, 41, 20])
    test_megatron.write_pair(folder, "1", [13, 60, 9], first=1000)


Megatron, Records, Tokens = formats.Megatron, formats.Records, formats.Tokens
SOURCES = {
    "records": Source(_records, lambda: Records("u1", (64,)), lambda: Records("u2", (32,))),
    "tokens": Source(_records, lambda: Tokens("u2", 10), lambda: Tokens("u2", 10, stride=9)),
    "npy files": Source(_npy, lambda: formats.Npy("file"), lambda: formats.Npy("row")),
    "npz rows": Source(_npz, lambda: formats.Npz("rows", "x"), lambda: formats.Npz("rows", ("y", "x"))),
    "npz fields": Source(_npz, lambda: formats.Npz("rows", ("x", "y")), lambda: formats.Npz("rows", ("y", "x"))),
    "safetensors": Source(_safetensors, lambda: formats.Safetensors("rows", ("x", "y"))),
    "tar": Source(_tar, lambda: formats.Tar(index_cache=None), lambda: formats.Tar(("txt",), index_cache=None)),
    "tfrecord": Source(_tfrecord, formats.TFRecord),
    "mds": Source(lambda folder: test_mds.write_plain(folder, 10), formats.Mds),
    "packed mds": Source(_packed_mds, formats.Mds),
    "litdata": Source(lambda folder: test_litdata.write_plain(folder, 10), formats.LitData),
    "megatron sequences": Source(_megatron, Megatron, lambda: Megatron(split=(0.0, 0.5))),
    "megatron windows": Source(_megatron, lambda: Megatron(5), lambda: Megatron(6)),
    "megatron's order": Source(_megatron, lambda: Megatron(5, seed=1), lambda: Megatron(5, seed=2)),
    "arrow": Source(_arrow, formats.Arrow, lambda: formats.Arrow(("x",))),
    "parquet": Source(_parquet, formats.Parquet, lambda: formats.Parquet(("x",))),
}
