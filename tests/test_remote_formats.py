"""Every format's index of objects is that of the same files, and takes few requests."""

import io
import os
import tarfile
import time

import numpy as np
import pytest
import test_tfrecord
from helpers import few_bytes_of_python, random_bytes
from object_server import serving
from sources import SOURCES

from gdsdata import formats
from gdsdata.data.identity import identity_of
from gdsdata.data.indexing import Indexing
from gdsdata.data.split import Split
from gdsdata.errors import CorruptData
from gdsdata.storage import remote_file
from gdsdata.storage.store import ObjectInfo

MIB = 2**20

pytestmark = pytest.mark.filterwarnings("ignore:.*were unpacked")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def server(monkeypatch):
    with serving(monkeypatch) as server:
        yield server


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "data"
    made.mkdir()
    return made


def indexed(source, format=None, index_cache=None, skipped=None):
    return Indexing(source, format, skipped, index_cache, False).indexed(lambda format, path: None)


def said(found):
    _, format, index = found
    return identity_of(index, format, Split()), index.first_sample.tolist()


@pytest.mark.parametrize("name", SOURCES)
def test_an_index_of_objects_is_that_of_the_files(folder, server, name):
    SOURCES[name].write(folder)
    format = SOURCES[name].format()
    expected = said(indexed(folder, format))
    server.put_folder(folder, "data/")
    assert said(indexed(server.url("data/"), format)) == expected
    assert (server.lists, server.heads) == (1, 0)
    assert len(server.requests) <= 4 * len(server.content), server.requests


@pytest.mark.parametrize(
    "name", ["npy files", "tar", "npz fields", "safetensors", "tfrecord", "mds", "litdata", "arrow"]
)
def test_the_format_of_objects_is_recognized(folder, server, name):
    SOURCES[name].write(folder)
    expected = said(indexed(folder))
    server.put_folder(folder)
    assert said(indexed("s3://bucket")) == expected


@pytest.mark.parametrize("name", SOURCES)
def test_a_kept_index_of_objects_takes_one_list_and_no_other_request(folder, tmp_path, server, name):
    SOURCES[name].write(folder)
    format = SOURCES[name].format()
    server.put_folder(folder, "data/")
    source, kept = server.url("data/"), tmp_path / "kept"
    expected = said(indexed(source, format, kept))
    server.lists, server.requests = 0, []
    found = indexed(source, format, kept)
    assert said(found) == expected
    assert (server.lists, server.heads) == (1, 0)
    if name != "packed mds":  # whose unpacked files have just changed
        assert found[2].mapped_from is not None and server.requests == []


def test_a_kept_index_without_a_named_format_takes_one_list_too(folder, tmp_path, server):
    SOURCES["tar"].write(folder)
    server.put_folder(folder, "data/")
    expected = said(indexed(server.url("data/*.tar"), None, tmp_path / "kept"))
    server.requests = []
    assert said(indexed(server.url("data/*.tar"), None, tmp_path / "kept")) == expected
    assert len(server.requests) <= 1  # for the head that names the format


@pytest.mark.parametrize("change", ["replaced", "deleted", "added"])
def test_a_kept_index_is_made_anew_if_its_objects_are_others(folder, tmp_path, server, change):
    SOURCES["records"].write(folder)
    server.put_folder(folder)
    format = formats.Records("u1", (64,))
    before = said(indexed("s3://bucket", format, tmp_path / "kept"))
    if change == "deleted":
        del server.content["1.bin"]
    else:
        server.content["1.bin" if change == "replaced" else "9.bin"] = bytes(64)
    assert said(indexed("s3://bucket", format, tmp_path / "kept")) != before


def test_objects_that_an_index_names_are_asked_for_side_by_side(folder, server, monkeypatch):
    SOURCES["mds"].write(folder)
    expected = said(indexed(folder))
    server.put_folder(folder, "data/")
    assert said(indexed(server.url("data/index.json"))) == expected
    assert server.heads == len(server.content)


def test_heads_are_read_many_at_a_time(server):
    for i in range(300):
        content = io.BytesIO()
        np.save(content, np.arange(5) + i)
        server.content[f"{i:03}.npy"] = content.getvalue()
    answer = server.answer

    def slow(request):
        time.sleep(0.05)
        answer(request)

    server.answer = slow
    begun = time.monotonic()
    _, _, index = indexed("s3://bucket", formats.Npy())
    assert len(index) == 300 and time.monotonic() - begun < 300 * 0.05 / 4


def put_tar(server, sizes, name="a.tar"):
    content, headers = io.BytesIO(), []
    with tarfile.open(fileobj=content, mode="w") as tar:
        for i, size in enumerate(sizes):
            member = tarfile.TarInfo(f"{i:05}.bin")
            member.size = size
            headers.append(tar.offset)
            tar.addfile(member, io.BytesIO(random_bytes(size, i)))
        headers.append(tar.offset)
    server.content[name] = content.getvalue()
    return headers


def asked_bytes(server, name="a.tar"):
    return sum(end - begin for method, key, begin, end in server.requests if key == name)


def test_a_tar_of_large_members_is_not_read_whole(server):
    put_tar(server, [3 * MIB] * 12)
    _, _, index = indexed(server.url("a.tar"), formats.Tar(index_cache=None))
    assert len(index) == 12
    assert len(server.requests) <= 14 and asked_bytes(server) <= 15 * remote_file.LEAST_BYTES


def test_a_tar_of_small_members_is_read_in_large_pieces(server):
    put_tar(server, [2000] * 5000)
    _, _, index = indexed(server.url("a.tar"), formats.Tar(index_cache=None))
    assert len(index) == 5000
    size = len(server.content["a.tar"])
    assert asked_bytes(server) <= size + 2 * MIB and len(server.requests) <= size // MIB + 8


def test_a_tar_with_an_index_beside_it_is_read_at_its_headers(server):
    headers = put_tar(server, [150_000] * 100)
    server.content["a.tar.idx"] = np.array(headers, "<u8").tobytes()
    _, _, index = indexed(server.url("a.tar"), formats.Tar(index_cache=None))
    assert len(index) == 100
    assert asked_bytes(server) < len(server.content["a.tar"]) / 5


def test_the_members_of_a_tar_are_kept_for_its_version(server):
    put_tar(server, [2000] * 50)
    expected = said(indexed(server.url("a.tar"), formats.Tar()))
    server.requests = []
    assert said(indexed(server.url("a.tar"), formats.Tar())) == expected
    assert server.requests == []
    put_tar(server, [2000] * 49 + [2001])
    assert said(indexed(server.url("a.tar"), formats.Tar())) != expected


@pytest.mark.parametrize("record_bytes", [300, 200_000])
def test_records_of_tfrecord_are_found_in_few_requests(server, record_bytes):
    record = test_tfrecord.record(random_bytes(record_bytes))
    count = 6 * MIB // record_bytes
    server.content["a.tfrecord"] = record * count
    _, _, index = indexed(server.url("a.tfrecord"), formats.TFRecord())
    assert len(index) == count
    assert len(server.requests) <= 40


def test_an_object_that_is_replaced_while_it_is_indexed_is_corrupt_data(folder, server):
    SOURCES["npy files"].write(folder)
    server.put_folder(folder)
    answer = server.answer

    def replaced(request):
        server.content["3.npy"] = server.content["2.npy"]
        answer(request)

    server.answer = replaced
    with pytest.raises(CorruptData, match=r"s3://bucket/3\.npy") as caught:
        indexed("s3://bucket", formats.Npy())
    assert caught.value.path == "s3://bucket/3.npy"


def test_objects_that_are_missing_are_named(folder, server):
    SOURCES["mds"].write(folder)
    server.put_folder(folder, "data/")
    lost = sorted(key for key in server.content if key.endswith(".mds"))[1]
    del server.content[lost]
    with pytest.raises(FileNotFoundError, match="index.json lists it") as caught:
        indexed(server.url("data/"))
    assert caught.value.filename == server.url(lost)
    with pytest.raises(FileNotFoundError, match="s3://bucket/nowhere.npy"):
        indexed(server.url("nowhere.npy"))


def test_the_other_object_of_a_megatron_pair_is_found_by_its_name(folder, server):
    SOURCES["megatron windows"].write(folder)
    expected = said(indexed(folder, formats.Megatron(5)))
    server.put_folder(folder)
    assert said(indexed("s3://bucket/*.bin", formats.Megatron(5))) == expected
    assert server.heads == 0  # the list has both


def test_a_file_url_is_a_path(folder):
    SOURCES["tar"].write(folder)
    found = indexed(f"file://{folder}", formats.Tar(index_cache=None))
    assert list(found[0]) == [os.path.join(folder, name) for name in sorted(os.listdir(folder))]


def test_a_long_read_is_asked_for_in_parts_and_has_all_bytes(server):
    content = random_bytes(2 * remote_file._MOST_ASKED_BYTES + 12345, 3)
    server.content["long"] = bytes(content)
    with remote_file.RemoteFile("s3://bucket/long") as file:
        assert file.read(5, len(content)) == bytes(content[5:])
        assert file.read(7, 100) == bytes(content[7:107])


def test_a_claimed_size_allocates_no_memory(server, monkeypatch):
    server.content["short"] = bytes(1000)
    monkeypatch.setattr(server, "info", lambda key: ObjectInfo(server.url(key), 10**17, server.tag(key)))
    with (
        few_bytes_of_python(2 * remote_file._MOST_ASKED_BYTES),
        remote_file.RemoteFile("s3://bucket/short") as file,
        pytest.raises(CorruptData, match="s3://bucket/short"),
    ):
        file.read(0, file.size_bytes)
