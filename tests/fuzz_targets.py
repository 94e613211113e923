"""The parsers that `fuzz.py` tests: seeds, readers, checks, and repairs of changed inputs."""

import hashlib
import json
import pickle
import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tables
import test_formats
import test_litdata
import test_litdata_frames
import test_litdata_rows
import test_mds
import test_mds_text
import test_megatron
import test_tar
import test_tfrecord
import torch
from fuzz_heads import IMAGE_HEADS, MANIFEST
from fuzz_objects import OBJECTS
from fuzz_servers import ANSWERS, LISTS, WEB_INDEX
from fuzz_target import MTIME_NS, Files, Target, each
from safetensors.torch import save_file

import gdsdata
from gdsdata.checkpoint import safetensors_file
from gdsdata.checkpoint.open_file import OpenFile
from gdsdata.checkpoint.stored import Stored
from gdsdata.checkpoint.torch_zip import archive, archive_reader, file_slice, unpickling
from gdsdata.checkpoint.torch_zip.pickling import pickle_with_storages
from gdsdata.checkpoint.torch_zip.state_layout import StateLayout
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
    Tokens,
    arrays,
    arrow,
    arrow_arrays,
    arrow_batches,
    arrow_layout,
    arrow_messages,
    arrow_rows,
    column_values,
    columns,
    dictionaries,
    fields,
    json_rows,
    litdata,
    litdata_frames,
    mds,
    mds_text,
    megatron,
    npy,
    npz,
    other_kinds,
    parquet,
    safetensors_files,
    shard_lists,
    shards,
    tar,
    tar_index,
    tar_reading,
    tfrecord,
    tokens,
    unpacking,
)
from gdsdata.formats import index as indexes
from gdsdata.formats.fields import FieldIndex
from gdsdata.formats.index import Format, SampleIndex
from gdsdata.formats.parsers import parquet_footer, safetensors_header, tar_members, tfrecord_records, zip_directory
from gdsdata.formats.tables import TableIndex
from gdsdata.io import engine
from gdsdata.io.engine import crc32c_of_rows
from gdsdata.io.options import EngineOptions

# --------------------------------------------------------------------------------------------------- what is checked

_MOST_ASKED = 512


def check(index: SampleIndex) -> None:
    """Check that the first and last samples lie in files of the size that the index says."""
    sizes = np.array([Path(path).stat().st_size for path in index.paths])
    assert (sizes == index.size_bytes).all(), "files are of another size than the index says"
    assert len(index) == index.first_sample[-1] and (np.diff(index.first_sample) >= 0).all()
    last = np.arange(max(0, len(index) - _MOST_ASKED), len(index))
    for samples in (np.arange(min(len(index), _MOST_ASKED)), last):
        plan = index.plan(samples)
        file, begin, length = plan.source, plan.offset, np.broadcast_to(plan.length, plan.offset.shape)
        assert plan.samples is samples
        if isinstance(index, FieldIndex):
            assert len(begin) == len(samples) * len(index.fields)
            assert index.checksums is None or index.checksums.shape == index.begin_bytes.shape
        else:
            assert len(begin) == (len(samples) if plan.sample_ptr is None else plan.sample_ptr[-1])
        there = length >= 0
        assert ((begin >= 0) & (begin + length <= sizes[file]))[there].all(), "an extent leaves its file"
    index.spacing_bytes, list(index.runs(0, min(len(index), _MOST_ASKED)))
    index.most_bytes(min(len(index), 7))


def indexing(pattern: str, *formats: Format) -> Callable[[Path], None]:
    """Return a `Target.read` that indexes the files matching the pattern by each format."""

    def read(folder: Path) -> None:
        paths = sorted(map(str, folder.glob(pattern)))
        each(lambda format=format: check(format.index(paths)) for format in formats)

    return read


def check_stored(found: Any) -> None:
    """Check that every tensor in a nest lies in its record, and the record in its file."""
    seen: set[int] = set()
    left = [found]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Stored):
            record = value.record
            end = value.offset + value.span_bytes
            assert 0 <= value.offset and end <= record.size_bytes, f"{value} leaves its record"
            assert 0 <= record.offset <= record.offset + record.size_bytes <= Path(record.path).stat().st_size
        elif isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, (list, tuple)):
            left.extend(value)


# ------------------------------------------------------------------------------------------------------------- arrays

_NPY_TOKENS = (
    *(
        b"'descr'",
        b"'fortran_order'",
        b"'shape'",
        b"True",
        b"()",
        b"(",
        b"-",
        b"[",
        b"{",
        b"'",
        b"\\",
        b"\n",
        b"0x",
        b"_",
    ),
    *(b"'|O'", b"'>f8'", b"'<U9'", b"'<M8[s]'", b"'(2,3)f4'", b"'f4,f4'", b"'V0'", b"'S0'", b"1_0", b"9" * 20, b"1e9"),
)


def mend_npy(files: Files) -> Files:
    data = files["x.npy"]
    end = data.find(b"\n") + 1
    if data[6:8] != b"\1\0" or not 10 <= end < 2**16:
        return files
    return {**files, "x.npy": data[:8] + struct.pack("<H", end - 10) + data[10:]}


def npy_seed(array: np.ndarray, version: tuple[int, int] = (1, 0)) -> Callable[[Path], object]:
    return lambda folder: test_formats.write_npy(folder / "x.npy", array, version)


NPY = Target(
    "npy",
    (npy, indexes),
    [
        npy_seed(np.arange(12, dtype="<f4").reshape(3, 4)),
        npy_seed(np.asfortranarray(np.ones((2, 3, 2), ">i2")), (2, 0)),
        npy_seed(np.float64(3), (3, 0)),
    ],
    indexing("x.npy", Npy("file"), Npy("row"), Tokens(seq_len=2)),
    mend_npy,
    _NPY_TOKENS,
)


def mend_tokens(files: Files) -> Files:
    data = files["x.bin"]
    return {"x.bin": data[:8] + struct.pack("<i", (len(data) - 1024) // 2) + data[12:]} if len(data) > 1024 else files


TOKENS = Target(
    "tokens",
    (tokens, indexes),
    [
        lambda folder: test_formats.write(folder / "x.bin", test_formats.llm_c_head(20240520, 40), bytes(80)),
        lambda folder: test_formats.write(folder / "x.bin", test_formats.llm_c_head(20240801, 9), bytes(36)),
        lambda folder: test_formats.write(folder / "x.bin", np.arange(30, dtype="<u2")),
    ],
    indexing("x.bin", Tokens(seq_len=4), Tokens("uint16", seq_len=3, stride=1), Tokens("<i8", seq_len=1, raw=True)),
    mend_tokens,
)

# ---------------------------------------------------------------------------------------------------------------- tar


def tar_seed(kind: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        names = ["0.x", "0.y", "a/1.x", "a/1.y", "__meta__/2.x", "dots.tar.gz"]
        names += [] if kind == "ustar" else ["n" * 130 + ".x", "é.x"]
        test_tar.shard(folder / "x.tar", [(name, name.encode() * 40) for name in names], kind)
        (folder / "x.tar.idx").write_bytes(np.array([0, 1024, 2048], "<u8").tobytes())
        (folder / "x.idx").write_text("v1.2 2\n.x 1024 120 0.x .y 2048 120 0.y\n.x 4096 9 1.x\n")

    return write


def mend_tar(files: Files) -> Files:
    """Repair the checksum of each block that looks like a header."""
    data = files["x.tar"]
    records = [data[at : at + 512] for at in range(0, len(data), 512)]
    mended = (test_tar.with_checksum(one) if one[257:262] == b"ustar" and len(one) == 512 else one for one in records)
    return {**files, "x.tar": b"".join(mended)}


_TAR_TOKENS = (
    *(
        b"ustar\x0000",
        b"ustar  \0",
        b"11 path=a.x\n",
        b"12 size=700\n",
        b"19 path=../../a.x\n",
        b"20 GNU.sparse.map=0\n",
    ),
    bytes(512),
    bytes(1024),
    *(b"size=", b"path=", b"x", b"g", b"L", b"K", b"S", b"M", b"\x80" + b"\0" * 11, b"/", b"..", b".", b"v1.1", b" "),
)


def read_tar(folder: Path) -> None:
    paths = [str(folder / "x.tar")]
    each(
        lambda wanted=wanted: check(Tar(wanted, index_cache=None).index(paths))
        for wanted in (None, ("x", "y"), ("__key__",))
    )


TAR = Target(
    "tar",
    (tar, tar_members, tar_reading, fields),
    list(map(tar_seed, test_tar.FORMATS)),
    read_tar,
    mend_tar,
    _TAR_TOKENS,
)

_KEPT_NAME = ".x.tar.gdsdata-index"


def kept_seed(folder: Path) -> None:
    tar_seed("pax")(folder)
    Tar(index_cache="beside").index([str(folder / "x.tar")])


def mend_kept(files: Files) -> Files:
    """Repair the size and time of the tar, and the checksum of the index."""
    kept = files[_KEPT_NAME]
    checked = struct.pack("<2q", len(files["x.tar"]), MTIME_NS) + kept[40:]
    return {**files, _KEPT_NAME: kept[:16] + struct.pack("<I", zlib.crc32(checked)) + bytes(4) + checked}


TAR_INDEX = Target(
    "tar-index",
    (tar, tar_index, fields),
    [kept_seed],
    lambda folder: check(Tar(index_cache="beside").index([str(folder / "x.tar")])),
    mend_kept,
    (b'["x", "y"]', b'"x"', b"[", b"{}", b"null", b"1", b", "),
)

# ----------------------------------------------------------------------------------------------------- MDS and LitData

_JSON_TOKENS = (
    *(b"null", b"true", b"-1", b"1e400", b"NaN", b"[", b"]", b"{", b"}", b"[]", b"{}", b'""', b'"a"'),
    *(b"\\u0000", b"\\ud800", b'"../x"', b'"/etc/passwd"', b'"."', b'"index.json"', b",", b":", b"9" * 5000),
)


def mend_sizes(listed: str, shards_of: Callable[[Any], Iterable[tuple[dict, str, str]]]) -> Callable[[Files], Files]:
    """Repair the sizes in ``listed``. ``shards_of`` gives dict, key and file of each."""

    def mend(files: Files) -> Files:
        try:
            content = json.loads(files[listed])
            for record, key, name in shards_of(content):
                record[key] = len(files.get(name, b""))
            return {**files, listed: json.dumps(content).encode()}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return files

    return mend


def mds_seed(encodings: dict[str, str], sizes: list[int | None], *samples: list[bytes]) -> Callable[[Path], object]:
    return lambda folder: test_mds.write_mds(folder, encodings, sizes, [list(samples), list(samples[:2])])


MDS = Target(
    "mds",
    (mds, shard_lists, shards, fields, indexes),
    [
        test_mds.write_plain,
        lambda folder: test_mds.write_arrays(
            folder, [np.ones((2, 3), "u1"), np.ones((4, 1), "u1")], [np.ones((1, 1), "u1")]
        ),
        lambda folder: test_mds.write_arrays(folder, [np.arange(i, dtype="i4") for i in (1, 300, 2)]),
        mds_seed({"a": "ndarray:float32:2,2", "b": "ndarray:int16"}, [16, None], [bytes(16), b"\4\2" + bytes(4)]),
    ],
    indexing("*", Mds(), Mds(allow_pickle=True)),
    mend_sizes(
        "index.json", lambda content: ((s["raw_data"], "bytes", s["raw_data"]["basename"]) for s in content["shards"])
    ),
    (
        *_JSON_TOKENS,
        b'"ndarray"',
        b'"ndarray:uint8:1"',
        b'"pkl"',
        b'"int"',
        b'"zstd"',
        b'"raw_data"',
        b'"column_sizes"',
    ),
)


def packed_seed(compression: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        test_mds.write_plain(folder)
        hashed = {path.name: hashlib.sha1(path.read_bytes()).hexdigest() for path in folder.glob("*.mds")}
        index = Path(test_mds.pack_shards(folder, compression))
        content = json.loads(index.read_text())
        for record in content["shards"][:1]:  # the other shard has none
            record["raw_data"]["hashes"] = {"sha1": hashed[record["raw_data"]["basename"]]}
        index.write_text(json.dumps(content))

    return write


def read_packed(folder: Path) -> None:
    check(Mds(unpacked="beside").index([str(folder / "index.json")]))


MDS_PACKED = Target(
    "mds-packed",
    (mds, shards, unpacking),
    [packed_seed(compression) for compression in ("zstd", "gz", "bz2", "br", "snappy")],
    read_packed,
    mend_sizes(
        "index.json", lambda content: ((s["zip_data"], "bytes", s["zip_data"]["basename"]) for s in content["shards"])
    ),
    (*_JSON_TOKENS, b'"zstd:3"', b'"gz"', b'"hashes"', b'"sha1"', b'"shake_128"', b'"zip_data"', b"\x28\xb5\x2f"),
)

LITDATA = Target(
    "litdata",
    (litdata, shard_lists, shards, fields, indexes),
    [
        test_litdata.write_plain,
        lambda folder: test_litdata.write(
            folder,
            [0, {"x": 0}],
            ["tensor", "numpy"],
            [
                [
                    [test_litdata.pack_array(np.ones((2, i), "f4"), kind, ">") for kind in ("tensor", "numpy")]
                    for i in (1, 2)
                ]
            ],
        ),
        lambda folder: test_litdata.write_tokens(folder, [[5, 6], [7]]),
        lambda folder: test_litdata_rows.write_rows(folder, test_litdata_rows.two_tables()),
    ],
    indexing("*", LitData(), LitData(window_tokens=3, allow_pickle=True)),
    mend_sizes("index.json", lambda content: ((one, "chunk_bytes", one["filename"]) for one in content["chunks"])),
    (
        *_JSON_TOKENS,
        b'"tensor"',
        b'"no_header_numpy:3"',
        b'"pickle"',
        b'"TokensLoader"',
        b"builtins.dict",
        b"LDARW01\0",
    ),
)

# -------------------------------------------------------------------------------------------- Megatron-LM and TFRecord


def mend_megatron(files: Files) -> Files:
    """Repair the number of sequences, which makes up the file."""
    data = files["x.idx"]
    if len(data) < 34:
        return files
    (bounds,) = struct.unpack_from("<Q", data, 26)
    sequences = (len(data) - 34 - 8 * bounds) // 12
    return {**files, "x.idx": data[:18] + struct.pack("<q", sequences) + data[26:]} if 0 <= sequences < 2**40 else files


MEGATRON = Target(
    "megatron",
    (megatron, fields, indexes),
    [
        lambda folder: test_megatron.write_pair(folder, "x", [3, 0, 8, 5]),
        lambda folder: test_megatron.write_pair(folder, "x", [30, 1], code=4, modes=b"\0\1"),
    ],
    indexing(
        "*",
        Megatron(),
        Megatron(seq_len=2),
        Megatron(seq_len=4, seed=1, num_samples=30, drop_last=False),
        Megatron(seq_len=3, split=(0.2, 0.9)),
    ),
    mend_megatron,
)


_MOST_MENDED = 20  # records: checksums take long


def mend_tfrecord(files: Files) -> Files:
    """Repair the checksums of lengths and data of the first records."""
    data, at = bytearray(files["x.tfrecord"]), 0
    for _ in range(_MOST_MENDED):
        begin, length = at + 12, int.from_bytes(data[at : at + 8], "little")
        for first, end in ((at, at + 8), (begin, begin + length)):
            if end + 4 <= len(data):
                checksum = crc32c_of_rows(np.frombuffer(data[first:end], np.uint8)[None])
                data[end : end + 4] = tfrecord_records.masked(checksum).tobytes()
        at = begin + length + 4
    return {"x.tfrecord": bytes(data)}


TFRECORD = Target(
    "tfrecord",
    (tfrecord, tfrecord_records, fields, other_kinds),
    [
        lambda folder: test_formats.write(folder / "x.tfrecord", *map(test_tfrecord.record, (b"", b"abc", b"d" * 300))),
        lambda folder: test_formats.write(folder / "x.tfrecord", test_tfrecord.record_unchecked(bytes(70_000))),
    ],
    lambda folder: each(
        [
            lambda: check(TFRecord(check_data=False).index([str(folder / "x.tfrecord")])),
            lambda: reading("x.tfrecord", TFRecord())(folder),
        ]
    ),
    mend_tfrecord,
    (b"\x1f\x8b", b"\x78\x9c"),
)

# -------------------------------------------------------------------------------------------------------- checkpoints

_DATA_BYTES = 88


def safetensors_seed(folder: Path) -> None:
    save_file({"a": torch.ones(4, 4), "b": torch.ones(3, dtype=torch.float64)}, folder / "x.safetensors", {"k": "v"})
    index = {"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}
    (folder / "x.safetensors.index.json").write_text(json.dumps(index))


def mend_safetensors(files: Files) -> Files:
    """Set the header's length so that the data has as many bytes as the seed's."""
    data = files["x.safetensors"]
    length = max(0, len(data) - 8 - _DATA_BYTES)
    return {**files, "x.safetensors": struct.pack("<Q", length) + data[8:]}


def read_safetensors(folder: Path) -> None:
    path = folder / "x.safetensors"
    each(
        [
            lambda: check_stored(safetensors_file.read_header(OpenFile(str(path)))),
            lambda: gdsdata.load(path, verify=True),
            lambda: gdsdata.load(f"{path}.index.json", only=["a"]),
        ]
    )


SAFETENSORS = Target(
    "safetensors",
    (safetensors_file, safetensors_header),
    [
        safetensors_seed,
        lambda folder: (safetensors_seed(folder), gdsdata.save({"a": torch.ones(11, 2)}, folder / "x.safetensors")),
    ],
    read_safetensors,
    mend_safetensors,
    (
        *_JSON_TOKENS,
        *(b'"F32"', b'"BF16"', b'"F4"', b'"F6_E2M3"', b"[0,8]", b'"shape"', b'"data_offsets"', b'"__metadata__"'),
    ),
)


def plain_state() -> dict:
    base = torch.arange(16.0)
    return {
        "views": [base, base.reshape(4, 4).t(), base[3:9:2]],
        "parameter": torch.nn.Parameter(torch.ones(16)),
        "newer": torch.zeros(64, dtype=torch.float8_e4m3fn),
        "values": [None, True, 3, 2.5, "text", b"bytes", {"nested": (1, [2])}, {4: 5, (6, 7): 8}, 2**70],
    }


def unusual_state() -> dict:
    return {
        "conjugate": torch.ones(8, dtype=torch.complex64).conj(),
        "storage": torch.arange(16.0).untyped_storage(),
        "device": torch.device("cpu"),
        "size": torch.Size((1, 2)),
    }


def read_torch(path: Path) -> None:
    """Read the structure of a torch file. If all of it is plain, load it too."""
    opened = archive.open_archive(OpenFile(str(path)))
    each([lambda: opened.storages])
    found = archive_reader.unpickle_structure(opened)
    check_stored(found)
    if found is not None:
        each([lambda: gdsdata.load(path, verify=True), lambda: gdsdata.load(path, only=["*"])])


TORCH_REFUSALS = (unpickling.NotPlain, pickle.UnpicklingError)

TORCH = Target(
    "torch",
    (archive, archive_reader, file_slice, unpickling, zip_directory),
    [
        lambda folder: torch.save(plain_state(), folder / "x.pt"),
        lambda folder: torch.save(torch.ones(300), folder / "x.pt"),
        lambda folder: gdsdata.save(plain_state(), folder / "x.pt"),
    ],
    lambda folder: read_torch(folder / "x.pt"),
    tokens=(
        b"PK\1\2",
        b"PK\3\4",
        b"PK\5\6",
        b"PK\6\6",
        b"PK\6\7",
        b"\1\0\x10\0",
        b"data.pkl",
        b"data/0",
        b"byteorder",
        b"big",
    ),
    refusals=TORCH_REFUSALS,
)

_STORAGES = [64, 64, 64, 64]


def pickle_seed(state: Callable[[], Any]) -> Callable[[Path], object]:
    return lambda folder: (folder / "data.pkl").write_bytes(pickle_with_storages(state())[0])


def read_pickle(folder: Path) -> None:
    """Read the pickle in a sound archive whose storages fit the seeds."""
    layout = StateLayout((folder / "data.pkl").read_bytes(), np.array(_STORAGES))
    archive, checksums = np.zeros(layout.end, np.uint8), np.array([zlib.crc32(bytes(size)) for size in _STORAGES])
    layout.stamp(archive, 0, 0, len(_STORAGES), checksums)
    for at, part in [*layout.contents(), layout.directory(checksums)]:
        archive[at : at + len(part)] = np.frombuffer(part, np.uint8)
    (folder / "x.pt").write_bytes(archive.tobytes())
    read_torch(folder / "x.pt")


class _RunsWhatItNames:
    def __reduce__(self) -> tuple:
        return open, ("/etc/hostname",)


_PICKLE_TOKENS = (
    *(bytes([octet]) for octet in range(128, 151)),
    *(octet.encode() for octet in "(.012FIJKLMNPQRSTUVX]abcdeghijlopqrstu}BCGc"),
    *(b"cos\nsystem\n", b"cbuiltins\neval\n", b"ctorch\nload\n", b"ccollections\nOrderedDict\n", b"cio\nopen\n"),
    *(b"X\4\0\0\0exit\x85R", b"X\x0b\0\0\0/etc/passwd\x85R", b"}b", b"N\x86b", b")\x81", b"\x85", b"q\xff"),
    *(
        b"r\xff\xff\xff\x7f",
        b"j\xff\xff\xff\x7f",
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ctorch._utils\n_rebuild_parameter\n",
        b"ctorch\nFloatStorage\n",
    ),
    pickle.dumps(_RunsWhatItNames(), 2)[2:-1],
)

PICKLE = Target(
    "pickle",
    (archive, archive_reader, unpickling),
    [pickle_seed(plain_state), pickle_seed(unusual_state), pickle_seed(lambda: torch.ones(16))],
    read_pickle,
    tokens=_PICKLE_TOKENS,
    refusals=TORCH_REFUSALS,
)

# ------------------------------------------------------------------------------- arrays by name, rows of tables


def reading(name: str, *formats: Format) -> Callable[[Path], None]:
    """Return a `Target.read` that indexes by each format and then reads every sample.

    Samples whose values others decode are read too.
    """

    def read_all(path: str, format: Format) -> None:
        engine.kept_engine(EngineOptions(), torch.device("cpu"))  # else each input would make an engine
        anew = gdsdata.Reading(index_cache=None)
        data = gdsdata.GDSDataset(path, 8, format, shuffle=False, device="cpu", reading=anew)
        if not isinstance(data._samples.index, TableIndex):
            check(data._samples.index)
        for _ in data:
            pass

    return lambda folder: each(lambda format=format: read_all(str(folder / name), format) for format in formats)


SAFETENSORS_DATA = Target(
    "safetensors-data",
    (safetensors_header, safetensors_files, arrays),
    [safetensors_seed, lambda folder: save_file({"a": torch.ones(11, 2)}, folder / "x.safetensors")],
    reading("x.safetensors", Safetensors("file"), Safetensors("rows", "a")),
    mend_safetensors,
    SAFETENSORS.tokens,
)

NPZ = Target(
    "npz",
    (npz, zip_directory, arrays, npy),
    [
        lambda folder: np.savez(folder / "x.npz", a=np.ones((4, 3)), b=np.arange(4, dtype=">i2")),
        lambda folder: np.savez(folder / "x.npz", a=np.asfortranarray(np.ones((2, 3, 4)))),
        lambda folder: np.savez_compressed(folder / "x.npz", a=np.ones(9)),
    ],
    reading("x.npz", Npz("file"), Npz("rows", "a"), Npz("file", verify=True)),
    tokens=TORCH.tokens[:6] + (b"a.npy", b"\x93NUMPY", b"descr", b"|O", b"<f8", b"(4, 3)"),
)


def arrow_seed(file_format: bool) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        table, new = tables.awkward(9), pa.ipc.new_file if file_format else pa.ipc.new_stream
        with pa.OSFile(str(folder / "x.arrow"), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table, 4)

    return write


def nested_seed(name: str, **options: Any) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        table = tables.nested(9)
        if name.endswith(".parquet"):
            pq.write_table(table, folder / name, row_group_size=4, **options)
            return
        said = pa.ipc.IpcWriteOptions(**options)
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema, options=said) as writer:
            writer.write_table(table, 4)

    return write


def dictionary_seed(compression: str | None) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        parts = [pa.array(part).dictionary_encode() for part in (["a", "bb", None], ["c", "a"])]
        said = pa.ipc.IpcWriteOptions(compression=compression, emit_dictionary_deltas=True)
        with pa.OSFile(str(folder / "x.arrow"), "wb") as sink:
            schema = pa.schema({"text": parts[0].type, "i64": pa.int64()})
            with pa.ipc.new_stream(sink, schema, options=said) as writer:
                for part in parts:
                    numbers = pa.array(range(len(part)), pa.int64())
                    writer.write_batch(pa.record_batch([part, numbers], schema=schema))

    return write


ARROW = Target(
    "arrow",
    (
        *(arrow, arrow_messages, arrow_layout, arrow_rows, arrow_arrays, arrow_batches, dictionaries),
        *(column_values, columns, json_rows),
    ),
    [
        *(arrow_seed(False), arrow_seed(True), nested_seed("x.arrow"), nested_seed("x.arrow", compression="lz4")),
        *(dictionary_seed(compression) for compression in (None, "zstd")),
    ],
    reading("x.arrow", Arrow(fill_null=0), Arrow(), Arrow(columns=("i64", "text"))),
    tokens=(b"ARROW1", b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", bytes(8)),
)

PARQUET = Target(
    "parquet",
    (parquet, parquet_footer, column_values, columns, json_rows),
    [
        *(
            lambda folder, codec=codec: pq.write_table(
                tables.awkward(9), folder / "x.parquet", row_group_size=4, compression=codec
            )
            for codec in ("none", "snappy")
        ),
        nested_seed("x.parquet", compression="none"),
    ],
    reading("x.parquet", Parquet(), Parquet(columns=("i64", "text"))),
    tokens=(b"PAR1", b"PARE"),
)

MDS_TEXT = Target(
    "mds-text",
    (mds, mds_text, shard_lists),
    [lambda folder, kind=kind: test_mds_text.write(folder, kind) for kind in test_mds_text.KINDS],
    reading("index.json", Mds()),
    mend_sizes(
        "index.json", lambda content: ((s["raw_data"], "bytes", s["raw_data"]["basename"]) for s in content["shards"])
    ),
    (*_JSON_TOKENS, b'"int"', b'"float"', b'"str"', b'"json"', b'"xsv"', b"||", b"\r\n"),
)

LITDATA_FRAMES = Target(
    "litdata-frames",
    (litdata, litdata_frames, unpacking),
    [test_litdata_frames.write_framed, lambda folder: test_litdata_frames.write_framed(folder, 0)],
    lambda folder: check(LitData(unpacked="beside").index([str(folder / "index.json")])),
    tokens=(*_JSON_TOKENS, b"LDFZ01\0\0", b'"batch"', b"\x28\xb5\x2f\xfd"),
)

TARGETS = {
    target.name: target
    for target in (
        *(NPY, TOKENS, TAR, TAR_INDEX, MDS, MDS_PACKED, MDS_TEXT, LITDATA, LITDATA_FRAMES, MEGATRON, TFRECORD),
        *(SAFETENSORS_DATA, NPZ, ARROW, PARQUET),
        *(SAFETENSORS, TORCH, PICKLE, MANIFEST, IMAGE_HEADS),
        *(LISTS, ANSWERS, WEB_INDEX, OBJECTS),
    )
}
