"""`Sharding(share_reads=True)`: peers read a part of each batch, and have the same batches."""

import ast
import contextlib
import gc
import io
import itertools
import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import islice
from unittest import mock

import numpy as np
import PIL.Image
import pytest
import torch
import torch.distributed as dist
from helpers import write_records
from sources import SOURCES
from test_dcp import on_ranks
from test_stalls import write_tar
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from gdsdata import EngineOptions, Fields, GDSDataset, Lanes, Mix, Reading, Sharding
from gdsdata.collective import peers as peers_module
from gdsdata.data.batches import shared, shared_parts
from gdsdata.decoders import Image
from gdsdata.formats import Npy, Records, Tar

RECORD_BYTES, LARGE = 64, 16384
FEW_SOURCES = ("tokens", "npy files", "tar", "parquet")  # more ranks take longer
ORDERS = {"uniform": True, "lanes": "lanes", "few lanes": Lanes(7, 4, 2), "none": False}


def mesh_of(*shape, device="cpu"):
    return init_device_mesh(device, shape, mesh_dim_names=("dp", "tp", "cp")[: len(shape)])


def dataset_of(mesh, share_reads, source, batch_size=7, format=None, **arguments):
    """Make a data set of records, if ``format`` names no other."""
    sharding = Sharding(device_mesh=mesh, dp_dim="dp", share_reads=share_reads)
    device = "cpu" if mesh.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device())
    arguments = {"device": device, "on_break": "restart", **arguments}
    return GDSDataset(source, batch_size, format or Records("u1", (RECORD_BYTES,)), sharding=sharding, **arguments)


def plain(batch):
    """Return a batch as classes, dtypes, shapes and bytes, which can be compared."""
    if isinstance(batch, torch.Tensor):
        if batch.is_nested:
            return "nested", plain(batch.values()), plain(batch.offsets())
        return str(batch.dtype), tuple(batch.shape), batch.cpu().contiguous().numpy().tobytes()
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    return [type(batch).__name__, *map(plain, batch)]


def epoch_of(dataset):
    return list(map(plain, dataset))


def bytes_of(dataset):
    return sum(dataset.stats()["bytes"].values())


def error_of(call):
    """Return class, text, notes and attributes of a call's error, and how long it took."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        attributes = {name: getattr(error, name, None) for name in ("path", "offset", "length", "errno")}
        return type(error).__name__, str(error), getattr(error, "__notes__", []), attributes, time.monotonic() - began
    return None


# -------------------------------------------------------------------------------- what works, on every layout of ranks


def different_batches(folder, mesh):
    """Return the cases in which batches are not those of a data set that reads alone."""
    different = []

    def compare(case, *arguments, **named):
        alone, shared = (dataset_of(mesh, share_reads, *arguments, **named) for share_reads in (False, True))
        if epoch_of(alone) != epoch_of(shared) or len(alone) != len(shared):
            different.append(case)

    for name in SOURCES if mesh.size() == 2 else FEW_SOURCES:
        compare(name, folder / name, 7, SOURCES[name].format())
    for order, shuffle in ORDERS.items():
        for drop_last in (False, True):
            compare((order, drop_last), folder / "records", 7, shuffle=shuffle, drop_last=drop_last)
    for batch_size in (1, 3):
        compare(batch_size, folder / "records", batch_size)
    for batch_size in (1, 7):
        compare(("tables", batch_size), folder / "parquet", batch_size, SOURCES["parquet"].format(), shuffle=False)
    for ragged in ("flat", "nested", "padded", "list"):
        fields = Fields(ragged=ragged, decode={"cls": "cls"})
        compare(ragged, folder / "numbers", 5, Tar(index_cache=None), fields=fields)
    skipping = dict(fields=Fields(decode={"cls": "cls"}), on_error="skip", shuffle=False)
    compare("skip", folder / "damaged", 4, Tar(index_cache=None), **skipping)
    images = Fields(decode={"png": Image(resize=(5, 4))})
    compare("images", folder / "images", 4, Tar(index_cache=None), fields=images)
    compare("prefetch", folder / "records", 2, reading=Reading(prefetch=1), transform=lambda batch: batch.float())
    return different


def bytes_read(folder, mesh):
    """Return the bytes of an epoch that this process read alone, and together with its peers."""
    found = []
    for share_reads in (False, True):
        for shuffle in (True, False):
            dataset = dataset_of(mesh, share_reads, folder / "records", shuffle=shuffle)
            epoch_of(dataset)
            found.append(bytes_of(dataset))
    always_read = Reading(options=EngineOptions(direct="always"))  # also pieces that are in the page cache
    lanes = dataset_of(mesh, True, folder / "large", 64, shuffle=Lanes(8, 8, 256), reading=always_read)
    epoch_of(lanes)
    return [*found, sum(lanes.stats()["piece_bytes"].values())]


def resumed(folder, mesh):
    """Continue from a state of another layout for two steps, and return the batches and states."""
    steps = json.loads((folder / "state.json").read_text())
    batch_size = 12 // mesh.size(0)
    alone, shared = (dataset_of(mesh, share_reads, folder / "records", batch_size) for share_reads in (False, True))
    found = []
    for dataset in (alone, shared):
        dataset.load_state_dict(steps)
        iterator = iter(dataset)
        batches = [plain(next(iterator)) for _ in range(2)]
        found.append((batches, dataset.state_dict(), list(map(plain, iterator)), dataset.state_dict()))
    return found[0] == found[1], found[1][1]


def broken_off(folder, mesh):
    """Break off an epoch at several places, and take it again."""
    alone, shared = (dataset_of(mesh, share_reads, folder / "records", 3) for share_reads in (False, True))
    expected = epoch_of(alone)
    for batches in (1, 2, 3, 1):
        if list(map(plain, islice(shared, batches))) != expected[:batches]:
            return f"{batches} batches differ"
    next(iter(shared))
    two = iter(shared), iter(shared)  # at the same time
    if [plain(next(one)) for _ in range(2) for one in two] != [one for one in expected[:2] for _ in range(2)]:
        return "two iterators differ"
    del two
    return epoch_of(shared) == expected


def mixed(folder, mesh):
    """Take the batches of two data sets in turns."""
    found = []
    for share_reads in (False, True):
        sources = [dataset_of(mesh, share_reads, folder / name, 4) for name in ("records", "more records")]
        found.append(epoch_of(Mix(sources, weights=[2, 1])))
    return found[0] == found[1]


def everything(rank, folder, *shape):
    mesh = mesh_of(*shape)
    checks = (different_batches, bytes_read, resumed, broken_off, mixed)
    return {check.__name__: check(folder, mesh) for check in checks}


def write_tar_of_numbers(folder, damaged=()):
    """Write 41 samples with bytes of many lengths, and a number, or none in the damaged ones."""
    rng, members = np.random.default_rng(3), {}
    for i in range(41):
        members[f"{i:03}.bin"] = rng.bytes(int(rng.integers(0, 50)))
        members[f"{i:03}.cls"] = b"none" if i in damaged else str(i).encode()
    folder.mkdir()
    write_tar(folder / "0.tar", members)


def png(seed):
    file = io.BytesIO()
    PIL.Image.fromarray(np.random.default_rng(seed).integers(0, 256, (7, 9, 3), np.uint8)).save(file, "png")
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("share_reads")
    for name, source in SOURCES.items():
        (folder / name).mkdir()
        source.write(folder / name)
    for name, count in (("more records", 35), ("large", LARGE)):
        (folder / name).mkdir()
        write_records(folder / name / "0.bin", count, RECORD_BYTES, 7)
    write_tar_of_numbers(folder / "numbers")
    write_tar_of_numbers(folder / "damaged", damaged=(1, 8, 9, 10, 18, 19))  # 8 to 10: more than one peer's part
    write_tar_of_numbers(folder / "all damaged", damaged=range(41))
    (folder / "images").mkdir()
    write_tar(folder / "images" / "0.tar", {f"{i}.png": png(i) for i in range(9)})
    first = GDSDataset(folder / "records", 12, Records("u1", (RECORD_BYTES,)), device="cpu")
    next(iter(first))
    (folder / "state.json").write_text(json.dumps(first.state_dict()))
    return folder


LAYOUTS = {"two peers": (1, 2), "four peers": (1, 4), "two pairs": (2, 2)}


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request, folder):
    """Return the shape of a mesh, and what each rank found."""
    shape = LAYOUTS[request.param]
    return shape, on_ranks(shape[0] * shape[1], everything, folder, *shape)


def test_peers_get_the_batches_of_a_data_set_that_reads_alone(layout):
    assert [found["different_batches"] for found in layout[1]] == [[]] * len(layout[1])


def test_together_the_peers_read_each_byte_once(layout):
    (groups, peers), ranks = layout
    for group in range(groups):
        alone, in_order, *shared, in_lanes = np.array(
            [found["bytes_read"] for found in ranks[group * peers : (group + 1) * peers]]
        ).T
        assert (alone == in_order).all() and len(set(alone)) == 1
        assert [part.sum() for part in shared] == [alone[0]] * 2
        assert max(shared[0]) <= alone[0] / peers + 9 * RECORD_BYTES  # a batch has 7: not as many for each
        data_bytes = LARGE * RECORD_BYTES / groups
        assert 0.9 * data_bytes <= in_lanes.sum() <= 1.5 * data_bytes  # pieces of 16 KiB, of whole pages


def test_a_state_of_one_process_is_continued_by_peers(layout):
    assert all(found["resumed"][0] for found in layout[1])
    assert all(found["resumed"][1] == layout[1][0]["resumed"][1] for found in layout[1])


def test_an_epoch_that_was_broken_off_begins_again(layout):
    assert [found["broken_off"] for found in layout[1]] == [True] * len(layout[1])


def test_sources_of_a_mix_share_their_reads(layout):
    assert all(found["mixed"] for found in layout[1])


# ---------------------------------------------------------------------------------------------------------- failures


def failures(rank, folder):
    """Fail in several ways, mostly on rank 1. The peers can take an epoch after each of them."""
    mesh, found = mesh_of(1, 2), {}
    expected = epoch_of(dataset_of(mesh, False, folder / "records"))

    def on_rank_1(**options):
        return Reading(options=EngineOptions(backend="posix", direct="always", **options) if rank else None)

    def try_it(case, *arguments, **named):
        batches, took = [], time.monotonic()
        dataset = dataset_of(mesh, True, *arguments, shuffle=False, **named)
        error = error_of(lambda: batches.extend(map(plain, dataset)))
        found[case] = *error, len(batches), time.monotonic() - took
        assert epoch_of(dataset_of(mesh, True, folder / "records")) == expected, case

    numbers = dict(format=Tar(index_cache=None), fields=Fields(decode={"cls": "cls"}))
    try_it("read", folder / "records", 7, reading=on_rank_1(faults="seed=1,fail=1"))
    try_it("stall", folder / "records", 7, reading=on_rank_1(faults="late=1,late_ms=60000", stall_timeout_s=1.0))
    try_it("decoder", folder / "damaged", 4, **numbers)
    try_it("nothing left", folder / "all damaged", 4, **numbers, on_error="skip")
    try_it("other seeds", folder / "records", 7, seed=rank)
    if rank:
        np.save(folder / "other.npy", np.zeros((9, 4), np.float64))
    else:
        np.save(folder / "one.npy", np.zeros((9, 4), np.float32))
    try_it("other data", folder / ("other.npy" if rank else "one.npy"), 3, Npy("row"))
    try_it("other dtypes", folder / "numbers", 4, **{**numbers, **({"fields": Fields()} if rank else {})})
    return found


def short_of_memory(call):
    """Return a method that gathers, and has no memory from a call on."""
    calls, begin = itertools.count(1), shared.GlooGathers.begin

    def begin_or_raise(gathers, whole, part):
        if next(calls) >= call:
            raise MemoryError
        return begin(gathers, whole, part)

    return begin_or_raise


def leaves(rank, folder):
    """Have rank 1 leave epochs that rank 0 continues."""
    mesh, found = mesh_of(1, 2), {}
    dataset = dataset_of(mesh, True, folder / "records", 3)
    expected = epoch_of(dataset_of(mesh, False, folder / "records", 3))
    batches = []
    found["early"] = error_of(lambda: batches.extend(islice(dataset, 2 if rank else None)))
    found["batches"] = len(batches)

    def fail(batch):
        raise ZeroDivisionError

    found["transform"] = error_of(
        lambda: list(dataset_of(mesh, True, folder / "records", 3, transform=fail if rank else None))
    )
    with mock.patch.object(shared.GlooGathers, "begin", short_of_memory(3 if rank else 1000)):
        batches = []
        found["memory"] = error_of(lambda: batches.extend(dataset_of(mesh, True, folder / "records", 3)))
        found["batches before it"] = len(batches)
    dist.barrier()
    iterator = iter(dataset)
    next(iterator)
    if rank == 0:  # its peer comes later
        began = time.monotonic()
        iterator.close()
        found["closed after"] = time.monotonic() - began
    else:
        time.sleep(1)
    del iterator
    assert epoch_of(dataset) == expected
    with mock.patch.object(peers_module, "timeout_of_group", lambda group: timedelta(seconds=2)):
        never_begun = dataset_of(mesh, True, folder / "records", 3)
        if rank == 0:
            found["silent"] = error_of(lambda: next(iter(never_begun)))
        dist.barrier()
    with mock.patch.object(peers_module, "timeout_of_group", lambda group: timedelta(seconds=10)):
        found["then together"] = error_of(lambda: batches.append(epoch_of(never_begun))), batches[-1] == expected
    found["then again"] = [epoch_after_interrupts(rank, never_begun, expected) for _ in range(2)]
    iterator = iter(dataset)
    with mock.patch.object(peers_module, "timeout_of_group", lambda group: timedelta(seconds=4)):
        next(iterator)
        if rank == 0:
            found["silent later"] = error_of(lambda: list(iterator))
        dist.barrier()
    return found


def epoch_after_interrupts(rank, dataset, expected):
    """Interrupt rank 0 twice before the others begin, and have all read an epoch.

    Returns its error, and whether its batches are right.
    """
    if rank == 0:
        interrupt = mock.Mock(side_effect=KeyboardInterrupt)
        with (
            mock.patch.object(shared_parts, "_NOTIFY_S", 0.2),
            mock.patch.object(shared_parts.PartsAhead, "take", interrupt),
        ):
            for _ in range(2):  # the second time while the first meeting is being given up
                with contextlib.suppress(KeyboardInterrupt):
                    next(iter(dataset))
            for thread in [one for one in threading.enumerate() if one.name == "gdsdata-share"]:
                thread.join()
    dist.barrier()
    dataset.set_epoch(0)
    batches = []
    with mock.patch.object(peers_module, "timeout_of_group", lambda group: timedelta(seconds=10)):
        return error_of(lambda: batches.extend(epoch_of(dataset))), batches == expected


def forked(rank, folder):
    """Fork while the thread has the locks, and use the iterator in the children.

    Returns how the children ended, and whether the batches of this process are right.
    """
    mesh = mesh_of(1, 2)
    dataset = dataset_of(mesh, True, folder / "records", 3)
    iterator = iter(dataset)
    batches = [plain(next(iterator))]
    parts = dataset._iteration.running._parts

    def in_child(use):
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os._exit(use())
        return os.waitpid(child, 0)[1]

    def drop():
        nonlocal iterator, parts, dataset
        parts.stop()
        iterator.close()
        del iterator, parts, dataset
        gc.collect()
        return 0

    with ThreadPoolExecutor(1) as other_thread:  # the condition's lock belongs to the thread that takes it
        other_thread.submit(lambda: parts._inner_in_use.acquire() and parts._changed.acquire()).result()
        statuses = in_child(drop), in_child(lambda: error_of(lambda: next(iterator))[0] != "EngineClosed")
        other_thread.submit(lambda: (parts._changed.release(), parts._inner_in_use.release())).result()
    batches += map(plain, iterator)
    return statuses, batches == epoch_of(dataset_of(mesh, False, folder / "records", 3))


def keys_left(rank, folder):
    """Return how many keys some epochs leave in the store of the default group."""
    dataset, store = dataset_of(mesh_of(1, 2), True, folder / "records"), dist.group.WORLD.get_group_store()
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    for _ in range(3):
        epoch_of(dataset)
    after = store.num_keys()
    dist.barrier()
    return after - before


def refusals(rank, folder):
    """Return what is said of arguments that cannot be combined."""
    mesh, records, tar = mesh_of(1, 2), folder / "records", Tar(index_cache=None)

    def refusal(*arguments, **named):
        return (error_of(lambda: dataset_of(mesh, True, *arguments, **named)) or (None, None))[:2]

    def count(samples):
        return len(samples)

    in_workers = dataset_of(mesh, True, records)
    assert in_workers._samples._indexing._shared  # one of them makes the index, and the others map it
    return {
        "collate": refusal(folder / "numbers", 4, tar, fields=Fields(collate=list)),
        "txt": refusal(folder / "numbers", 4, tar, fields=Fields(decode={"cls": "txt"})),
        "function": refusal(folder / "numbers", 4, tar, fields=Fields(decode={"cls": count})),
        "images": refusal(folder / "numbers", 4, tar, fields=Fields(decode={"bin": Image()})),
        "workers": error_of(lambda: next(iter(DataLoader(in_workers, batch_size=None, num_workers=1))))[:2],
        "alone": epoch_of(dataset_of(mesh["dp"], True, folder / "numbers", 4, tar, fields=Fields(collate=list)))
        == epoch_of(dataset_of(mesh["dp"], False, folder / "numbers", 4, tar, fields=Fields(collate=list))),
    }


def misuse(rank, folder):
    return {check.__name__: check(rank, folder) for check in (forked, keys_left, failures, leaves, refusals)}


@pytest.fixture(scope="module")
def misused(folder):
    return on_ranks(2, misuse, folder)


@pytest.mark.parametrize(
    ("case", "kind", "words", "batches"),
    [
        ("read", "IoError", "Input/output error", 0),
        ("stall", "StallError", "stall_timeout_s raises the limit", 0),
        ("decoder", "CorruptData", "cannot be decoded", 0),
        ("nothing left", "NothingLeft", "none of the 4 samples of a batch is left", 0),
        ("other seeds", "ValueError", "differ: seed=0 on rank 0, 1 on rank 1", 0),
        ("other data", "ValueError", "first_file='one.npy' on rank 0, 'other.npy' on rank 1", 0),
        ("other dtypes", "ValueError", "differ: batches=", 0),
    ],
)
def test_an_error_of_one_peer_is_the_same_error_on_all(misused, case, kind, words, batches):
    first, second = (found["failures"][case] for found in misused)
    assert first[:2] == second[:2] and first[3:5] != () and first[3] == second[3]
    assert first[0] == kind and words in first[1]
    assert first[5] == second[5] == batches
    assert max(first[6], second[6]) < 10


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes before Python 3.11")
def test_a_note_says_which_rank_had_the_error(misused):
    for found in misused:
        assert "on rank 1 of ranks 0, 1, which read each batch together" in found["failures"]["read"][2]


def test_a_peer_that_leaves_is_an_error_for_those_that_go_on(misused):
    stays, left = (found["leaves"] for found in misused)
    assert left["early"] is None and left["batches"] == 2 <= stays["batches"] <= 3
    assert left["transform"][0] == "ZeroDivisionError" and left["memory"][0] == "MemoryError"
    assert left["batches before it"] == 1 <= stays["batches before it"] <= 2
    for case in ("early", "transform", "memory"):
        kind, words, _, _, took_s = stays[case]
        assert kind == "RankLost" and "rank 1 left the epoch before its end" in words and took_s < 5


def test_closing_an_iterator_does_not_wait_for_peers(misused):
    assert misused[0]["leaves"]["closed after"] < 0.5


def test_an_iterator_can_be_dropped_in_a_forked_child(misused):
    for found in misused:
        assert found["forked"] == ((0, 0), True)


def test_epochs_leave_no_keys_in_the_store(misused):
    assert [found["keys_left"] for found in misused] == [0, 0]


def test_a_silent_peer_is_an_error_within_the_timeout_of_the_process_group(misused):
    for case, words in (("silent", "not all of them had begun"), ("silent later", "is silent for too long")):
        kind, text, _, _, took_s = misused[0]["leaves"][case]
        assert kind == "RankLost" and words in text and 1 < took_s < 12


def test_an_epoch_that_one_peer_began_alone_is_read_when_all_begin_it(misused):
    assert [found["leaves"]["then together"] for found in misused] == [(None, True)] * 2


def test_an_epoch_that_one_peer_broke_off_alone_is_read_when_all_begin_it(misused):
    assert [found["leaves"]["then again"] for found in misused] == [[(None, True)] * 2] * 2


def test_batches_that_cannot_be_gathered_are_refused_with_a_remedy(misused):
    for found in misused:
        found = found["refusals"]
        assert found["alone"]
        assert "use num_workers=0" in found["workers"][1]
        for case in ("collate", "txt", "function", "images"):
            kind, words = found[case]
            assert kind == "ValueError" and "transform=, which gets" in words


def test_share_reads_needs_a_mesh(folder):
    for sharding in (Sharding(share_reads=True), Sharding(0, 1, share_reads=True)):
        with pytest.raises(ValueError, match="pass device_mesh= and dp_dim="):
            GDSDataset(folder / "records", 4, Records("u1", (RECORD_BYTES,)), device="cpu", sharding=sharding)


def kill_this(*ignored):
    os.kill(os.getpid(), signal.SIGKILL)


def die(rank, folder, is_early):
    """Have rank 1 die in the middle of an epoch, or when it would connect to gather a batch."""
    dataset = dataset_of(mesh_of(1, 2), True, folder / "records", 2)
    if rank and is_early:
        shared.GlooGathers = kill_this
    batches = iter(dataset)
    if not is_early:
        next(batches)
    if rank and not is_early:
        kill_this()
    (folder / "error").write_text(repr(error_of(lambda: list(batches))))
    os._exit(0)  # torch's own end of the group would wait for the dead rank


@pytest.mark.parametrize("is_early", [False, True])
def test_a_killed_peer_is_an_error_on_the_others_at_once(folder, is_early):
    with pytest.raises(BaseException):  # no rank answers  # noqa: B017
        on_ranks(2, die, folder, is_early)
    kind, words, *_, took_s = ast.literal_eval((folder / "error").read_text())
    assert kind == "RankLost" and "of ranks 0, 1, which read each batch together, one has ended" in words
    assert took_s < 5


# --------------------------------------------------------------------------------------------------------------- GPUs


def trained(folder, mesh):
    """Take batches between collectives and work of the program's own, and return what differs."""
    weights = torch.randn(2048, 2048, device="cuda")
    alone, shared = (dataset_of(mesh, share_reads, folder / "large", 512) for share_reads in (False, True))
    different = []
    for epoch in range(2):
        alone.set_epoch(epoch)
        shared.set_epoch(epoch)
        expected, kept = list(alone), []
        for step, batch in enumerate(shared):
            for _ in range(5):
                weights = torch.tanh(weights @ weights)  # the current stream is behind
            total = batch.sum(dtype=torch.int64)
            dist.all_reduce(total, group=mesh["tp"].get_group())
            if step % 3 == 0:
                kept.append((step, batch, total))
            del batch  # its memory may be used again at once
        different += [
            (epoch, step)
            for step, batch, total in kept
            if not torch.equal(batch, expected[step]) or total != 2 * expected[step].sum(dtype=torch.int64)
        ]
    return different


def on_gpus(rank, folder):
    """Do on a GPU each what works on the CPU, in a process group of NCCL."""
    dist.destroy_process_group()
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/ranks/nccl", 2)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    mesh = mesh_of(1, 2, device="cuda")
    checks = (different_batches, bytes_read, resumed, broken_off, mixed, trained)
    found = {check.__name__: check(folder, mesh) for check in checks}
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        found["on another stream"] = broken_off(folder, mesh)
    return found


@pytest.mark.gpu
@pytest.mark.timeout(200)
def test_on_two_gpus_peers_get_the_batches_of_a_data_set_that_reads_alone(folder):
    if torch.cuda.device_count() < 2:
        pytest.skip("there are no two GPUs")
    for found in on_ranks(2, on_gpus, folder):
        assert found["different_batches"] == found["trained"] == []
        assert found["broken_off"] is found["on another stream"] is found["mixed"] is True
        assert found["resumed"][0]
