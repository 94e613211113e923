"""Every format refuses files that it cannot open or use, with path, cause and remedy."""

import re

import pytest

from gdsdata.errors import CorruptData, IoError
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
    recognise,
)

FORMATS = {
    "x.npy": Npy(),
    "x.npz": Npz(),
    "x.bin": Tokens(seq_len=2),
    "x.safetensors": Safetensors(),
    "x.tar": Tar(index_cache=None),
    "x.tfrecord": TFRecord(),
    "x.arrow": Arrow(),
    "x.parquet": Parquet(),
    "x.idx": Megatron(),
    "data/index.json": Mds(),
    "more/index.json": LitData(),
}
names = [type(format).__name__ for format in FORMATS.values()]
every_format = pytest.mark.parametrize(("name", "format"), FORMATS.items(), ids=names)
SOMETHING_ELSE = [b"\x93", b"{", b"PK\3\4", b"\xff" * 700, bytes(64), b"ARROW1", b"MMIDIDX\0\0" + b"\1" * 40]


def place(tmp_path, name: str):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if name == "x.idx":
        (tmp_path / "x.bin").write_bytes(b"")
    return path


@every_format
@pytest.mark.parametrize("hindrance", ["Too many levels of symbolic links", "Is a directory", "Not a directory"])
def test_a_file_that_cannot_be_opened_is_an_io_error_with_its_path(tmp_path, name, format, hindrance):
    path = place(tmp_path, name)
    if hindrance == "Too many levels of symbolic links":
        path.symlink_to(path)
    elif hindrance == "Is a directory":
        path.mkdir()
    else:
        path.write_bytes(b"")
        path = path / path.name
    with pytest.raises(IoError, match=hindrance) as caught:
        format.index([str(path)])
    assert caught.value.path in (str(path), str(path)[:-4] + ".bin")  # of a pair, the file that is opened first
    assert caught.value.path in str(caught.value)
    assert caught.value.errno


@every_format
def test_a_missing_file_is_named(tmp_path, name, format):
    path = place(tmp_path, name)
    with pytest.raises(FileNotFoundError, match=re.escape(str(path).removesuffix(".idx"))):
        format.index([str(path)])


REMEDY = r"write (it|the file|the shard|or copy)|copy it|cut short|preprocess|decompress|use a shorter|no samples"


@every_format
@pytest.mark.parametrize("content", SOMETHING_ELSE)
def test_bytes_of_something_else_are_refused_with_path_and_remedy(tmp_path, name, format, content):
    path = place(tmp_path, name)
    path.write_bytes(content)
    try:
        index = format.index([str(path)])
    except ValueError as error:
        assert type(error) in (ValueError, CorruptData) and str(path) in str(error)
        assert re.search(REMEDY, str(error)), f"no remedy: {error}"
        assert not isinstance(error, CorruptData) or error.path == str(path)
    else:
        assert isinstance(format, Tokens) and len(index)


def test_a_circle_of_links_is_an_error_that_names_the_path(tmp_path):
    path = tmp_path / "x"
    path.symlink_to(path)
    with pytest.raises(IoError, match="Too many levels") as caught:
        recognise([str(path)])
    assert caught.value.path == str(path)


@pytest.mark.parametrize(("paths", "error", "words"), [("a.npy", TypeError, "is one path"), ([], ValueError, "empty")])
def test_a_value_that_is_no_list_of_paths_is_refused(paths, error, words):
    with pytest.raises(error, match=words):
        recognise(paths)
