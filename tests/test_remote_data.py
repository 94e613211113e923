"""Batches from URLs are those of the same files, in each shuffle."""

import io
import itertools
import json
import pickle
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pytest
from helpers import assert_same_batches, grouped, write_records
from object_server import serving
from sources import SOURCES
from torch.utils.data import DataLoader

from gdsdata import GDSDataset, Reading
from gdsdata.cache import main as cache_program
from gdsdata.errors import CorruptData
from gdsdata.formats import Records, Tokens
from gdsdata.io import remote_access
from gdsdata.storage import settings, stores
from gdsdata.storage.secret import Keys
from gdsdata.storage.settings import RemoteSettings, size_bytes_of

MIB = 2**20

pytestmark = pytest.mark.filterwarnings("ignore:.*were unpacked")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(settings, "_folder_of_derived", None)


@pytest.fixture
def server(monkeypatch):
    with serving(monkeypatch) as server:
        yield server


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "data"
    made.mkdir()
    return made


def read(source, format, **arguments):
    return GDSDataset(
        source,
        **grouped({"batch_size": 2, "format": format, "device": "cpu", "ragged": "padded", "seed": 7, **arguments}),
    )


def tar_of(members):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return made.getvalue()


def flat(batches):
    return [
        np.asarray(value) for batch in batches for value in (batch.values() if isinstance(batch, dict) else [batch])
    ]


@pytest.mark.parametrize("shuffle", [False, True, "lanes", "auto"])
@pytest.mark.parametrize("name", SOURCES)
def test_batches_of_objects_are_those_of_the_files(folder, server, name, shuffle):
    SOURCES[name].write(folder)
    server.put_folder(folder, "data/")
    there = read(server.url("data/"), SOURCES[name].format(), shuffle=shuffle)
    if shuffle == "auto":  # which measures files, and finds these too small
        shuffle = "lanes" if there.stats()["shuffle"].startswith("Lanes") else True
        assert shuffle == "lanes" or name in ("npy files", "parquet", "packed mds")
    here = read(folder, SOURCES[name].format(), shuffle=shuffle)
    for _ in range(2):
        assert_same_batches(flat(there), flat(here))


@pytest.mark.parametrize("name", SOURCES)
def test_a_real_servers_objects_are_read_as_the_files(folder, seaweedfs, name):
    SOURCES[name].write(folder)
    prefix = f"{name.replace(' ', '-')}/"
    for path in folder.iterdir():
        seaweedfs.put(prefix + path.name, path.read_bytes())
    options = options_of(seaweedfs)
    for shuffle in (False, True, "lanes"):
        here = read(folder, SOURCES[name].format(), shuffle=shuffle)
        there = read(seaweedfs.url(prefix), SOURCES[name].format(), shuffle=shuffle, storage_options=options)
        assert_same_batches(flat(there), flat(here))


def options_of(server):
    keys = Keys(access_key_id=server.access_key, secret_access_key=server.secret_key)
    return {"endpoint_url": server.endpoint_url, "region": server.region, "credentials": keys}


def records(source, **arguments):
    return read(source, Records("u1", (64,)), **arguments)


def put_records(server, files=3, size=40):
    for i in range(files):
        server.content[f"{i}.bin"] = np.arange(size * 64, dtype=np.uint32).astype("u1").tobytes()


def test_an_object_that_is_replaced_during_an_epoch_is_corrupt_data(server):
    put_records(server)
    data = records("s3://bucket/")
    server.content["1.bin"] = server.content["1.bin"][::-1]
    with pytest.raises(CorruptData, match=r"s3://bucket/1\.bin") as caught:
        list(data)
    assert caught.value.path == "s3://bucket/1.bin"


def test_an_object_that_is_deleted_during_an_epoch_is_a_missing_file(server):
    put_records(server)
    data = records("s3://bucket/")
    del server.content["2.bin"]
    with pytest.raises(FileNotFoundError, match=r"s3://bucket/2\.bin"):
        list(data)


def test_damaged_objects_can_be_left_out(folder, server):
    SOURCES["npy files"].write(folder)
    server.put_folder(folder)
    server.content["3.npy"] = server.content["3.npy"][:-7]
    with pytest.warns(RuntimeWarning, match=r"1 of 7 files are left out.*s3://bucket/3\.npy"):
        data = read("s3://bucket/", SOURCES["npy files"].format(), on_error="skip")
    assert data.samples == 6


def test_auto_takes_lanes_for_long_objects_and_says_so(server):
    server.content["a.bin"] = bytes(4 * MIB)
    assert "lanes" in (said := records(server.url("a.bin"), shuffle="auto").stats()["shuffle"].lower())
    assert "the data is remote" in said


def test_auto_takes_uniform_for_samples_that_are_large_reads_themselves(server):
    server.content["a.bin"] = bytes(4 * MIB)
    data = GDSDataset(server.url("a.bin"), 1, Records("u1", (MIB // 2,)), device="cpu", shuffle="auto")
    assert "524288 bytes are large reads themselves" in data.stats()["shuffle"]


def test_ranks_need_no_agreement_on_the_shuffle_of_remote_data(server):
    server.content["a.bin"] = bytes(4 * MIB)
    chosen = [records(server.url("a.bin"), shuffle="auto", rank=rank, world_size=2) for rank in range(2)]
    assert chosen[0].stats()["shuffle"] == chosen[1].stats()["shuffle"]


def test_pinned_residency_of_objects_is_refused(server):
    put_records(server)
    with pytest.raises(ValueError, match="CUDA|maps files"):
        records("s3://bucket/", residency="pinned")


@pytest.mark.parametrize("name", ["tar", "tokens", "mds", "parquet"])
def test_a_state_of_files_continues_with_the_same_objects_and_back(folder, server, name):
    SOURCES[name].write(folder)
    server.put_folder(folder, "elsewhere/")
    places = [folder, server.url("elsewhere/")]
    for first, second in itertools.permutations(places):
        data = read(first, SOURCES[name].format(), on_break="restart")
        taken = iter(data)
        next(taken)
        state = json.loads(json.dumps(data.state_dict()))
        rest = flat(taken)
        continued = read(second, SOURCES[name].format())
        continued.load_state_dict(state)
        assert_same_batches(flat(continued), rest)


def test_a_state_continues_on_another_number_of_ranks(server):
    put_records(server)
    whole = records("s3://bucket/", batch_size=4)
    taken = iter(whole)
    next(taken)
    state = whole.state_dict()
    rest = [np.asarray(batch) for batch in taken]
    ranks = [records("s3://bucket/", batch_size=2, rank=rank, world_size=2) for rank in range(2)]
    for data in ranks:
        data.load_state_dict(state)
    for expected, *parts in zip(rest, *ranks, strict=True):
        assert (np.concatenate(parts) == expected).all()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_loader_read_objects(seaweedfs, method):
    content = np.arange(100 * 64, dtype=np.uint32).astype("u1").tobytes()
    source = seaweedfs.put(f"workers-{method}/a.bin", content)
    data = records(source, storage_options=options_of(seaweedfs), shuffle=False)
    workers = {"fork": 2, "spawn": 1}[method]  # a spawned one imports torch, for 2 s of CPU time
    loader = DataLoader(data, batch_size=None, num_workers=workers, multiprocessing_context=method)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert b"".join(np.asarray(batch).tobytes() for batch in loader) == content


def test_no_state_pickle_or_text_has_a_secret(seaweedfs):
    source = seaweedfs.put("secrets/a.bin", bytes(6400))
    reading = Reading(storage_options=options_of(seaweedfs))
    data = GDSDataset(source, 4, Records("u1", (64,)), device="cpu", reading=reading)
    next(iter(data))
    shown = [repr(data), repr(reading), str(data.state_dict()), str(data.stats()), str(data.report())]
    shown.append(pickle.dumps(data).decode("latin-1"))
    assert not [text for text in shown if seaweedfs.secret_key in text]


def test_a_state_of_signed_urls_has_no_signature_and_continues_with_new_ones(seaweedfs):
    """Signed URLs end, so a program that is started again has others."""
    seaweedfs.put("signed/a.bin", bytes(range(200)))
    seaweedfs.put("signed/b.bin", bytes(range(200)))

    def opened(lifetime_s):
        named = [{"Bucket": seaweedfs.bucket, "Key": f"signed/{name}.bin"} for name in "ab"]
        urls = [seaweedfs.client.generate_presigned_url("get_object", one, lifetime_s) for one in named]
        return urls, GDSDataset(urls, 4, Records("u1", (10,)), device="cpu", seed=1)

    urls, data = opened(600)
    batches = iter(data)
    next(batches)
    state = data.state_dict()
    rest = [batch.numpy().copy() for batch in batches]
    queries = [value for url in urls for value in url.partition("?")[2].split("&") if "=" in value]
    assert not any(one.partition("=")[2] in str(state) for one in queries if len(one.partition("=")[2]) > 10)

    renewed, again = opened(1200)
    assert not set(urls) & set(renewed)
    again.load_state_dict(state)
    resumed = [batch.numpy() for batch in again]
    assert len(rest) == 9 and all(np.array_equal(*pair) for pair in zip(rest, resumed, strict=True))


def test_settings_are_pickled_whole_only_for_a_process_that_is_spawned(monkeypatch):
    keys = Keys(access_key_id="A", secret_access_key="B")
    whole = RemoteSettings(("s3",), "/c", 7, {"region": "r", "credentials": keys, "headers": {"Authorization": "B"}})
    assert pickle.loads(pickle.dumps(whole)) == RemoteSettings(("s3",), "/c", 7, {"region": "r"})
    assert "Authorization" not in repr(whole)
    monkeypatch.setattr(settings, "get_spawning_popen", lambda: True)
    assert pickle.loads(pickle.dumps(whole)) == whole


@pytest.mark.parametrize(
    ("said", "expected"),
    [("500GiB", 500 * 2**30), ("2 TB", 2 * 10**12), ("1.5kB", 1500), ("7", 7), (9, 9), ("3Mi", 3 * MIB), ("4 B", 4)],
)
def test_sizes_are_written_with_units(said, expected):
    assert size_bytes_of(said) == expected


@pytest.mark.parametrize("said", ["", "GiB", "-1", "1 XB", "1e9", -1])
def test_a_value_that_is_no_size_is_refused(said):
    with pytest.raises(ValueError, match="cache_bytes="):
        size_bytes_of(said)


def test_an_option_that_a_store_does_not_have_is_named(monkeypatch):
    monkeypatch.setattr(stores, "_options", {})
    monkeypatch.setattr("gdsdata.storage.settings._options_of", {})
    with pytest.raises(ValueError, match="nonsense"):
        records("s3://bucket-of-nobody/a.bin", storage_options={"nonsense": 1})


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"storage_options": {"endpoint": "http://localhost:1"}}, "endpoint"),
        ({"storage_options": {"endpoint_url": "localhost:1"}}, "endpoint_url"),
        ({"storage_options": {"region": "a"}, "cache": "a-file"}, "a-file"),
    ],
)
def test_settings_that_are_refused_do_not_change_the_process(server, tmp_path, monkeypatch, bad, named):
    monkeypatch.chdir(tmp_path)
    Path("a-file").touch()
    put_records(server)
    before = stores._options.copy(), settings._folder_of_derived
    with pytest.raises((ValueError, OSError), match=named):
        records("s3://bucket/", **bad)
    assert (stores._options, settings._folder_of_derived) == before
    assert records("s3://bucket/").samples == 120


def test_unpacked_shards_of_objects_lie_in_the_cache(folder, server, tmp_path):
    SOURCES["packed mds"].write(folder)
    server.put_folder(folder)
    data = read("s3://bucket/", SOURCES["packed mds"].format(), cache=tmp_path / "nvme")
    assert len(list(tmp_path.glob("nvme/derived/mds/*.unpacked"))) == 2
    assert_same_batches(flat(data), flat(read(folder, SOURCES["packed mds"].format())))


def test_tokens_of_an_object_with_a_header_are_read(server, tmp_path):
    write_records(tmp_path / "a.bin", 30, 64, 0)
    server.content["a.bin"] = (tmp_path / "a.bin").read_bytes()
    here, there = (read(source, Tokens("u2", 7)) for source in (tmp_path / "a.bin", server.url("a.bin")))
    assert_same_batches(flat(there), flat(here))


def test_arguments_of_objects_are_given_by_themselves_or_in_their_group(server, tmp_path):
    put_records(server)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GDSDataset("s3://bucket/", 4, Records("u1", (64,)), device="cpu", storage_options={})
    with pytest.raises(TypeError, match="cache= is given twice"):
        GDSDataset("s3://bucket/", 4, device="cpu", cache=tmp_path, reading=Reading(cache=tmp_path))


def test_an_index_file_of_a_web_server_names_the_objects(folder, server):
    SOURCES["tar"].write(folder)
    server.put_folder(folder, "train/")
    server.content["train.txt"] = b"# shards\ntrain/0.tar\ntrain/1.tar\n"
    there = read(f"{server.address}/bucket/train.txt", None)
    assert_same_batches(flat(there), flat(read(folder, None)))


@pytest.mark.parametrize("name", ["tar", "tokens", "parquet", "npy files"])
def test_the_second_start_with_a_cache_reads_nothing_from_the_server(folder, server, tmp_path, name):
    SOURCES[name].write(folder)
    server.put_folder(folder, "data/")
    cache = tmp_path / "nvme"
    try:
        first = flat(read(server.url("data/"), SOURCES[name].format(), cache=cache, cache_bytes="1GiB"))
        server.requests = []
        again = flat(read(server.url("data/"), SOURCES[name].format(), cache=cache, cache_bytes="1GiB"))
    finally:
        remote_access.use_cache(None, None)
    assert_same_batches(again, first)
    assert server.requests == []
    assert_same_batches(again, flat(read(folder, SOURCES[name].format())))


def test_an_object_whose_server_names_no_version_is_read_anew_at_each_start(server, tmp_path, capsys):
    server.has_tags = False
    url, cache = f"{server.address}/bucket/a.tar", tmp_path / "nvme"
    try:
        for sizes in ((10, 300), (300, 10)):
            samples = {f"{place}.bin": bytes([size % 256]) * size for place, size in enumerate(sizes)}
            server.content["a.tar"] = tar_of(samples)
            got = flat(read(url, None, cache=cache, cache_bytes="1GiB", shuffle=False))
            assert got[0][0][: sizes[0]].tobytes() == samples["0.bin"]
            assert got[0][1][: sizes[1]].tobytes() == samples["1.bin"]
        assert cache_program([str(cache), "--prefetch", url]) == 1
        assert "names no version" in capsys.readouterr().err
    finally:
        remote_access.use_cache(None, None)


def test_a_file_whose_path_has_a_url_in_it_is_a_file(tmp_path):
    folder = tmp_path / "s3:" / "bucket"
    folder.mkdir(parents=True)
    SOURCES["tar"].write(folder)
    odd = [f"{tmp_path}/s3://bucket/{name}.tar" for name in range(2)]
    assert_same_batches(flat(read(odd, None)), flat(read(folder, None)))
