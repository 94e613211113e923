"""Indexes that are kept for the next start: used while they are true, and made once per machine."""

import contextlib
import gc
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import warnings
from multiprocessing.context import set_spawning_popen
from pathlib import Path

import numpy as np
import pytest
import test_megatron
from helpers import write_records
from sources import SOURCES
from torch.utils.data import DataLoader

import gdsdata
from gdsdata.data import indexing
from gdsdata.data.identity import identity_of
from gdsdata.data.split import Split
from gdsdata.errors import CorruptData
from gdsdata.formats import Megatron, Npy, Records, Tar, index_checks, stored_index

LONG_AGO = 1_000_000_000


@pytest.fixture(autouse=True)
def worth_keeping(monkeypatch, tmp_path):
    """Any index is, however little time it took. The user's cache is empty."""
    monkeypatch.setattr(indexing, "WORTH_S", -1.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture
def data(tmp_path):
    """Nine npy files that nobody has changed for years."""
    folder = tmp_path / "data"
    folder.mkdir()
    for i in range(9):
        np.save(folder / f"{i}.npy", np.full(5, i))
    return settled(folder)


def settled(folder: Path) -> Path:
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (LONG_AGO, LONG_AGO))
    return folder


def dataset(source, cache, format=None, **named) -> gdsdata.GDSDataset:
    reading = gdsdata.Reading(index_cache=cache)
    return gdsdata.GDSDataset(source, 4, format, device="cpu", shuffle=False, reading=reading, **named)


def values(source, cache, **named) -> list[int]:
    return [int(row[0]) for batch in dataset(source, cache, **named) for row in batch]


def kept_in(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.gdsdata-index"))


def indexed_by(monkeypatch) -> list[int]:
    """How many files each index from now on is made of."""
    counts: list[int] = []
    index = Npy.index
    monkeypatch.setattr(Npy, "index", lambda self, paths: (counts.append(len(paths)), index(self, paths))[1])
    return counts


# --------------------------------------------------------------------------------------------------------- stored


@pytest.mark.parametrize("name", SOURCES)
def test_an_index_that_was_stored_says_what_it_said(tmp_path, name):
    folder = tmp_path / "data"
    folder.mkdir()
    SOURCES[name].write(folder)
    format = SOURCES[name].format()
    with warnings.catch_warnings(action="ignore") if sys.version_info >= (3, 11) else warnings.catch_warnings():
        index = format.index(sorted(map(str, folder.iterdir())))
    facts = {"some": ["a", "ü", ""], "none": [], "numbers": [[1, 2.5], [3, None]]}
    with open(tmp_path / "stored", "wb") as file:
        stored_index.write(file, stored_index.Stored(index, facts))
    found = stored_index.read(str(tmp_path / "stored"))

    assert found.facts == facts
    assert identity_of(found.index, format, Split()) == identity_of(index, format, Split())
    assert type(found.index) is type(index)
    assert found.index.paths == index.paths
    assert (found.index.mtime_ns == index.mtime_ns).all()
    samples = np.arange(len(index))[::-1]
    for ours, theirs in zip(found.index.plan(samples), index.plan(samples), strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("name", SOURCES)
def test_a_second_start_reads_the_same_batches_with_a_kept_index(tmp_path, name):
    folder, cache = tmp_path / "data", tmp_path / "cache"
    folder.mkdir()
    SOURCES[name].write(folder)
    settled(folder)

    def batches():
        found = dataset(folder, cache, SOURCES[name].format())
        return [repr(batch) for batch in found], found.state_dict()

    first = batches()
    settled(tmp_path)  # what was unpacked, too
    second = batches()
    assert first == second == batches()
    assert len(kept_in(cache)) == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_file_is_never_taken_for_an_index(tmp_path, data, seed):
    cache = tmp_path / "cache"
    expected = values(data, cache)
    (kept,) = kept_in(cache)
    whole, chosen = kept.read_bytes(), np.random.default_rng(seed)
    for _ in range(100):
        damaged = bytearray(whole)
        if chosen.random() < 0.3:
            del damaged[int(chosen.integers(len(whole))) :]
        else:
            damaged[chosen.integers(len(whole))] ^= 1 << chosen.integers(8)
        kept.write_bytes(damaged)
        try:
            found = stored_index.read(str(kept))
        except stored_index.Damaged:
            continue
        assert found.index.paths == [str(data / f"{i}.npy") for i in range(9)]  # the damage lies between the blocks
        assert values(data, cache) == expected


# ----------------------------------------------------------------------------------------------------- while it is true


def test_a_second_start_opens_no_file_to_index_it(tmp_path, data, monkeypatch):
    counts = indexed_by(monkeypatch)
    for source in (data, str(data / "*.npy"), [data / "1.npy", data / "0.npy"]):
        assert values(source, tmp_path / "cache") == values(source, tmp_path / "cache")
    assert counts == [9, 9, 2]


CHANGES = {
    "a file more": lambda data: np.save(data / "10.npy", np.full(5, 10)),
    "a file less": lambda data: (data / "3.npy").unlink(),
    "another name": lambda data: (data / "3.npy").rename(data / "30.npy"),
    "a file in another's place": lambda data: (data / "3.npy").replace(data / "4.npy"),
    "other contents": lambda data: np.save(data / "3.npy", np.full(5, 30)),
    "another shape": lambda data: [np.save(data / f"{i}.npy", np.full(6, i)) for i in range(9)],
    "another folder of this name": lambda data: (
        shutil.copytree(data, data.with_name("copy")),
        (data.with_name("copy") / "8.npy").unlink(),
        shutil.rmtree(data),
        settled(data.with_name("copy")).rename(data),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("pattern", ["", "*.npy"])
def test_a_source_that_has_changed_is_indexed_anew(tmp_path, data, change, pattern):
    source, cache = str(data / pattern), tmp_path / "cache"
    values(source, cache)
    CHANGES[change](data)
    assert values(source, cache) == values(source, None)


def test_a_file_beside_the_samples_that_changes_is_noticed(tmp_path):
    folder, cache = tmp_path / "data", tmp_path / "cache"
    folder.mkdir()
    SOURCES["mds"].write(folder)
    settled(folder)
    assert len(dataset(folder, cache)) > 0
    (folder / "index.json").write_text("{}")
    os.utime(folder, (LONG_AGO, LONG_AGO))
    with pytest.raises((ValueError, CorruptData)):
        dataset(folder, cache)


def files_opened_by(work) -> set[str]:
    opened: list[str] = []

    def note(event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[0], str):
            opened.append(arguments[0])

    sys.addaudithook(note)  # it cannot be removed, and is cheap
    work()
    return set(map(os.path.abspath, opened))


@pytest.mark.parametrize("name", SOURCES)
def test_every_file_that_an_index_is_made_from_is_compared(tmp_path, name):
    SOURCES[name].write(tmp_path)
    format = SOURCES[name].format()
    files = sorted(str(path) for path in tmp_path.iterdir() if path.is_file())
    for paths in (files, *([path] for path in files)):
        index = None

        def make(paths=paths):
            nonlocal index
            with contextlib.suppress(ValueError, CorruptData), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                index = format.index(paths)

        opened = files_opened_by(make)
        if index is None:
            continue  # these files alone are no data set
        beside = format.side_files(paths) if isinstance(format, index_checks.HasSideFiles) else []
        compared = {*paths, *index.paths, *beside}
        # Other projects' indexes of a tar are hints, which its headers confirm.
        hints = {path for path in opened if name == "tar" and path.endswith(".idx")}
        assert {path for path in opened if path.startswith(f"{tmp_path}/") and "/home/" not in path} <= compared | hints


def test_an_index_file_beside_its_data_that_changes_is_noticed(tmp_path):
    folder, cache = tmp_path / "data", tmp_path / "cache"
    folder.mkdir()
    SOURCES["megatron sequences"].write(folder)
    settled(folder)
    before = [repr(batch) for batch in dataset(folder / "0.bin", cache, Megatron())]
    assert [repr(batch) for batch in dataset(folder / "0.bin", cache, Megatron())] == before
    test_megatron.write_pair(folder, "other", [30, 7, 2, 41, 20])
    (folder / "other.idx").replace(folder / "0.idx")
    settled(folder)
    os.utime(folder / "0.idx", (LONG_AGO, LONG_AGO + 1))
    after = [repr(batch) for batch in dataset(folder / "0.bin", cache, Megatron())]
    assert after == [repr(batch) for batch in dataset(folder / "0.bin", None, Megatron())] != before


def test_a_change_that_no_check_saw_is_an_error_once(tmp_path, data, monkeypatch):
    cache = tmp_path / "cache"
    values(data, cache)
    monkeypatch.setattr(index_checks, "LEAST_CHECKED", 0)
    monkeypatch.setattr(index_checks, "CHECK_S", -1.0)
    np.save(data / "3.npy", np.full(6, 30))
    found = dataset(data, cache)
    with pytest.raises(CorruptData, match=r"3\.npy' was replaced or changed since it was indexed"):
        list(found)
    assert not kept_in(cache)
    with pytest.raises(ValueError, match="samples of unlike files"):
        list(found)
    np.save(data / "3.npy", np.full(5, 30))
    assert [int(row[0]) for batch in found for row in batch] == [0, 1, 2, 30, 4, 5, 6, 7, 8]


def test_every_file_is_checked_if_there_is_time(tmp_path, data, monkeypatch):
    monkeypatch.setattr(index_checks, "LEAST_CHECKED", 0)
    monkeypatch.setattr(index_checks, "_CHECKED_AT_ONCE", 2)
    counts = indexed_by(monkeypatch)
    for i in range(9):
        values(data, tmp_path / "cache")
        os.utime(data / f"{i}.npy", (LONG_AGO, LONG_AGO + 1))
    assert counts == [9] * 9


@pytest.mark.parametrize("count", [0, 1, 2, 12, 97, 1024])
def test_files_are_checked_in_an_order_of_their_own_each_time(count):
    random.seed(7)
    before = random.getstate()
    orders = [index_checks._in_any_order(count).tolist() for _ in range(20)]
    assert random.getstate() == before, "the program's own stream is left alone"
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert count < 12 or len({tuple(order) for order in orders}) > 1


def test_other_arguments_have_another_index(tmp_path, data):
    cache = tmp_path / "cache"
    for format, samples in ((None, 9), (Npy("file"), 9), (Npy("row"), 45), (Records("u1", (8,)), 9 * 21)):
        assert len(dataset(data, cache, format)._samples) == samples
        assert len(dataset(data, cache, format)._samples) == samples
    assert len(kept_in(cache)) == 4


def test_another_version_has_another_index(tmp_path, data, monkeypatch):
    counts = indexed_by(monkeypatch)
    values(data, tmp_path / "cache")
    monkeypatch.setattr(indexing, "__version__", "9.9")
    values(data, tmp_path / "cache")
    assert counts == [9, 9]


# ------------------------------------------------------------------------------------------------------------- kept


def test_an_index_that_took_little_time_is_not_kept(tmp_path, data, monkeypatch):
    monkeypatch.setattr(indexing, "WORTH_S", 30.0)
    values(data, tmp_path / "cache")
    assert not kept_in(tmp_path / "cache")


def test_an_index_of_files_that_just_changed_is_not_kept(tmp_path, data):
    (data / "3.npy").touch()
    values(data, tmp_path / "cache")
    assert not kept_in(tmp_path / "cache")


@pytest.mark.filterwarnings("ignore:gdsdata. 1 of 9 files are left out")
def test_an_index_that_leaves_out_damaged_files_is_not_kept(tmp_path, data):
    (data / "3.npy").write_bytes(b"\x93NUMPY\x01\x00")
    settled(data)
    for _ in range(2):
        assert dataset(data, tmp_path / "cache", on_error="skip").stats()["skipped"]["files"] == 1
    assert not kept_in(tmp_path / "cache")


def test_without_a_cache_nothing_is_written(tmp_path, data):
    values(data, None)
    assert not (tmp_path / "home").exists()
    values(data, "user")
    assert len(kept_in(tmp_path / "home" / "gdsdata" / "index")) == 1


def test_a_format_of_ones_own_is_never_kept(tmp_path, data):
    class Own:
        def index(self, paths):
            return Npy().index(paths)

    for _ in range(2):
        assert len(dataset(data, tmp_path / "cache", Own())._samples) == 9
    assert not kept_in(tmp_path / "cache")


def test_a_place_that_cannot_be_written_is_a_warning(tmp_path, data):
    (tmp_path / "cache").write_text("a file")
    with pytest.warns(RuntimeWarning, match="the index cannot be kept in .*cache"):
        assert values(data, tmp_path / "cache") == list(range(9))


def test_refuses_a_place_of_another_type(data):
    with pytest.raises(TypeError, match='index_cache=5 must be "user"'):
        dataset(data, 5)


def test_indexes_that_nobody_used_for_a_month_are_deleted(tmp_path, data):
    cache = tmp_path / "cache"
    values(data, cache)
    values(data / "1.npy", cache)
    of_users = [cache / name for name in ("old.tmp", "a.gdsdata-index", "0.npy", "folder")]
    unfinished = cache / f"{'0' * 32}.gdsdata-index.01234567.tmp"
    for path in (*kept_in(cache), *of_users, unfinished, cache / f"{'0' * 32}.gdsdata-index.lock"):
        path.mkdir() if path.name == "folder" else path.touch()
        os.utime(path, (LONG_AGO, LONG_AGO))
    values(data, cache)  # uses one
    values(data / "2.npy", cache)  # keeps one
    assert all(path.exists() for path in of_users)
    assert len(list(cache.iterdir())) == 2 + len(of_users)


def test_its_arrays_take_no_memory_of_the_process(tmp_path, data):
    cache = tmp_path / "cache"
    write_records(tmp_path / "data.bin", 64, 8)
    settled(tmp_path)
    for source, format in ((data, Npy()), (tmp_path / "data.bin", Records("u1", (8,)))):
        values(source, cache, format=format)
        index = dataset(source, cache, format)._samples.index
        for array in (index.size_bytes, index.mtime_ns, index.base_bytes, index.stride_bytes):
            assert not array.flags.writeable
            assert array.base is not None


def test_the_process_that_made_an_index_maps_it_like_the_others(tmp_path):
    folder, cache = tmp_path / "data", tmp_path / "cache"
    folder.mkdir()
    SOURCES["tar"].write(folder)
    settled(folder)
    made, found = (dataset(folder, cache)._samples.index.extents.rows for _ in range(2))
    assert not made.flags.writeable and np.array_equal(made, found)
    with open("/proc/self/maps") as maps:
        assert maps.read().count(str(kept_in(cache)[0])) == 2


def pickled_for_a_spawned_process(index) -> bytes:
    set_spawning_popen(object())
    try:
        return pickle.dumps(index)
    finally:
        set_spawning_popen(None)


def test_a_spawned_process_maps_the_index_and_gets_no_copy(tmp_path):
    folder, cache = tmp_path / "data", tmp_path / "cache"
    folder.mkdir()
    SOURCES["tar"].write(folder)
    settled(folder)
    index = dataset(folder, cache)._samples.index
    (kept,) = kept_in(cache)
    sent, elsewhere = pickled_for_a_spawned_process(index), pickle.dumps(index)
    assert str(kept).encode() in sent and str(kept).encode() not in elsewhere
    for found in (pickle.loads(sent), pickle.loads(elsewhere)):
        assert identity_of(found, None, Split()) == identity_of(index, None, Split()) and found.paths == index.paths
    assert not pickle.loads(sent).extents.rows.flags.writeable

    kept.replace(cache / "away")
    copy = pickle.loads(pickled_for_a_spawned_process(index))
    assert identity_of(copy, None, Split()) == identity_of(index, None, Split())
    shutil.copy(cache / "away", kept)
    with pytest.raises(stored_index.Damaged, match="was made again while a process began"):
        pickle.loads(sent)


def test_workers_of_every_kind_read_with_a_kept_index(tmp_path, data):
    expected = values(data, tmp_path / "cache")
    for method, workers in (("fork", 2), ("spawn", 1)):  # a spawned one imports torch, for 2 s of CPU time
        found = dataset(data, tmp_path / "cache")
        loader = DataLoader(found, batch_size=None, num_workers=workers, multiprocessing_context=method)
        assert sorted(int(row[0]) for batch in loader for row in batch) == expected


@pytest.mark.parametrize("form", [b"gdsdata index v1", b"gdsdata index v2"])
def test_an_index_of_an_older_form_is_made_again(tmp_path, data, monkeypatch, form):
    cache, counts = tmp_path / "cache", indexed_by(monkeypatch)
    expected = values(data, cache)
    (kept,) = kept_in(cache)
    kept.write_bytes(form + kept.read_bytes()[16:])
    assert values(data, cache) == values(data, cache) == expected
    assert counts == [9, 9]


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (b'"part": "Index"', b'"part": "Olden"'),  # a class that is no more
        (b'"first_sample"', b'"first_olden_"'),  # an attribute
        (b'"folders"', b'"foldens"'),  # a fact
        (b'"dtype": "<i8"', b'"dtype": "<i5"'),
        (b'"array": 2', b'"array": 9'),
    ],
)
def test_a_whole_index_that_says_other_things_is_made_again(tmp_path, data, monkeypatch, was, now):
    """As another build of the same version may write it."""
    cache, counts = tmp_path / "cache", indexed_by(monkeypatch)
    expected = values(data, cache)
    (kept,) = kept_in(cache)
    content = kept.read_bytes()
    magic, _, length = stored_index._HEAD.unpack(content[:32])
    described = content[32 : 32 + length].replace(was, now)
    assert described != content[32 : 32 + length]
    checksum = stored_index._checksum(np.frombuffer(described, np.uint8))
    kept.write_bytes(stored_index._HEAD.pack(magic, checksum, length) + described + content[32 + length :])
    assert values(data, cache) == values(data, cache) == expected
    assert counts == [9, 9]


def test_an_index_on_a_network_file_system_is_read_and_not_mapped(tmp_path, data, monkeypatch):
    cache = tmp_path / "cache"
    expected = values(data, cache)
    for is_local in (True, False):
        monkeypatch.setattr(stored_index, "_LOCAL", ("btrfs", "ext4", "overlay", "tmpfs", "xfs") if is_local else ())
        found = dataset(data, cache)
        with open("/proc/self/maps") as maps:
            assert (str(kept_in(cache)[0]) in maps.read()) == is_local
        assert [int(row[0]) for batch in found for row in batch] == expected
        assert found._samples.index.paths == [str(data / f"{i}.npy") for i in range(9)]
        del found
        gc.collect()


# -------------------------------------------------------------------------------------------------- several processes

RANK = """
    import os, sys, time
    import gdsdata
    from gdsdata.data import indexing
    from gdsdata.formats import Npy

    data, cache, log, pause, worth = sys.argv[1:]
    indexing.WORTH_S = float(worth)
    index = Npy.index

    def slow_index(self, paths):
        note("begins")
        while open(log).read().count("starts") < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.01)
        time.sleep(float(pause))
        note("ends")
        return index(self, paths)

    def note(what):
        with open(log, "a") as file:
            file.write(f"{os.getpid()} {what}\\n")

    Npy.index = slow_index
    note("starts")
    reading = gdsdata.Reading(index_cache=cache)
    print(len(gdsdata.GDSDataset(data, 1, device="cpu", reading=reading)._samples), flush=True)
"""


def start_ranks(count, data, tmp_path, pause, worth=-1.0) -> list[subprocess.Popen]:
    arguments = [str(data), str(tmp_path / "cache"), str(tmp_path / "log"), str(pause), str(worth)]
    return [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(RANK), *arguments],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def ended(ranks: list[subprocess.Popen]) -> list[str]:
    return [rank.communicate(timeout=60)[0].strip() for rank in ranks]


def events(tmp_path) -> list[tuple[int, str]]:
    """Return what the processes noted, in the order of time."""
    lines = map(str.split, (tmp_path / "log").read_text().splitlines())
    return [(int(process), what) for process, what in lines]


def builders(tmp_path) -> list[int]:
    return [process for process, what in events(tmp_path) if what == "begins"]


@pytest.mark.usefixtures("quick_programs")
def test_one_of_several_ranks_makes_the_index_for_all(tmp_path, data):
    assert ended(start_ranks(4, data, tmp_path, 0.3)) == ["9"] * 4
    assert len(builders(tmp_path)) == 1


@pytest.mark.usefixtures("quick_programs")
def test_ranks_do_not_take_turns_to_make_an_index_that_is_not_kept(tmp_path, data):
    assert ended(start_ranks(3, data, tmp_path, 0.7, worth=60.0)) == ["9"] * 3
    assert [what for _, what in events(tmp_path)][-4:] == ["begins", "begins", "ends", "ends"]
    assert len(builders(tmp_path)) == 3
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.usefixtures("quick_programs")
def test_another_rank_goes_on_if_the_one_that_makes_the_index_is_killed(tmp_path, data):
    ranks = start_ranks(3, data, tmp_path, 2.0)
    while not (tmp_path / "log").exists() or not builders(tmp_path):
        assert all(rank.poll() is None for rank in ranks)
    killed = builders(tmp_path)[0]
    os.kill(killed, signal.SIGKILL)
    assert sorted(ended(ranks)) == ["", "9", "9"]
    assert builders(tmp_path)[0] == killed
    assert len(builders(tmp_path)) >= 2


@pytest.mark.parametrize(
    "kept", [lambda url: {"cache": url}, lambda url: {"cache": None, "format": Tar(index_cache=url)}]
)
def test_an_index_is_kept_in_no_store(tmp_path, kept, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with tarfile.open("a.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("a.txt"))
    with pytest.raises(ValueError, match=r"cache='s3://bucket/index' is a URL: give a local folder"):
        dataset("a.tar", **kept("s3://bucket/index"))
    assert os.listdir() == ["a.tar"]
