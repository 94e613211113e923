"""Kinds of files that gdsdata does not read: the error says what to do instead."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from tables import pa
from test_tfrecord import record

import gdsdata
from gdsdata.errors import CorruptData
from gdsdata.formats import registry

feather = pytest.importorskip("pyarrow.feather")
pq = pytest.importorskip("pyarrow.parquet")


def refusal(source, kind=ValueError):
    with pytest.raises(kind) as caught:
        gdsdata.GDSDataset(source, 2, device="cpu")
    return str(caught.value)


def zipped(name="x.bin"):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, b"x")
    return file.getvalue()


def saved_by_torch():
    file = io.BytesIO()
    torch.save({"x": torch.ones(2)}, file)
    return file.getvalue()


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("x.h5", b"\x89HDF\r\n\x1a\n" + bytes(100), "is HDF5, which is not read: copy its arrays once into npy files"),
        (
            "x.jsonl.gz",
            gzip.compress(b"{}", mtime=0),
            "is gzip, which is not read: .* unpack it once .gunzip -k .*/x.jsonl.gz",
        ),
        ("x.bin.bz2", bz2.compress(b"x"), "bunzip2 -k"),
        ("x.xz", lzma.compress(b"x"), "unxz -k"),
        ("x.tar.zst", b"\x28\xb5\x2f\xfd" + bytes(9), "zstd -d .*/x.tar.zst"),
        ("x", pickle.dumps([1]), "is a pickle, .* could run any code: load it where you trust it, and save its arrays"),
        ("x.pkl", b"\x80\x04" + bytes(9), "numpy.save"),
        ("x.pt", saved_by_torch(), "is a file of torch.save, .* read it with gdsdata.load"),
        ("x.zip", zipped(), "unzip .*/x.zip"),
        ("x.feather", b"FEA1" + bytes(90), "write it as version 2: feather.write_feather"),
        ("x.jsonl", json.dumps({"text": "a"}).encode(), "is JSON lines, .* convert it once to Parquet .pyarrow.json"),
        ("x.csv", b"a,b\n1,2\n", "pyarrow.csv.read_csv"),
        ("x.txt", b"a text", "is plain text, which is not read: convert it"),
        (
            "x.jpg",
            b"\xff\xd8\xff\xe0" + bytes(99),
            "is an image, .* pack the files into tar shards, .*tar --sort=name",
        ),
        ("x.wav", b"RIFF" + bytes(99), "is a recording, .* pack the files into tar shards"),
        ("data.mdb", bytes(512), "is LMDB"),
        ("train.beton", bytes(512), "is FFCV"),
        ("x.array_record", b"\x83\xaf\x70\xd1\x0d\x88\x4a\x3f" + bytes(99), "is ArrayRecord, .* as TFRecord"),
        ("x.rec", b"\x0a\x23\xd7\xce" + bytes(99), "is RecordIO, .* tar shards or as MDS"),
        ("x.lance", bytes(512), "is a part of a Lance table, .* convert it once to Parquet"),
        ("x.nii", b"\x5c\1\0\0" + bytes(508), "is NIfTI, .* npy files .*nibabel.load.*/x.nii"),
        ("x.dcm", bytes(128) + b"DICM", "is DICOM, .* npy files .*pydicom"),
    ],
)
def test_a_kind_that_is_not_read_says_what_to_do(tmp_path, monkeypatch, name, content, said):
    own = registry._recognisers[-registry._OWN :]  # another test may have registered an example's format
    monkeypatch.setattr(registry, "_recognisers", own)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        gdsdata.GDSDataset(tmp_path / name, 2, device="cpu")


def test_a_tar_that_is_compressed_says_the_command_that_unpacks_it(tmp_path):
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(bytes(1024)))
    assert "gunzip" in refusal(tmp_path / "x.tar.gz")


def test_zarr_is_refused_by_its_folder_and_by_a_chunk(tmp_path):
    (tmp_path / "x.zarr").mkdir()
    (tmp_path / "x.zarr" / ".zarray").write_text("{}")
    assert "is a zarr array, which is not read: copy its arrays once" in refusal(tmp_path / "x.zarr", FileNotFoundError)
    (tmp_path / "x.zarr" / "0.0").write_bytes(bytes(80))
    assert "is a part of a zarr array" in refusal(tmp_path / "x.zarr")


def test_a_lance_table_is_refused_by_its_folder(tmp_path):
    for name in ("_versions", "_transactions", "data"):
        (tmp_path / "t" / name).mkdir(parents=True)
    said = refusal(tmp_path / "t", FileNotFoundError)
    assert said == f"{tmp_path}/t is a Lance table, which is not read: convert it once to Parquet"


def test_a_folder_of_folders_names_them(tmp_path):
    for name in "abcdefg":
        (tmp_path / name).mkdir()
    said = refusal(tmp_path, FileNotFoundError)
    assert (
        "has no files, only folders ('a', 'b', 'c', 'd', 'e', ...): name one" in said and f"'{tmp_path}/**/*'" in said
    )
    assert "is no file, no directory with files" in refusal(tmp_path / "a", FileNotFoundError)


@pytest.mark.parametrize("name", ["README.md", "LICENSE", "_SUCCESS", "_metadata", "_common_metadata"])
@pytest.mark.parametrize("format", [None, gdsdata.formats.Parquet()])
def test_files_that_stand_beside_parquet_are_passed_over(tmp_path, name, format):
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "part-0.parquet")
    (tmp_path / name).write_bytes(b"")
    (batch,) = gdsdata.GDSDataset(tmp_path, 2, format, device="cpu", shuffle=False)
    assert batch["x"].tolist() == [1, 2]


@pytest.mark.parametrize("name", ["NOTES", "a.log", "a.json"])
def test_other_files_before_the_data_name_the_glob_that_leaves_them_out(tmp_path, name):
    np.save(tmp_path / "x.npy", np.arange(4))
    (tmp_path / name).write_bytes(b"about this")
    assert (
        f"{name} is no data, and x.npy beside it is npy: name the files that are, as in '{tmp_path}/*.npy'"
        in refusal(tmp_path)
    )


def test_data_without_an_ending_are_named_themselves(tmp_path):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "part-0")
    (tmp_path / "a.json").write_bytes(b"{}")
    assert f"part-0 beside it is Parquet: name the files that are, as in '{tmp_path}/part-0'" in refusal(tmp_path)


def test_data_in_another_folder_than_what_is_no_data_are_named_with_their_own_folder(tmp_path):
    """As LeRobot lays out its files."""
    data, meta = tmp_path / "data" / "chunk-000", tmp_path / "meta"
    data.mkdir(parents=True)
    meta.mkdir()
    pq.write_table(pa.table({"x": [1]}), data / "episode_0.parquet")
    (meta / "info.json").write_bytes(b"{}")
    said = f"{meta}/info.json is no data, and {data}/episode_0.parquet is Parquet: name the files that are, as in "
    assert refusal(f"{tmp_path}/**/*") == f"{said}'{data}/*.parquet'"


@pytest.mark.parametrize("head", [b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"\x1f\x8b", b"BZh", b"ID3"])
@pytest.mark.parametrize("name", ["tokens.bin", "tokens"])
def test_bare_tokens_that_begin_as_another_kind_are_bare_tokens(tmp_path, name, head):
    (tmp_path / name).write_bytes(head + bytes(range(1, 200)))
    assert "does not show its format" in refusal(tmp_path) and "format=Tokens" in refusal(tmp_path)


def write_tar(folder):
    with tarfile.open(folder / "a.tar", "w") as tar:
        for name in ("a.txt", "b.txt"):
            tar.addfile(tarfile.TarInfo(name))


def write_tfrecord(folder):
    (folder / "a.tfrecord").write_bytes(record(b"x") + record(b"y"))


def write_npy(folder):
    np.save(folder / "a.npy", np.arange(2))


def write_parquet(folder):
    pq.write_table(pa.table({"x": [1, 2]}), folder / "a.parquet")


@pytest.mark.parametrize("name", ["README.md", "_SUCCESS", "dataset_info.json"])
@pytest.mark.parametrize("write", [write_tar, write_tfrecord, write_npy, write_parquet])
def test_files_that_stand_beside_data_are_passed_over(tmp_path, write, name):
    write(tmp_path)
    (tmp_path / name).write_bytes(b"")
    for source in (tmp_path, f"{tmp_path}/*"):
        assert len(gdsdata.GDSDataset(source, 1, device="cpu")) == (1 if write is write_npy else 2)
    with pytest.raises((ValueError, CorruptData), match=name):
        gdsdata.GDSDataset(tmp_path / name, 1, device="cpu")


def test_an_empty_file_is_called_empty_and_not_bare_tokens(tmp_path):
    (tmp_path / "x.npy").write_bytes(b"")
    assert "x.npy is empty (0 bytes), and does not show its format: write it again" in refusal(tmp_path)


def test_folders_of_images_name_the_remedy_at_once(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.JPEG").write_bytes(b"\xff\xd8\xff")
    said = refusal(tmp_path, FileNotFoundError)
    assert "only folders ('cat', 'dog'), and 'cat' has an image, which is not read: pack the files into tar" in said


SHARDS = [
    ("shard.00000.mds", b"\5\0\0\0", "MDS"),
    ("shard.00000.mds.zstd", b"\x28\xb5\x2f\xfd", "MDS"),
    ("chunk-0-0.bin", b"\x14\0\0\0", "LitData"),
    ("chunk-0-12.zstd.bin", b"\x28\xb5\x2f\xfd", "LitData"),
]


@pytest.mark.parametrize("name, head, packing", SHARDS)
@pytest.mark.parametrize("index", [None, b"", b"[]"])
def test_shards_without_their_index_are_not_called_bare_tokens(tmp_path, name, head, packing, index):
    (tmp_path / name).write_bytes(head + bytes(99))
    if index is not None:
        (tmp_path / "index.json").write_bytes(index)
    state = "is missing" if index is None else f"is damaged (it begins with {index!r})"
    for source in (tmp_path, tmp_path / name):
        assert f"{name} is a shard of {packing}, and its index.json {state}: fetch that file" in refusal(source)


@pytest.mark.parametrize("name, head, packing", SHARDS)
def test_a_shard_that_is_named_by_itself_names_its_folder(tmp_path, name, head, packing):
    (tmp_path / name).write_bytes(head + bytes(99))
    (tmp_path / "index.json").write_text('{"shards": []}')
    assert f"{name} is a shard of {packing}, which its index.json describes: pass '{tmp_path}'" in refusal(
        tmp_path / name
    )


def test_an_index_of_shards_that_cannot_be_read_is_not_called_missing(tmp_path, monkeypatch):
    shard = tmp_path / "shard.00000.mds"
    shard.write_bytes(bytes(99))
    (tmp_path / "index.json").symlink_to("index.json")
    said = refusal(shard)
    assert "is a shard of MDS, and its index.json cannot be read: " in said and "symbolic links" in said

    def forbidden(paths, size_bytes):
        raise PermissionError("403 AccessDenied")

    monkeypatch.setattr("gdsdata.formats.other_kinds.read_heads", forbidden)  # as of a store that lists nothing
    assert "and its index.json cannot be read: 403 AccessDenied" in refusal(shard)


def test_a_path_that_a_shell_would_expand_names_expanduser():
    with pytest.raises(FileNotFoundError, match=r"^~/none.npy .* of any: pass os.path.expanduser\(\) of it"):
        gdsdata.GDSDataset("~/none.npy", 1, device="cpu")


def test_a_command_in_the_place_of_a_path_names_urls():
    with pytest.raises(FileNotFoundError, match=r"^pipe:aws .* of any: commands are not run. Pass the URL .*'s3://"):
        gdsdata.GDSDataset("pipe:aws s3 cp s3://bucket/x.tar -", 1, device="cpu")


def test_bytes_of_no_known_kind_are_refused_as_before(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"something else")
    assert "does not show its format" in refusal(tmp_path)


@pytest.mark.parametrize("log, library", [("_delta_log", "deltalake.DeltaTable"), (".hoodie", "Hudi's own library")])
@pytest.mark.parametrize("split", [None, "train"])
def test_the_folder_of_a_table_with_a_log_is_refused_and_named_files_are_read(tmp_path, log, library, split):
    for name in ("0.parquet", "1.parquet"):
        pq.write_table(pa.table({"x": [1, 2]}), tmp_path / name)
    (tmp_path / log).mkdir()
    (tmp_path / log / "00000000000000000000.json").write_text("{}")
    options = {} if split is None else {"split": split}
    with pytest.raises(ValueError, match=f"its log, {log}, says which of its files have rows now") as caught:
        gdsdata.GDSDataset(tmp_path, 2, device="cpu", **options)
    assert library in str(caught.value)
    named = [str(tmp_path / "1.parquet")]  # what the log says
    assert len(gdsdata.GDSDataset(named, 2, device="cpu", shuffle=False)) == 1


def test_a_file_with_the_name_of_a_tables_log_is_no_log(tmp_path):
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "0.parquet")
    (tmp_path / ".hoodie").write_text("")
    assert len(gdsdata.GDSDataset(tmp_path, 2, device="cpu", shuffle=False)) == 1


TABLES = {
    "_delta_log": ("", "00000000000000000000.json"),
    ".hoodie": ("", "hoodie.properties"),
    "metadata": ("data", "00000-6b2cbd0d-5d0a-4a53-9b8d-0b9f6f1b7a42.metadata.json"),
}


@pytest.fixture(params=TABLES)
def table(tmp_path, request):
    """Make a table in folders ``p=1`` and ``p=2``: its folder, that of the data, and its log."""
    log, (below, name) = request.param, TABLES[request.param]
    folder = tmp_path / "tables" / "t"
    for part in ("p=1", "p=2"):
        (folder / below / part).mkdir(parents=True)
        pq.write_table(pa.table({"x": [1, 2]}), folder / below / part / "0.parquet")
    (folder / log).mkdir()
    (folder / log / name).write_text("{}")
    return folder, folder / below, log


@pytest.mark.parametrize("glob", ["p=1", "p=1/*", "*/0.parquet", "**/*.parquet", "p=*/*.parquet"])
def test_a_part_of_a_table_with_a_log_is_refused_too(table, glob):
    folder, data, log = table
    for source in (data / glob, [data / glob, data / "p=2" / "0.parquet"]):
        with pytest.raises(ValueError, match=f"^{folder} is a .* table: its log, {log}, says which"):
            gdsdata.GDSDataset(source, 2, device="cpu")


def test_a_table_in_a_folder_that_is_searched_for_a_split_is_refused(table):
    folder, _, log = table
    for source in (folder, folder.parent, folder.parent.parent):
        with pytest.raises(ValueError, match=f"^{folder} is a .* table: its log, {log}, says which"):
            gdsdata.GDSDataset(source, 2, device="cpu", split="train")
    with pytest.raises(ValueError, match=f"^{folder} is a .* table"):
        gdsdata.GDSDataset(f"{folder.parent.parent}/**/*", 2, device="cpu")
    with pytest.raises((ValueError, FileNotFoundError), match=f"^{folder} is a .* table"):
        gdsdata.GDSDataset(folder, 2, device="cpu")


def test_named_files_of_a_table_and_files_beside_it_are_read(table):
    folder, data, _ = table
    named = [data / "p=1" / "0.parquet", data / "p=2" / "0.parquet"]
    assert len(gdsdata.GDSDataset(named, 2, device="cpu", format=gdsdata.formats.Parquet(("x",)))) == 2
    np.save(folder.parent / "a.npy", np.zeros(3))
    np.save(folder.parent.parent / "b.npy", np.zeros(3))
    assert len(gdsdata.GDSDataset(f"{folder.parent.parent}/**/*.npy", 1, device="cpu")) == 2
    assert len(gdsdata.GDSDataset(folder.parent, 1, device="cpu")) == 1


@pytest.mark.parametrize("name", ["train.metadata.json", "v1.json", "00000-1.metadata.json"])
def test_a_folder_metadata_of_something_else_is_no_log(tmp_path, name):
    (tmp_path / "data").mkdir()
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / name).write_text("{}")
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "data" / "0.parquet")
    for source in (tmp_path / "data", f"{tmp_path}/**/*.parquet"):
        assert len(gdsdata.GDSDataset(source, 2, device="cpu")) == 1


@pytest.mark.parametrize("stray", ["0.txt", "notes.txt", "labels.csv"])
def test_a_file_of_another_kind_in_a_folder_of_data_is_not_called_damaged(tmp_path, stray):
    for i in range(1, 3):
        np.save(tmp_path / f"{i}.npy", np.zeros(3))
    (tmp_path / stray).write_text("of mine")
    with pytest.raises(ValueError, match=r"is no data, and 1.npy beside it is npy: .* as in .*\*.npy") as caught:
        gdsdata.GDSDataset(tmp_path, 2, device="cpu")
    assert str(tmp_path / stray) in str(caught.value) and not isinstance(caught.value, CorruptData)
    assert len(gdsdata.GDSDataset(f"{tmp_path}/*.npy", 2, device="cpu")) == 1


@pytest.mark.parametrize(("first", "other"), [("npy", "tar"), ("npz", "tar"), ("npy", "parquet"), ("npy", "npz")])
def test_files_of_two_formats_are_distinguished_and_not_called_damaged(tmp_path, first, other):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "x.parquet")
    np.save(tmp_path / "x.npy", np.zeros(3))
    np.savez(tmp_path / "x.npz", x=np.zeros(3))
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.add(tmp_path / "x.npy", "0.npy")
    paths = [tmp_path / f"x.{first}", tmp_path / f"x.{other}"]
    with pytest.raises(ValueError, match=rf"{paths[1]} is .*, and {paths[0]} is .*\*.{other}'") as caught:
        gdsdata.GDSDataset(paths, 1, device="cpu")
    assert not isinstance(caught.value, CorruptData)


@pytest.mark.parametrize("name", ["a.npy", "a.npy-{}-of-00002"])
def test_a_damaged_file_beside_sound_ones_of_its_kind_is_called_damaged(tmp_path, name):
    with open(tmp_path / f"0{name.format('00000')}", "wb") as file:
        np.save(file, np.zeros(3))
    (tmp_path / f"1{name.format('00001')}").write_text("of mine")
    with pytest.raises(CorruptData, match="its npy header"):
        gdsdata.GDSDataset(tmp_path, 2, device="cpu")


# ----------------------------------------------------------------------------------------- a format that does not fit

FORMATS = {
    "a.npy": gdsdata.formats.Npy("file"),
    "a.npz": gdsdata.formats.Npz("file"),
    "a.safetensors": gdsdata.formats.Safetensors("file"),
    "a.parquet": gdsdata.formats.Parquet(),
    "a.arrow": gdsdata.formats.Arrow(),
    "a.tar": gdsdata.formats.Tar(),
}


def write_sound(path):
    table = pa.table({"x": [1, 2, 3]})
    if path.suffix == ".tar":
        with tarfile.open(path, "w") as archive:
            archive.addfile(tarfile.TarInfo("0.txt"), io.BytesIO())
    elif path.suffix == ".safetensors":
        gdsdata.save({"x": torch.ones(3)}, path)
    elif path.suffix == ".npz":
        np.savez(path, x=np.ones(3))
    else:
        write = {".npy": lambda: np.save(path, np.ones(3)), ".parquet": lambda: pq.write_table(table, path)}
        write.get(path.suffix, lambda: feather.write_feather(table, path, compression="uncompressed"))()


@pytest.mark.parametrize("given", FORMATS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_format_that_is_not_that_of_the_file_is_named_and_the_file_not_called_damaged(tmp_path, name, given):
    write_sound(tmp_path / name)
    if name == given:
        assert gdsdata.GDSDataset(tmp_path / name, 1, FORMATS[given], device="cpu").samples > 0
        return
    with pytest.raises(ValueError) as caught:
        gdsdata.GDSDataset(tmp_path / name, 1, FORMATS[given], device="cpu")
    its, other = type(FORMATS[name]).__name__, type(FORMATS[given]).__name__
    assert f"and format={other}(...) reads other files: leave format= out, or pass {its}(...)" in str(caught.value)
    assert not isinstance(caught.value, CorruptData) and "damaged" not in str(caught.value)


def test_a_kind_that_is_not_read_says_what_to_do_whatever_format_is_given(tmp_path):
    (tmp_path / "x.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(1000))
    with pytest.raises(ValueError, match="is HDF5, which is not read"):
        gdsdata.GDSDataset(tmp_path / "x.h5", 1, FORMATS["a.tar"], device="cpu")


def test_a_damaged_file_of_the_format_that_is_given_is_called_damaged(tmp_path):
    write_sound(tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[:-4])
    with pytest.raises(CorruptData, match="cut short"):
        gdsdata.GDSDataset(tmp_path / "a.parquet", 1, FORMATS["a.parquet"], device="cpu")
