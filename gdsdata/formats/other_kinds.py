"""Kinds of files that are not read, and what to do instead. This is for errors alone."""

from __future__ import annotations

import os
import re
from typing import NamedTuple, NoReturn

from gdsdata.formats.named_splits import SPLIT_OF
from gdsdata.formats.parsers import magics
from gdsdata.storage.heads import read_heads
from gdsdata.storage.paths import absolute


class Kind(NamedTuple):
    """A kind of files.

    Attributes:
        title: its name.
        magics: what its files begin with: more than two bytes, which bare tokens may begin with.
        endings: of their names.
        remedy: what to do, a clause; ``{path}`` is the file's path.
    """

    title: str
    magics: tuple[bytes, ...]
    endings: tuple[str, ...]
    remedy: str


_UNPACK = "its samples cannot be read by themselves: unpack it once"
_TABLES = "convert it once to Parquet"
_ARRAYS = "copy its arrays once into npy files"
_PICKLE = "reading it could run any code: load it where you trust it, and save its arrays with numpy.save"
_AGAIN = "write the samples again as tar shards or as MDS"
_SHARDS = "pack the files into tar shards, a sample's files side by side"

# The first whose magic or ending fits is taken.
KINDS = (
    Kind("HDF5", (b"\x89HDF\r\n\x1a\n",), (".h5", ".hdf5"), f"{_ARRAYS} (numpy.save, from h5py.File({{path!r}}))"),
    Kind("gzip", (b"\x1f\x8b\x08",), (".gz",), f"{_UNPACK} (gunzip -k {{path}})"),
    Kind("zstd", (b"\x28\xb5\x2f\xfd",), (".zst",), f"{_UNPACK} (zstd -d {{path}})"),
    Kind(
        "bzip2", tuple(b"BZh%d1AY&SY" % level for level in range(1, 10)), (".bz2",), f"{_UNPACK} (bunzip2 -k {{path}})"
    ),
    Kind("xz", (b"\xfd7zXZ\0",), (".xz",), f"{_UNPACK} (unxz -k {{path}})"),
    Kind(
        "a file of torch.save",
        (),
        (".pt", ".pth"),
        "it is a checkpoint and has no samples: read it with gdsdata.load, or save its tensors as safetensors",
    ),
    Kind("a zip archive", (b"PK\x03\x04",), (".zip",), f"{_UNPACK} (unzip {{path}})"),
    Kind("a pickle", (b"\x80\x04\x95", b"\x80\x05\x95"), (".pkl", ".pickle", ".joblib"), _PICKLE),
    Kind(
        "Feather version 1",
        (b"FEA1",),
        (),
        "write it as version 2: feather.write_feather(feather.read_table({path!r}))",
    ),
    Kind("ORC", (b"ORC",), (".orc",), f"{_TABLES} (pyarrow.orc.read_table)"),
    Kind("Avro", (b"Obj\x01",), (".avro",), _TABLES),
    Kind("SQLite", (b"SQLite format 3\0",), (".sqlite", ".db"), _TABLES),
    Kind("LMDB", (), (".mdb", ".lmdb"), "write its values once as tar shards or as MDS"),
    Kind("FFCV", (), (".beton",), _AGAIN),
    Kind("RecordIO", (b"\x0a\x23\xd7\xce",), (".rec",), _AGAIN),
    Kind("ArrayRecord", (b"\x83\xafp\xd1\r\x88J?",), (".array_record",), "write its records once as TFRecord"),
    Kind("a part of a Lance table", (), (".lance",), _TABLES),
    Kind("NIfTI", (), (".nii",), f"{_ARRAYS} (numpy.save, from nibabel.load({{path!r}}).dataobj)"),
    Kind("DICOM", (), (".dcm",), f"{_ARRAYS} (numpy.save, from pydicom.dcmread({{path!r}}).pixel_array)"),
    Kind("JSON lines", (), (".jsonl", ".ndjson"), f"{_TABLES} (pyarrow.json.read_json)"),
    Kind("JSON", (), (".json",), f"{_TABLES} (pyarrow.json.read_json)"),
    Kind("CSV", (), (".csv", ".tsv"), f"{_TABLES} (pyarrow.csv.read_csv)"),
    Kind("plain text", (), (".txt",), f"{_TABLES}, or its tokens to npy"),
    Kind(
        "an image",
        (b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"II*\0", b"MM\0*"),
        (".jpg", ".jpeg", ".png", ".webp", ".gif", ".tif", ".tiff", ".bmp"),
        f"{_SHARDS} (tar --sort=name -cf train.tar FOLDER)",
    ),
    Kind(
        "a recording",
        (b"fLaC", b"OggS", b"ID3\x02", b"ID3\x03", b"ID3\x04"),
        (".wav", ".flac", ".mp3", ".ogg", ".mp4", ".mkv", ".avi", ".webm"),
        f"{_SHARDS} (tar --sort=name -cf train.tar FOLDER)",
    ),
)
# Shards by the names that their writers choose. The index.json beside them says what they have.
_SHARDS_BY_INDEX = {"MDS": r".+\.mds(\.\w+)?", "LitData": r"chunk-\d+-\d+(\.\w+)?\.bin"}
_ZARR = (".zarray", ".zgroup", "zarr.json")
_LANCE = frozenset(("_versions", "data"))
# Tables by the folder of their log (`magics.LOGS_OF_TABLES`).
_TABLES_WITH_LOG = {
    "_delta_log": ("Delta table", "as in GDSDataset(deltalake.DeltaTable({folder!r}).file_uris())"),
    ".hoodie": ("Hudi table", "as Hudi's own library lists them"),
    "metadata": ("Iceberg table", "as in [one.file.file_path for one in pyiceberg's table.scan().plan_files()]"),
}
_MOST_NAMES = 5  # of folders that an error has


def advice_about(head: bytes, path: str) -> str | None:
    """Return what a file is, and what to do: two clauses. None: it is not known.

    Args:
        head: its first bytes.
        path: of the file.
    """
    folder, name = os.path.split(path)
    if name in _ZARR or any(os.path.exists(os.path.join(folder, one)) for one in _ZARR):
        return f"is a part of a zarr array, which is not read: {_ARRAYS} (numpy.save, from zarr.open({folder!r}))"
    for packing, names in _SHARDS_BY_INDEX.items():
        if re.fullmatch(names, name, re.ASCII):
            return f"is a shard of {packing}, {_about_index_in(folder)}"
    kind = next((one for one in KINDS if head.startswith(one.magics) or name.lower().endswith(one.endings)), None)
    return None if kind is None else f"is {kind.title}, which is not read: {kind.remedy.format(path=path)}"


def _about_index_in(folder: str) -> str:
    """Return what a folder's index.json is, and what to do, for a shard that lies there."""
    index = os.path.join(folder, magics.SHARDS_INDEX)
    try:
        (head,), _, _ = read_heads([index], magics.HEAD_BYTES)
    except FileNotFoundError:
        return f"and its {magics.SHARDS_INDEX} is missing: fetch that file too. Writers of shards write it last"
    except OSError as error:
        return f"and its {magics.SHARDS_INDEX} cannot be read: {error}"
    if magics.is_mds(head, index) or magics.is_litdata(head, index):
        return f"which its {magics.SHARDS_INDEX} describes: pass {folder!r}, which has both"
    return f"and its {magics.SHARDS_INDEX} is damaged (it begins with {head[:8]!r}): fetch that file again"


def refuse_table(folder: str, log: str) -> NoReturn:
    """Refuse a folder whose log may say that some of its files have no rows any more.

    Raises:
        ValueError: says what to do.
    """
    title, example = _TABLES_WITH_LOG[log]
    raise ValueError(
        f"{folder} is a {title}: its log, {log}, says which of its files have rows now, and is not read. Name these "
        f"files, {example.format(folder=folder)}"
    )


def no_files_in(source: str) -> str:
    """Return why a source means no files: a clause. It says which folders lie in a folder."""
    try:
        with os.scandir(source) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir() or entry.name in _ZARR)
    except OSError:
        names = []
    if any(name in _ZARR for name in names):
        return f"is a zarr array, which is not read: {_ARRAYS} (numpy.save, from zarr.open({source!r}))"
    if _LANCE.issubset(names):
        return f"is a Lance table, which is not read: {_TABLES}"
    shown = ", ".join(map(repr, names[:_MOST_NAMES])) + (", ..." if len(names) > _MOST_NAMES else "")
    if not names:
        begin = "" if os.path.isabs(source) else f"(from {absolute(os.curdir)}) "
        remedy = ""
        if source.startswith("~"):
            remedy = ": pass os.path.expanduser() of it, because only a shell expands ~"
        elif source.startswith("pipe:"):
            remedy = ": commands are not run. Pass the URL of the object itself, as in 's3://bucket/train.tar'"
        return f"{begin}is no file, no directory with files and no glob of any{remedy}"
    split = next((f"pass the name of a split, as in split={name!r}; or " for name in names if name in SPLIT_OF), "")
    glob = os.path.join(source, "**/*")
    if not split and (packing := _packing_of(os.path.join(source, names[0]))):
        return f"has no files, only folders ({shown}), and {names[0]!r} has {packing}"
    return f"has no files, only folders ({shown}): {split}name one of them, or a glob, as in {glob!r}"


def _packing_of(folder: str) -> str | None:
    """Return what a file of a folder is, and how to pack such files; None: it is another kind."""
    try:
        with os.scandir(folder) as entries:
            name = next((entry.name.lower() for entry in entries if entry.is_file()), "")
    except OSError:
        return None
    packed = (kind for kind in KINDS if kind.remedy.startswith(_SHARDS) and name.endswith(kind.endings))
    return next((f"{kind.title}, which is not read: {kind.remedy}" for kind in packed), None)
