"""Folders and files that another user made: pipes, holes, links, and the permissions of copies."""

import fcntl
import json
import os
import stat
import struct

import numpy as np
import pytest
import test_litdata
import test_mds
import test_tar
import torch

import gdsdata
from gdsdata.checkpoint.background.checkpoint_folder import CheckpointFolder
from gdsdata.checkpoint.background.folder_lock import FolderLock
from gdsdata.checkpoint.background.manifest import LONGEST_BYTES, parsed_manifest, step_of_folder
from gdsdata.checkpoint.file_writer import FileWriter
from gdsdata.checkpoint.torch_zip.unpickling import NotPlain, storages_of
from gdsdata.errors import CorruptData
from gdsdata.formats import LitData, Mds, Npy, Npz, Tar, caches
from gdsdata.io import remote_access
from gdsdata.storage.cache import Cache
from gdsdata.storage.exchange import exchange
from gdsdata.storage.opened import open_stream

HOLE_BYTES = 2**40

# -------------------------------------------------------------------------------------------------- pipes


def pipe_instead_of(path):
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    return str(path)


def mds_with_a_pipe(folder):
    test_mds.write_plain(folder)
    pipe_instead_of(next(folder.glob("*.mds")))
    return Mds().index([str(folder / "index.json")])


def litdata_with_a_pipe(folder):
    test_litdata.write_plain(folder)
    pipe_instead_of(next(folder.glob("*.bin")))
    return LitData().index([str(folder / "index.json")])


def safetensors_with_a_pipe(folder):
    index = {"weight_map": {"a": "x.safetensors"}}
    (folder / "x.safetensors.index.json").write_text(json.dumps(index))
    pipe_instead_of(folder / "x.safetensors")
    return gdsdata.load(folder / "x.safetensors.index.json")


def a_file_that_becomes_a_pipe(folder):
    for name in ("0.npy", "1.npy"):
        np.save(folder / name, np.ones(1000))
    reading = gdsdata.Reading(index_cache=None)
    data = gdsdata.GDSDataset(str(folder), 1, shuffle=False, device="cpu", reading=reading)
    assert len(data) == 2
    pipe_instead_of(folder / "1.npy")
    return list(data)


PIPES = {
    "mds": mds_with_a_pipe,
    "litdata": litdata_with_a_pipe,
    "safetensors": safetensors_with_a_pipe,
    "replaced": a_file_that_becomes_a_pipe,
    "index.json": lambda folder: Mds().index([pipe_instead_of(folder / "index.json")]),
    "npy": lambda folder: Npy().index([pipe_instead_of(folder / "x.npy")]),
    "npz": lambda folder: Npz().index([pipe_instead_of(folder / "x.npz")]),
    "pt": lambda folder: gdsdata.load(pipe_instead_of(folder / "x.pt")),
    "manifest": lambda folder: CheckpointFolder(str(pipe_instead_of(folder / "step-1/manifest.json"))[:-21]).complete(),
    "run-id": lambda folder: CheckpointFolder(os.path.dirname(pipe_instead_of(folder / "run-id"))).run_id(),
    "stream": lambda folder: open_stream(pipe_instead_of(folder / "x.zstd")),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", PIPES)
def test_a_pipe_in_the_place_of_a_file_is_refused_and_nobody_waits_for_it(tmp_path, kind):
    with pytest.raises((OSError, ValueError), match="pipe|not a regular file"):
        PIPES[kind](tmp_path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["x.tar.idx", ".x.tar.gdsdata-index"])
def test_a_pipe_in_the_place_of_an_index_beside_a_tar_is_passed_by(tmp_path, name):
    test_tar.shard(tmp_path / "x.tar", [("0.x", b"abc")], "ustar")
    pipe_instead_of(tmp_path / name)
    assert len(Tar(index_cache="beside").index([str(tmp_path / "x.tar")])) == 1


def test_files_that_are_read_have_no_flag_that_makes_a_file_system_answer_again_later(tmp_path):
    (tmp_path / "x.bin").write_bytes(bytes(100))
    file = gdsdata.io.engine.File(str(tmp_path / "x.bin"))
    flags = fcntl.fcntl(file.descriptor, fcntl.F_GETFL)
    assert not flags & os.O_NONBLOCK and not os.get_inheritable(file.descriptor)


# -------------------------------------------------------------------------------------------------- holes


def hole(path, head):
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(HOLE_BYTES)
    return str(path)


@pytest.mark.parametrize(
    "read",
    [
        lambda folder: Mds().index([hole(folder / "index.json", b'{"shards": [')]),
        lambda folder: LitData().index([hole(folder / "index.json", b'{"chunks": [')]),
        lambda folder: gdsdata.load(hole(folder / "x.safetensors.index.json", b'{"weight_map": {')),
        lambda folder: gdsdata.load(hole(folder / "x.safetensors", struct.pack("<Q", 2**38))),
        lambda folder: Npy().index([hole(folder / "x.npy", b"\x93NUMPY\2\0\xff\xff\xff\xff")]),
    ],
    ids=["mds", "litdata", "safetensors-index", "safetensors", "npy"],
)
def test_a_file_of_one_large_hole_is_refused_before_memory_is_allocated(tmp_path, read):
    with pytest.raises(CorruptData) as caught:
        read(tmp_path)
    assert caught.value.path.startswith(str(tmp_path))


def test_a_manifest_of_one_large_hole_is_refused_before_memory_is_allocated(tmp_path):
    (tmp_path / "step-1").mkdir()
    hole(tmp_path / "step-1" / "manifest.json", b"{")
    with pytest.raises(CorruptData, match=f"more than {LONGEST_BYTES} bytes"):
        CheckpointFolder(str(tmp_path)).complete()


FILE = b'{"name": "rank-0-00000000.pt", "size_bytes": %b}'
MANIFEST = b'{"format": 1, "step": 1, "sequence": %b, "files": [%b]}'


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        MANIFEST % (b"1e400", b""),
        MANIFEST % (b"-1", b""),
        MANIFEST % (b"1", FILE % b"1e400"),
        MANIFEST % (b"1", FILE % b"-1"),
        MANIFEST % (b"1", FILE % b"true"),
        MANIFEST % (b"9" * 5000, b""),
        MANIFEST % (b"1", FILE.replace(b"rank-0", b"../rank-0") % b"1"),
    ],
    ids=["deep", "infinite", "negative", "infinite size", "negative size", "bool", "digits", "elsewhere"],
)
def test_a_damaged_manifest_is_corrupt_data_with_its_path(content):
    with pytest.raises(CorruptData, match="'/there' is no manifest") as caught:
        parsed_manifest(content, 1, "/there")
    assert caught.value.path == "/there"


def test_a_listed_folder_with_thousands_of_digits_is_no_step():
    assert step_of_folder("step-" + "9" * 5000) is None and step_of_folder("step-123") == 123


def test_a_storage_whose_key_is_no_text_is_left_to_torch():
    """Its text would be asked for, and of nested tuples that is a RecursionError."""
    nested = b")" + b"\x85" * 2000
    pickled = b"\x80\2(X\7\0\0\0storagectorch\nFloatStorage\n" + nested + b"X\3\0\0\0cpuK\x10tQ."
    with pytest.raises(NotPlain, match="key"):
        storages_of(pickled)


# --------------------------------------------------------------------------------------------------- links


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "x.lock").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic links"):
        caches.lock_opener(str(tmp_path / "x.lock"), os.O_WRONLY | os.O_CREAT)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "lock").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic links"):
        FolderLock(str(tmp_path / "checkpoints"))
    assert (tmp_path / "mine").read_text() == "precious"


# ------------------------------------------------------------------------------------------------- headers


@pytest.mark.parametrize(
    "headers",
    [{"x-a": "sEcReT\r\nx-b: 1"}, {"x-a": "sEcReT\n"}, {"x-a\r\nx-b": "1"}, {"x a": "1"}, {"": "1"}, {"x-a": "1\0"}],
)
def test_a_header_with_a_line_break_is_refused_without_its_value(headers):
    with pytest.raises(ValueError, match="no header may have") as caught:
        exchange("GET", "http://127.0.0.1:9/", headers, b"", 1.0, 10)
    assert "sEcReT" not in str(caught.value)


def test_headers_that_libcurl_takes_keep_empty_values_and_tabs():
    assert remote_access.header_lines({"x-a": "", "x-b": "é\t1"}) == ["x-a;", "x-b: é\t1"]


# ------------------------------------------------------------------------------------- who may read copies


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def mode_of(path):
    return stat.S_IMODE(os.stat(path).st_mode)


def test_a_new_cache_is_for_its_user_alone_and_a_folder_that_is_there_keeps_its_mode(tmp_path, open_umask):
    Cache(tmp_path / "new", "1GiB")
    (tmp_path / "shared").mkdir(mode=0o770)
    Cache(tmp_path / "shared", "1GiB")
    assert (mode_of(tmp_path / "new"), mode_of(tmp_path / "shared")) == (0o700, 0o770)


def test_files_in_a_users_cache_are_for_that_user_alone(tmp_path, monkeypatch, open_umask):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caches.written(caches.place_of("/data/x.mds", "user", "mds", "unpacked")) as file:
        file.write(b"samples")
    assert mode_of(tmp_path / "gdsdata" / "mds") == 0o700


def test_a_checkpoint_that_is_being_written_over_another_is_for_its_user_alone(tmp_path, open_umask, monkeypatch):
    path = tmp_path / "x.pt"
    gdsdata.save({"a": torch.ones(4)}, path)
    os.chmod(path, 0o640)
    modes, commit = [], FileWriter.commit

    def commit_and_look(self):
        modes.extend(mode_of(one) for one in tmp_path.iterdir() if one != path)
        commit(self)

    monkeypatch.setattr(FileWriter, "commit", commit_and_look)
    gdsdata.save({"a": torch.zeros(4)}, path)
    assert modes and all(not mode & 0o137 for mode in modes) and mode_of(path) == 0o640
