"""on_error="skip": bad samples are left out, counted and named; the order stays the same."""

import contextlib
import gc
import os
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import grouped
from test_fields import Members
from test_litdata import write_plain as write_litdata
from test_mds import write_mds
from test_megatron import write_pair
from test_tar import member, shard
from test_tfrecord import record
from torch.utils.data import DataLoader

from gdsdata import EngineOptions, GDSDataset
from gdsdata.errors import CorruptData, IoError, StallError
from gdsdata.formats import LitData, Mds, Megatron, Npy, Records, Tar, TFRecord
from gdsdata.io import engine


@pytest.fixture(autouse=True)
def warned_anew(monkeypatch):
    monkeypatch.setattr(engine, "_warned", set())


def read(source, batch_size=4, format=None, **arguments):
    arguments = {"device": "cpu", "seed": 2, "on_error": "skip", **arguments}
    return GDSDataset(source, batch_size, format, **grouped(arguments))


# -------------------------------------------------------------------------------------- files: a damaged one of four


def npy_files(folder: Path) -> Path:
    for i in range(4):
        np.save(folder / f"{i}.npy", np.arange(10 * i, 10 * i + 10))
    (folder / "0.npy").write_bytes(b"\x93NUMPZ" + bytes(200))
    return folder / "0.npy"


def tar_files(folder: Path) -> Path:
    for i in range(4):
        shard(folder / f"{i}.tar", [member(f"{10 * i + j}.txt", str(10 * i + j).encode()) for j in range(10)])
    content = (folder / "2.tar").read_bytes()
    (folder / "2.tar").write_bytes(content[: len(content) // 3])
    (folder / "1.tar.idx").write_bytes(bytes(16))  # Energon's, which no format here reads
    return folder / "2.tar"


def tfrecord_files(folder: Path) -> Path:
    for i in range(4):
        (folder / f"{i}.tfrecord").write_bytes(b"".join(record(b"%d" % (10 * i + j)) for j in range(10)))
    content = bytearray((folder / "3.tfrecord").read_bytes())
    content[:8] = b"\xff" * 8  # a false length
    (folder / "3.tfrecord").write_bytes(content)
    return folder / "3.tfrecord"


def mds_files(folder: Path) -> Path:
    write_mds(folder, {"x": "str"}, [None], [[[b"%d" % (10 * i + j)] for j in range(10)] for i in range(4)])
    bad = sorted(folder.glob("*.mds"))[1]
    bad.write_bytes(bad.read_bytes()[:-3])
    return bad


# How each kind is written and read, and where the samples' numbers are in a batch.
KINDS = {
    "npy": (npy_files, {}, lambda batch: (batch[:, 0]).tolist()),
    "tar": (tar_files, {"decode": {"txt": "cls"}}, lambda batch: batch["txt"].tolist()),
    "tfrecord": (tfrecord_files, {"decode": {"data": "cls"}}, lambda batch: batch["data"].tolist()),
    "mds": (mds_files, {"decode": {"x": "cls"}}, lambda batch: batch["x"].tolist()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:gdsdata")
def test_a_damaged_file_is_left_out_and_named(tmp_path, kind):
    write, arguments, numbers = KINDS[kind]
    bad = write(tmp_path)
    with pytest.raises(ValueError, match=bad.name):
        read(tmp_path, on_error="raise", **arguments)
    data = read(tmp_path, 3, **arguments)
    expected = sorted(set(range(40)) - {10 * int(bad.stem[-1]) + j for j in range(10)})
    if kind == "npy":
        expected = expected[::10]
    assert sorted(number for batch in data for number in numbers(batch)) == expected
    skipped = data.stats()["skipped"]
    ((path, offset, reason),) = skipped["named"]
    assert (skipped["files"], skipped["samples"], path) == (1, 0, str(bad)) and bad.name in reason
    assert 0 <= offset


@pytest.mark.filterwarnings("ignore:gdsdata")
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_and_resume_agree_on_what_is_left(tmp_path, kind):
    write, arguments, numbers = KINDS[kind]
    write(tmp_path)
    ranks = [read(tmp_path, 1, rank=rank, world_size=2, **arguments) for rank in range(2)]
    batches = [list(map(numbers, one)) for one in ranks]
    assert len(batches[0]) == len(batches[1]) == len(ranks[0])
    assert not {n for some in batches[0] for n in some} & {n for some in batches[1] for n in some}
    first = read(tmp_path, 1, rank=0, world_size=2, **arguments)
    iterator = iter(first)
    next(iterator)
    again = read(tmp_path, 1, rank=0, world_size=2, **arguments)
    again.load_state_dict(first.state_dict())
    if len(batches[0]) == 1:  # the epoch has one batch
        assert again.state_dict()["epoch"] == 1
    else:
        assert list(map(numbers, again)) == batches[0][1:]


@pytest.mark.filterwarnings("ignore:gdsdata")
@pytest.mark.parametrize("kind", KINDS)
def test_skipped_samples_keep_no_reference_to_the_consumer(tmp_path, kind):
    """A kept traceback would hold the caller's frame, with the dropped iterator and its threads."""
    write, arguments, _ = KINDS[kind]
    write(tmp_path)

    def break_off():
        data, local = read(tmp_path, 1, **arguments), torch.zeros(1)
        next(iter(data))
        assert data.stats()["skipped"]["files"]
        return data, weakref.ref(local)

    gc.collect()
    gc.disable()
    try:
        data, local = break_off()
        assert local() is None and data._iteration.running is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:gdsdata")
def test_a_pair_of_files_is_left_out_and_counted_as_one(tmp_path):
    for name in "abc":
        write_pair(tmp_path, name, [30, 30])
    (tmp_path / "b.idx").write_bytes((tmp_path / "b.idx").read_bytes()[:-5])
    data = read(tmp_path, 1, Megatron(seq_len=10))
    assert data.samples == 2 * len(range(10, 60, 10))
    skipped = data.stats()["skipped"]
    assert skipped["files"] == 1 and skipped["named"][0][0] == str(tmp_path / "b.idx")


@pytest.mark.filterwarnings("ignore:gdsdata")
def test_shards_of_litdata_are_left_out(tmp_path):
    path = Path(write_litdata(tmp_path))
    bad = sorted(tmp_path.glob("*.bin"))[0]
    whole = read(path, format=LitData(), on_error="raise").samples
    bad.write_bytes(bad.read_bytes()[:-1])
    data = read(path, format=LitData())
    assert data.samples == whole // 2 == len(LitData(without=(str(bad),)).index([str(path)]))
    assert data.stats()["skipped"]["named"][0][0] == str(bad)


def test_left_out_files_are_warned_of_once(tmp_path):
    npy_files(tmp_path)
    with pytest.warns(RuntimeWarning, match=r"1 of 4 files are left out .*0\.npy") as caught:
        data = read(tmp_path)
        for _ in range(3):
            list(data)
    assert len(caught) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_damaged_files_is_an_error(tmp_path, kind):
    KINDS[kind][0](tmp_path)
    for path in tmp_path.iterdir():
        if path.name != "index.json":
            path.write_bytes(b"\x01" * 40)
    format = {"npy": Npy(), "tar": Tar(index_cache=None), "tfrecord": TFRecord(), "mds": Mds()}[kind]
    with pytest.raises(CorruptData, match="all of the 4 files are damaged") as raised:
        read(tmp_path, format=format)
    assert Path(raised.value.path).parent == tmp_path


def test_a_missing_file_and_files_that_are_unlike_are_still_errors(tmp_path):
    np.save(tmp_path / "0.npy", np.arange(3))
    np.save(tmp_path / "1.npy", np.arange(4))
    with pytest.raises(ValueError, match="samples of unlike files"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError):
        read([tmp_path / "0.npy", tmp_path / "2.npy"])
    with pytest.raises(ValueError, match="on_error='ignore'"):
        read(tmp_path / "0.npy", on_error="ignore")


def test_the_list_of_names_is_bounded_and_the_count_is_not(tmp_path):
    for i in range(130):
        np.save(tmp_path / f"{i:03}.npy", np.arange(3))
        if i >= 10:
            (tmp_path / f"{i:03}.npy").write_bytes(b"damaged")
    with pytest.warns(RuntimeWarning, match="120 of 130 files"):
        skipped = read(tmp_path).stats()["skipped"]
    assert skipped["files"] == 120 and len(skipped["named"]) == 100


# ------------------------------------------------------------------------------------- samples that no decoder takes


def numbered(folder: Path, bad=()) -> tuple[Path, Members]:
    contents = [b"x" if i in bad else b"%d" % i for i in range(40)]
    (folder / "members").write_bytes(b"".join(contents))
    return folder / "members", Members("x", contents)


def decoded(source, format, **arguments):
    data = read(source, format=format, decode={"x": "cls"}, **arguments)
    return data, [batch["x"].tolist() for batch in data]


def without(batches, bad):
    return [[number for number in batch if number not in bad] for batch in batches]


def test_a_sample_that_cannot_be_decoded_is_left_out_of_its_batch(tmp_path):
    bad = {0, 7, 8, 39}
    _, whole = decoded(*numbered(tmp_path))
    path, format = numbered(tmp_path, bad)
    with pytest.warns(RuntimeWarning, match=r"a sample is left out .*members: field 'x' of 1 bytes") as caught:
        data, found = decoded(path, format)
    assert found == without(whole, bad) and len(found) == len(data) == 10
    skipped = data.stats()["skipped"]
    offsets = sorted(offset for _, offset, _ in skipped["named"])
    assert skipped["samples"] == 4 and len(caught) == 1
    assert offsets == [int(np.cumsum([0, *format.lengths[:, 0]])[i]) for i in sorted(bad)]
    list(data)
    assert data.stats()["skipped"]["samples"] == 8 and len(data.stats()["skipped"]["named"]) == 4


@pytest.mark.filterwarnings("ignore:gdsdata")
def test_ranks_have_equally_many_batches_if_samples_are_skipped_and_can_resume(tmp_path):
    path, format = numbered(tmp_path, {3, 4, 5})
    shares = [decoded(path, format, rank=rank, world_size=2)[1] for rank in range(2)]
    assert len(shares[0]) == len(shares[1]) == 5 and sum(map(len, [*shares[0], *shares[1]])) == 37
    _, whole = decoded(path, format)
    first = read(path, format=format, decode={"x": "cls"})
    batches = iter(first)
    got = [next(batches)["x"].tolist() for _ in range(4)]
    again = read(path, format=format, decode={"x": "cls"})
    again.load_state_dict(first.state_dict())
    assert got + [batch["x"].tolist() for batch in again] == whole


def test_a_batch_of_which_nothing_is_left_is_an_error(tmp_path):
    path, format = numbered(tmp_path, {4, 5, 6, 7})
    with pytest.warns(RuntimeWarning), pytest.raises(CorruptData, match="none of the 4 samples of a batch is left"):
        decoded(path, format, shuffle=False)


def test_other_fields_lose_the_same_samples_and_keep_their_bytes(tmp_path):
    members = [[member(f"{i}.cls", b"?" if i % 5 == 0 else b"%d" % i), member(f"{i}.bin", bytes([i]) * i)]
               for i in range(12)]  # fmt: skip
    shard(tmp_path / "a.tar", [one for pair in members for one in pair])
    with pytest.warns(RuntimeWarning):
        (batch,) = read(tmp_path / "a.tar", 12, shuffle=False, decode={"cls": "cls"})
    kept = [i for i in range(12) if i % 5]
    assert batch["cls"].tolist() == kept
    assert [bytes(one.numpy()) for one in batch["bin"].as_list()] == [bytes([i]) * i for i in kept]


# ---------------------------------------------------------------------------------------- samples that cannot be read

BROKEN = EngineOptions(direct="always", faults="seed=1,fail=1", workers=1)


def write_numbers(folder, files, each=20):
    """Write files of records, whose numbers go on from file to file."""
    for i in range(files):
        (folder / f"{i}.bin").write_bytes(b"".join(record(b"%04d" % (each * i + j)) for j in range(each)))


def cut_since(folder: Path, open_as) -> tuple[GDSDataset, Path]:
    """Make a data set whose second file is truncated after it was indexed."""
    write_numbers(folder, 2)
    data = open_as(folder)
    os.truncate(folder / "1.bin", 300)
    return data, folder / "1.bin"


RECORDS = Records("u1", (20,))


@pytest.mark.filterwarnings("ignore:gdsdata")
def test_windows_of_a_file_that_was_cut_since_are_left_out(tmp_path):
    for name in "ab":
        write_pair(tmp_path, name, [101], first=1000 * (name == "b"))
    whole = [batch[:, 0].tolist() for batch in read(tmp_path, format=Megatron(seq_len=5))]
    data = read(tmp_path, format=Megatron(seq_len=5))
    os.truncate(tmp_path / "b.bin", 10)
    got = [batch[:, 0].tolist() for batch in data]
    assert got == without(whole, range(1000, 1101)) and data.stats()["skipped"]["samples"] == 20


READERS = {
    "fields": (lambda folder, **more: read(folder, format=TFRecord(), **more),
               lambda batch: [int(bytes(one.numpy())) for one in batch["data"].as_list()]),
    "one size": (lambda folder, **more: read(folder, format=RECORDS, **more),
                 lambda batch: [int(bytes(row[12:16].numpy())) for row in batch]),
}  # fmt: skip


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.filterwarnings("ignore:gdsdata")
def test_samples_of_a_file_that_was_cut_since_are_left_out_and_the_order_stays(tmp_path, kind):
    reader, numbers = READERS[kind]
    cut_since(tmp_path, reader)
    (tmp_path / "1.bin").write_bytes(b"".join(record(b"%04d" % (20 + j)) for j in range(20)))
    whole = list(map(numbers, reader(tmp_path, seed=4)))
    data, path = cut_since(tmp_path, lambda folder: reader(folder, seed=4))
    got = list(map(numbers, data))
    assert got == without(whole, set(range(20, 40))) and len(got) == 10 and all(got)
    skipped = data.stats()["skipped"]
    assert skipped["samples"] == 20 and {named for named, _, _ in skipped["named"]} == {str(path)}
    assert data.stats()["batches"] == 10
    assert list(map(numbers, data)) != got and data.stats()["skipped"]["samples"] == 20  # it is indexed anew


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.filterwarnings("ignore:gdsdata")
def test_a_sample_that_can_be_read_the_second_time_is_not_left_out(tmp_path, kind):
    reader, numbers = READERS[kind]
    write_numbers(tmp_path, 4)
    whole = list(map(numbers, reader(tmp_path, shuffle=False)))
    options = EngineOptions(direct="always", workers=1, faults="fail_at=1")
    data = reader(tmp_path, shuffle=False, options=options)
    assert list(map(numbers, data)) == whole and data.stats()["skipped"]["samples"] == 0
    assert data.stats()["engine"]["errors"] >= 1


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.filterwarnings("ignore:gdsdata")
def test_errors_of_the_storage_leave_out_samples_and_count_them(tmp_path, kind):
    reader, numbers = READERS[kind]
    write_numbers(tmp_path, 4)
    whole = list(map(numbers, reader(tmp_path, batch_size=20)))
    options = EngineOptions(direct="always", workers=1, faults="seed=3,fail=0.3", coalesce_gap_bytes=0)
    data = reader(tmp_path, batch_size=20, options=options)
    got = list(map(numbers, data))
    left_out = [[number for number in batch if number not in some] for batch, some in zip(whole, got, strict=True)]
    assert all([n for n in batch if n in some] == some for batch, some in zip(whole, got, strict=True))
    assert sum(map(len, left_out)) == data.stats()["skipped"]["samples"] > 0
    assert any("Input/output error" in reason for _, _, reason in data.stats()["skipped"]["named"])


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.filterwarnings("ignore:gdsdata")
def test_a_file_changed_in_place_is_left_out_of_one_epoch_and_then_indexed_anew(tmp_path, kind):
    reader, numbers = READERS[kind]
    write_numbers(tmp_path, 4)
    data = reader(tmp_path, batch_size=80)
    [before] = map(numbers, data)
    with open(tmp_path / "2.bin", "r+b") as file:
        file.write(record(b"9999"))
    [[during], [after]] = [list(map(numbers, data)) for _ in range(2)]
    assert sorted(during) == [number for number in sorted(before) if not 40 <= number < 60]
    assert sorted(after) == sorted([*(number for number in before if number != 40), 9999])
    assert data.stats()["skipped"]["samples"] == 20


@pytest.mark.parametrize("on_error", ["skip", "raise"])
@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_all_workers_index_a_changed_file_anew_when_one_of_them_has_met_it(tmp_path, is_persistent, on_error):
    for i in range(4):
        np.save(tmp_path / f"{i}.npy", np.full(10, i))
    data = read(tmp_path, batch_size=2, on_error=on_error, on_break="restart")
    loader = DataLoader(data, batch_size=None, num_workers=2, persistent_workers=is_persistent)
    assert sum(map(len, loader)) == 4
    with open(tmp_path / "2.npy", "r+b") as file:
        np.save(file, np.full(10, 9))
    with contextlib.suppress(CorruptData):
        assert sum(map(len, loader)) == 3 and on_error == "skip"
    for epoch in range(2, 4):
        data.set_epoch(epoch)
        assert sorted(int(one) for batch in loader for one in batch[:, 0]) == [0, 1, 3, 9]


@pytest.mark.parametrize("on_error", ["skip", "raise"])
@pytest.mark.parametrize("kind", READERS)
@pytest.mark.filterwarnings("ignore:gdsdata")
def test_a_rank_that_has_met_a_file_with_other_samples_is_not_given_an_index_of_its_own(tmp_path, kind, on_error):
    reader, numbers = READERS[kind]
    write_numbers(tmp_path, 4, each=5)
    arguments = {"batch_size": 5, "shuffle": False, "world_size": 2, "on_error": on_error, "on_break": "restart"}
    ranks = [reader(tmp_path, rank=rank, **arguments) for rank in range(2)]
    epoch = [[0, 1, 2, 3, 4, 10, 11, 12, 13, 14], [5, 6, 7, 8, 9, 15, 16, 17, 18, 19]]
    assert [sum(map(numbers, data), []) for data in ranks] == epoch
    before = (tmp_path / "1.bin").read_bytes()
    with open(tmp_path / "1.bin", "r+b") as file:  # rank 1 alone reads it
        file.write(b"".join(record(b"%04d" % (100 + j)) for j in range(10)))
    with pytest.raises(CorruptData, match="1.bin"):
        list(ranks[1])
    for _ in range(2):
        with pytest.raises(CorruptData, match="Rank 1 of 2 .* make the data set again on all ranks"):
            iter(ranks[1])
    with open(tmp_path / "1.bin", "r+b") as file:
        file.write(before)
        file.truncate()
    assert [sum(map(numbers, data), []) for data in ranks] == epoch


@pytest.mark.parametrize("kind", READERS)
def test_where_nothing_can_be_read_the_error_says_so(tmp_path, kind):
    (tmp_path / "0.bin").write_bytes(b"".join(record(b"%04d" % j) for j in range(20)))
    with pytest.warns(RuntimeWarning), pytest.raises(CorruptData, match="none of the 4 samples .*Input/output error"):
        list(READERS[kind][0](tmp_path, options=BROKEN))


@pytest.mark.parametrize("kind", READERS)
def test_a_stall_is_never_skipped(tmp_path, kind):
    (tmp_path / "0.bin").write_bytes(b"".join(record(b"%04d" % j) for j in range(20)))
    options = EngineOptions(direct="always", faults="late=1,late_ms=1500", stall_timeout_s=0.2)
    data = READERS[kind][0](tmp_path, options=options)
    with pytest.raises(StallError):
        list(data)
    assert data.stats()["skipped"] == {"files": 0, "samples": 0, "named": []}


def test_without_skip_nothing_is_left_out(tmp_path):
    (tmp_path / "0.bin").write_bytes(b"".join(record(b"%04d" % j) for j in range(20)))
    for reader, _ in READERS.values():
        data = reader(tmp_path, options=BROKEN, on_error="raise")
        with pytest.raises(IoError):
            list(data)
        assert "skipped" not in data.stats()
