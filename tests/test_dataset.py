"""GDSDataset's batches are numpy's, in the requested order, on every path of the bytes."""

import dataclasses
import gc
import glob
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed
from helpers import (
    BACKENDS,
    MIB,
    arrays,
    assert_same_batches,
    drop_cache,
    eventually,
    grouped,
    in_new_process,
    lack_of_uring,
    peak_bytes,
    random_bytes,
    require_direct,
    reset_peak,
    resident_pages,
    served_by,
    warm_cache,
    write_records,
)

from gdsdata import EngineOptions, GDSDataset, Reading
from gdsdata.data import samples
from gdsdata.data.batches.source import RingSource
from gdsdata.data.order.permutation import Order
from gdsdata.formats import Npy, Records, Tokens
from gdsdata.io import budget

# ------------------------------------------------------------------------------------- formats x options x cache

# All limits are small, so that requests are cut and coalesced, and wait for the queue and for
# bounce memory.
TIGHT = dict(
    workers=3,
    queue_depth=2,
    segment_bytes=4096,
    request_bytes=65536,
    bounce_bytes=65536 + 131072,
    coalesce_gap_bytes=100,
    staging_bytes=160 * 1024,
)
OPTIONS = {
    f"{backend}-{direct}{'-tight' if tight else ''}": EngineOptions(
        backend=backend, direct=direct, **(TIGHT if tight else {"workers": 2})
    )
    for backend in ("posix", "uring")
    for direct in ("auto", "always", "never")
    for tight in (False, True)
}


@dataclasses.dataclass
class Case:
    """Files of one format, and every sample as numpy reads it, in the order of the files."""

    format: object
    samples: np.ndarray
    files: list[Path]


CASES: dict[str, Callable[[Path], Case]] = {}


def case(make: Callable[[Path], Case]) -> Callable[[Path], Case]:
    CASES[make.__name__] = make
    return make


def files_of_records(folder: Path, dtype: str, shape: tuple[int, ...], counts: list[int], header_bytes=0) -> Case:
    record_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    files, records = [], []
    for i, count in enumerate(counts):
        data = random_bytes(count * record_bytes, seed=i)
        files.append(folder / f"{i}.bin")
        files[-1].write_bytes(b"h" * header_bytes + data)
        records.append(np.frombuffer(data, dtype).reshape(count, *shape))
    return Case(Records(dtype, shape, header_bytes), np.concatenate(records), files)


@case
def records_of_one_byte(folder):
    return files_of_records(folder, "u1", (), [1, 0, 4999])


@case
def records_of_an_odd_size_behind_an_odd_header(folder):
    return files_of_records(folder, "u1", (37,), [40, 0, 1, 200], header_bytes=13)


@case
def records_of_float32(folder):
    return files_of_records(folder, "<f4", (3, 5), [100, 50])


@case
def records_of_big_endian_int16(folder):
    return files_of_records(folder, ">i2", (5,), [64, 65], header_bytes=3)


@case
def records_out_of_a_mapped_file(folder):  # a file of 1 MiB or more, and records of at most 64 KiB
    return files_of_records(folder, "u1", (4097,), [400, 3])


@case
def records_of_big_endian_float64_out_of_a_mapped_file(folder):
    return files_of_records(folder, ">f8", (33,), [5000], header_bytes=5)


@case
def records_larger_than_a_request(folder):
    return files_of_records(folder, "u1", (2 * MIB + 4095,), [3, 1])


@case
def records_of_big_endian_complex_larger_than_a_request(folder):
    return files_of_records(folder, ">c16", (90_001,), [2, 1], header_bytes=7)


def files_of_tokens(folder: Path, dtype: str, counts: list[int], header: Callable[[int], bytes] = lambda n: b"", **how):
    files, windows = [], []
    seq_len, stride = how["seq_len"], how.get("stride") or how["seq_len"]
    for i, count in enumerate(counts):
        tokens = np.random.default_rng(i).integers(0, np.iinfo(dtype).max, count, np.dtype(dtype).newbyteorder("="))
        tokens = tokens.astype(dtype)
        files.append(folder / f"{i}.bin")
        files[-1].write_bytes(header(count) + tokens.tobytes())
        starts = range(0, count - seq_len, stride)
        windows += [tokens[start : start + seq_len + 1] for start in starts]
    samples = np.stack(windows).astype(np.dtype(dtype).newbyteorder("=") if how.get("raw") else np.int64)
    return Case(Tokens(None if header(0) else dtype, **how), samples, files)


def llm_c_header(magic: int) -> Callable[[int], bytes]:
    return lambda tokens: np.array([magic, 1, tokens, *[0] * 253], "<i4").tobytes()


@case
def tokens_of_uint16(folder):
    return files_of_tokens(folder, "<u2", [1000, 10, 33, 5000], seq_len=32)


@case
def tokens_of_uint16_raw(folder):
    return files_of_tokens(folder, "<u2", [1000, 10, 33, 5000], seq_len=32, raw=True)


@case
def tokens_of_uint16_out_of_a_mapped_file(folder):
    return files_of_tokens(folder, "<u2", [600_000, 1025], seq_len=1024)


@case
def tokens_of_uint8_in_overlapping_windows(folder):
    return files_of_tokens(folder, "u1", [500, 77], seq_len=16, stride=5)


@case
def tokens_of_int16_far_apart(folder):
    return files_of_tokens(folder, "<i2", [50_000], seq_len=7, stride=1001)


@case
def tokens_of_uint32_behind_llm_c_header(folder):
    return files_of_tokens(folder, "<u4", [700, 300], llm_c_header(20240801), seq_len=63)


@case
def tokens_of_uint16_behind_llm_c_header(folder):
    return files_of_tokens(folder, "<u2", [700, 300], llm_c_header(20240520), seq_len=63)


@case
def tokens_of_big_endian_uint16(folder):
    return files_of_tokens(folder, ">u2", [900], seq_len=20)


@case
def tokens_of_int64(folder):
    return files_of_tokens(folder, "<i8", [900], seq_len=20)


def npy_files(folder: Path, samples: list[np.ndarray], mode: str = "file") -> Case:
    files = []
    for i, sample in enumerate(samples):
        files.append(folder / f"{i:03}.npy")
        np.save(files[-1], sample)
    return Case(Npy(mode), np.stack(samples) if mode == "file" else np.concatenate(samples), files)


def random_arrays(count: int, dtype: str, shape: tuple[int, ...], order: str = "C") -> list[np.ndarray]:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    flat = [np.frombuffer(random_bytes(size, seed=i), dtype) for i in range(count)]
    return [np.asarray(array.reshape(shape), order=order) for array in flat]


@case
def npy_files_in_c_order(folder):
    return npy_files(folder, random_arrays(21, "<f4", (3, 5, 7)))


@case
def npy_files_in_fortran_order(folder):
    return npy_files(folder, random_arrays(9, "<i4", (3, 5, 7), order="F"))


@case
def npy_files_in_fortran_order_and_big_endian(folder):
    return npy_files(folder, random_arrays(9, ">f8", (6, 11), order="F"))


@case
def npy_files_of_big_endian_float32(folder):
    return npy_files(folder, random_arrays(9, ">f4", (13,)))


@case
def npy_files_of_bool(folder):
    return npy_files(folder, [np.frombuffer(random_bytes(15, seed=i), np.uint8).reshape(3, 5) > 99 for i in range(8)])


@case
def npy_files_of_complex64(folder):
    return npy_files(folder, random_arrays(9, "<c8", (4, 3)))


@case
def npy_files_of_big_endian_complex64(folder):
    return npy_files(folder, random_arrays(9, ">c8", (4, 3)))


@case
def npy_files_of_one_element(folder):
    return npy_files(folder, [np.array(i * 1.5) for i in range(17)])


@case
def npy_files_of_no_element(folder):
    return npy_files(folder, [np.zeros((3, 0, 2), np.int16) for _ in range(5)])


@case
def npy_files_of_two_mebibytes(folder):
    return npy_files(folder, random_arrays(4, "<f2", (1024, 1025)))


@case
def npy_rows(folder):
    return npy_files(folder, [array for n in (50, 1, 33) for array in random_arrays(1, "<i4", (n, 4, 3))], mode="row")


@case
def npy_rows_of_one_element(folder):
    return npy_files(folder, random_arrays(1, "<i8", (999,)), mode="row")


@case
def npy_rows_out_of_a_mapped_file(folder):
    return npy_files(folder, random_arrays(2, ">u2", (300, 1024)), mode="row")


@pytest.fixture(scope="module", params=list(CASES))
def data(request, tmp_path_factory) -> Case:
    return CASES[request.param](tmp_path_factory.mktemp("data"))


# Devices and routes of batches. Routes that differ only behind the engine have few of its options.
DELIVERIES = {
    "cpu": dict(device="cpu"),
    "cuda": dict(device="cuda"),
    "cuda zero_copy": dict(device="cuda", zero_copy=True),
    "cuda residency pinned": dict(device="cuda", residency="pinned"),
}
FEW_OPTIONS = ["uring-auto", "uring-always-tight"]
DELIVERED = [
    pytest.param(delivery, options, id=f"{delivery}-{options}", marks=[pytest.mark.gpu] if "cuda" in delivery else [])
    for delivery in DELIVERIES
    for options in (OPTIONS if delivery in ("cpu", "cuda") else FEW_OPTIONS)
]


@pytest.mark.parametrize("cache", ["warm", "cold"])
@pytest.mark.parametrize(("delivery", "options"), DELIVERED)
def test_batches_are_what_numpy_reads(data, delivery, options, cache):
    if options.startswith("uring") and lack_of_uring():
        pytest.skip(lack_of_uring())
    arguments, options = DELIVERIES[delivery], OPTIONS[options]
    if options.direct == "always":
        require_direct(data.files[0])
    batch_size = min(16, len(data.samples) - 1)
    arguments = grouped({"options": options, **arguments})
    make = lambda: GDSDataset(data.files, batch_size, data.format, seed=3, **arguments)  # noqa: E731
    if (
        arguments["reading"].residency
        and not data.format.index([str(path) for path in data.files]).sample.dtype.isnative
    ):
        with pytest.raises(ValueError, match="of the other byte order"):
            make()
        return
    dataset = make()
    (warm_cache if cache == "warm" else drop_cache)(*data.files)
    if "residency" in arguments:
        assert eventually(lambda: dataset.stats()["residency"]["ready"], 30), dataset.stats()["residency"]["error"]

    # Order's own tests show that this is a permutation.
    samples, sizes = Order(len(data.samples), batch_size, True, 3, False, 0, 1).plan(0, 0, len(dataset))
    native = data.samples.astype(data.samples.dtype.newbyteorder("="))
    assert_same_batches(dataset, np.split(native[samples], np.cumsum(sizes)[:-1]))

    served = dataset.stats()["bytes"]
    if "residency" in arguments:
        assert {route for route, count in served.items() if count} <= {"pinned_page_cache"}
    if options.direct == "always":
        assert served["page_cache"] == served["buffered"] == 0
    if options.direct == "never":
        assert served["direct"] == 0


@pytest.fixture
def records(tmp_path) -> np.ndarray:
    """Write 103 records of 64 bytes: 100 in tmp_path/"0.bin", 3 in "1.bin"."""
    return np.concatenate([write_records(tmp_path / "0.bin", 100, 64, 0), write_records(tmp_path / "1.bin", 3, 64, 1)])


def read(tmp_path, batch_size=8, **arguments) -> GDSDataset:
    return GDSDataset(f"{tmp_path}/*.bin", batch_size, Records("u1", (64,)), device="cpu", **grouped(arguments))


def rows(batches) -> list[bytes]:
    return [row.tobytes() for batch in arrays(batches) for row in batch]


# -------------------------------------------------------------------------------------------------------- routes


def test_warm_bytes_come_out_of_the_page_cache_and_cold_ones_by_o_direct(tmp_path):
    paths = [tmp_path / f"{i}.npy" for i in range(4)]
    for i, path in enumerate(paths):
        np.save(path, np.full(MIB, i, np.uint8))
    require_direct(paths[0])
    cold = GDSDataset(paths, 2, device="cpu")
    if not drop_cache(*paths):
        pytest.skip("this file system keeps files in memory")
    list(cold)
    assert served_by(cold) == {"direct": 4 * MIB}
    warm_cache(*paths)
    warm = GDSDataset(paths, 2, device="cpu")
    list(warm)
    assert served_by(warm) == {"page_cache": 4 * MIB}


def test_partly_cached_files_are_put_together_from_both_routes(tmp_path):
    path = tmp_path / "0.npy"
    array = np.frombuffer(random_bytes(8 * MIB), np.uint8)
    np.save(path, array)
    require_direct(path)
    dataset = GDSDataset(path, 1, device="cpu")
    if not drop_cache(path):
        pytest.skip("this file system keeps files in memory")
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
    for offset in (0, 3 * MIB + 5, 7 * MIB):
        os.pread(descriptor, MIB // 2, offset)
    os.close(descriptor)
    assert_same_batches(dataset, [array[None]])
    served = dataset.stats()["bytes"]
    assert served["page_cache"] >= MIB // 2 and served["direct"] >= MIB and sum(served.values()) == 8 * MIB


@pytest.mark.parametrize("format", [Records("u1", (4096,)), Tokens("u2"), Npy()], ids=["records", "tokens", "npy"])
def test_making_a_data_set_reads_heads_and_leaves_the_data_where_it_is(tmp_path, format):
    path = tmp_path / "0.npy"
    if isinstance(format, Npy):
        np.save(path, np.zeros(8 * MIB, np.uint8))
    else:
        path.write_bytes(bytes(8 * MIB))
    if not drop_cache(path):
        pytest.skip("this file system keeps files in memory")
    GDSDataset(path, 1, format, device="cpu")
    time.sleep(0.1)  # read-ahead goes on after the call
    assert resident_pages(path) * mmap.PAGESIZE <= MIB


def test_statistics_count_each_byte_and_batch_handed_out_once(tmp_path, records):
    dataset = read(tmp_path, options=EngineOptions(workers=3))  # its own engine, for its counts
    for _ in range(2):
        for _ in dataset:
            pass
    batches = iter(dataset)
    next(batches)
    statistics = dataset.stats()
    assert statistics["batches"] == 13 + 13 + 1
    assert sum(statistics["bytes"].values()) == (103 + 103 + 8) * 64
    assert 0 <= statistics["mean_ready"] <= dataset.prefetch
    assert statistics["stalls"] <= 27 and statistics["engine"]["errors"] == 0


# --------------------------------------------------------------------------------------------------------- order


def test_without_shuffle_samples_come_in_the_order_of_the_files(tmp_path, records):
    assert rows(read(tmp_path, shuffle=False)) == rows([torch.from_numpy(records)])


def test_the_same_seed_gives_the_same_order_and_another_seed_another(tmp_path, records):
    first = rows(read(tmp_path, seed=1))
    assert first == rows(read(tmp_path, seed=1))
    assert first != rows(read(tmp_path, seed=2))


def test_each_epoch_is_a_new_order_of_all_samples(tmp_path, records):
    dataset = read(tmp_path)
    epochs = [rows(dataset) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert [sorted(epoch) for epoch in epochs] == [sorted(rows([torch.from_numpy(records)]))] * 3


def test_set_epoch_chooses_the_order_of_the_next_iterator(tmp_path, records):
    dataset = read(tmp_path)
    epochs = [rows(dataset) for _ in range(3)]
    for epoch in (2, 0, 1):
        dataset.set_epoch(epoch)
        assert rows(dataset) == epochs[epoch]


def test_an_epoch_broken_off_starts_again_from_its_first_batch(tmp_path, records):
    dataset = read(tmp_path)
    for _ in dataset:
        break
    assert rows(dataset) == rows(read(tmp_path))


# ------------------------------------------------------------------------------------------------ batches' shares


def test_len_is_the_number_of_batches_and_the_last_one_is_smaller(tmp_path, records):
    dataset = read(tmp_path, batch_size=8)
    sizes = [len(batch) for batch in dataset]
    assert sizes == [8] * 12 + [7] and len(dataset) == 13


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch_size", [10**9, 2**40, 2**62])
def test_a_batch_far_larger_than_all_samples_takes_memory_for_these_alone(tmp_path, records, batch_size, shuffle):
    from_file = [*read(tmp_path, batch_size=len(records), shuffle=shuffle)]
    dataset = read(tmp_path, batch_size=batch_size, shuffle=shuffle)
    assert dataset.stats()["ring_bytes"] < 2**20
    assert_same_batches(arrays(dataset), arrays(from_file))
    assert len(dataset) == 1 and dataset.state_dict()["samples_per_step"] == batch_size
    with pytest.raises(ValueError, match=r"have at most 2\*\*62 samples together"):
        read(tmp_path, batch_size=sys.maxsize)


@pytest.mark.parametrize(("prefetch", "is_enough"), [(4, False), (1, True)])
def test_batches_beyond_the_available_memory_are_refused_before_it_is_taken(tmp_path, monkeypatch, prefetch, is_enough):
    with open(tmp_path / "sparse.bin", "wb") as file:
        file.truncate(2**25)
    monkeypatch.setattr(budget, "available_bytes", lambda: 1_300_000_000)
    source, format = tmp_path / "sparse.bin", Records(shape=(2,), dtype=np.uint8)
    dataset = GDSDataset(source, 2**22, format, device="cpu", reading=Reading(prefetch=prefetch))
    if is_enough:
        assert next(iter(dataset)).shape == (2**22, 2)
        return
    said = (
        r"batch_size=4194304: 4 batches in flight take at least 1577058304 bytes of host memory, and 1300000000 bytes "
        r"are available: use a smaller batch_size \(94 bytes a sample\), or a smaller prefetch"
    )
    with pytest.raises(MemoryError, match=said):
        iter(dataset)


def test_later_epochs_use_the_memory_of_the_first_one_and_are_not_refused(tmp_path, records, monkeypatch):
    left = iter([2**20, 0, 0])
    monkeypatch.setattr(budget, "available_bytes", lambda: next(left))
    monkeypatch.setattr(samples, "_UNCHECKED_BYTES", 0)
    dataset = read(tmp_path, batch_size=8)
    assert [len(arrays(dataset)) for _ in range(2)] == [len(dataset)] * 2
    with pytest.raises(MemoryError, match="and 0 bytes are available"):
        iter(read(tmp_path, batch_size=8))


def test_a_batch_whose_ids_find_no_memory_is_an_error_that_names_the_remedy(tmp_path, records, monkeypatch):
    def full(*_, **__):
        raise MemoryError("Unable to allocate 2.00 TiB")

    monkeypatch.setattr(np, "arange", full)
    with pytest.raises(MemoryError, match="batch_size=8: Unable .* use a smaller batch_size"):
        next(iter(read(tmp_path, batch_size=8)))


def test_drop_last_leaves_the_smaller_batch_out(tmp_path, records):
    dataset = read(tmp_path, batch_size=8, drop_last=True)
    assert [len(batch) for batch in dataset] == [8] * 12 and len(dataset) == 12


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_get_disjoint_shares_of_equal_length(tmp_path, records, world_size, drop_last):
    shares = [rows(read(tmp_path, rank=rank, world_size=world_size, drop_last=drop_last)) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    together = [row for share in shares for row in share]
    assert len(set(together)) == len(together)
    left_out = 103 % (8 * world_size) if drop_last else (103 % (8 * world_size)) % world_size
    assert len(together) == 103 - left_out and set(together) <= set(rows([torch.from_numpy(records)]))


def test_rank_and_world_size_come_from_the_environment(tmp_path, records, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert rows(read(tmp_path)) == rows(read(tmp_path, rank=1, world_size=2))
    assert rows(read(tmp_path, rank=0, world_size=1)) != rows(read(tmp_path)), "arguments come first"


# ----------------------------------------------------------------------------------------------------- arguments


def test_source_is_a_path_a_directory_a_glob_or_a_list_of_them(tmp_path, records):
    expected = rows(read(tmp_path, shuffle=False))
    folder, both = tmp_path, [tmp_path / "0.bin", str(tmp_path / "1.bin")]
    for source in (folder, str(folder), f"{folder}/?.bin", f"{folder}/**/*.bin", both, [folder, both[0]], both[::-1]):
        dataset = GDSDataset(source, 8, Records("u1", (64,)), shuffle=False, device="cpu")
        assert rows(dataset) == expected, source
    only = GDSDataset(both[1], 8, Records("u1", (64,)), shuffle=False, device="cpu")
    assert rows(only) == expected[100:]


def test_a_relative_path_survives_a_change_of_directory(tmp_path, records, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset = GDSDataset("*.bin", 8, Records("u1", (64,)), device="cpu")
    monkeypatch.chdir("/")
    assert len(rows(dataset)) == 103


def test_files_with_brackets_in_their_names_are_found(tmp_path):
    path = tmp_path / "a[1].npy"
    np.save(path, np.arange(3))
    assert not glob.glob(str(path))
    assert_same_batches(GDSDataset(path, 1, device="cpu"), [np.arange(3)[None]])


def test_the_format_is_recognized_by_magic(tmp_path):
    np.save(tmp_path / "volume", np.arange(6.0).reshape(2, 3))
    assert next(iter(GDSDataset(tmp_path / "volume.npy", 1, device="cpu"))).shape == (1, 2, 3)
    tokens = np.arange(2000, dtype="<u2")
    (tmp_path / "tokens").write_bytes(llm_c_header(20240520)(2000) + tokens.tobytes())
    (batch,) = GDSDataset(tmp_path / "tokens", 4, device="cpu")
    assert_same_batches([batch], [np.arange(1025)[None]])


def test_transform_makes_what_is_handed_out(tmp_path, records):
    plain = list(read(tmp_path))
    pairs = list(read(tmp_path, transform=lambda batch: {"x": batch[:, :-1], "last": batch[:, -1].float()}))
    assert len(pairs) == len(plain)
    assert_same_batches([pair["x"] for pair in pairs], [batch[:, :-1] for batch in plain])
    assert_same_batches([pair["last"] for pair in pairs], [batch[:, -1].float() for batch in plain])


def test_an_error_in_transform_reaches_the_consumer_and_the_next_epoch_works(tmp_path, records):
    calls = []

    def fails_once(batch):
        calls.append(batch)
        if len(calls) == 3:
            raise ZeroDivisionError("mine")
        return batch

    dataset = read(tmp_path, transform=fails_once)
    with pytest.raises(ZeroDivisionError, match="mine"):
        list(dataset)
    assert rows(dataset) == rows(read(tmp_path))


def test_device_none_is_cuda_only_where_there_is_one(tmp_path, records, monkeypatch):
    monkeypatch.setattr(RingSource, "open", lambda self: None)  # it would look for the GPU, and so would these:
    monkeypatch.setattr("gdsdata.io.engine.resolved", torch.device)
    monkeypatch.setattr("gdsdata.data.samples.begun_engine", lambda path, options, device: None)
    for available, device in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert GDSDataset(tmp_path / "0.bin", 8, Records("u1", (64,))).device.type == device


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(batch_size=0), "batch_size=0: a batch has at least one sample"),
        (dict(prefetch=0), "prefetch=0: at least one batch has to be in flight"),
        (dict(prefetch=2**31), "prefetch=2147483648: at most 65536 batches are read ahead: use fewer"),
        (dict(rank=0), "rank=0 and world_size=None: give both or neither"),
        (dict(world_size=2), "rank=None and world_size=2: give both or neither"),
        (dict(rank=2, world_size=2), "rank=2 is not in range(world_size=2)"),
        (dict(rank=0, world_size=0), "world_size=0: there is at least one rank"),
        (dict(batch_size=200, drop_last=True), "103 samples make no batch for each of world_size=1 ranks"),
        (dict(rank=0, world_size=104), 'use fewer ranks, more data, or Sharding(uneven="pad")'),
    ],
)
def test_a_bad_argument_is_refused_in_words(tmp_path, records, arguments, words):
    with pytest.raises(ValueError) as error:
        read(tmp_path, **arguments)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(backend="magic"), "no backend is called 'magic'; there are auto, uring, posix"),
        (dict(direct="sometimes"), "direct must be 'auto', 'always' or 'never', not 'sometimes'"),
        (dict(queue_depth=5000), "queue_depth must be from 1 to 4096"),
        (dict(request_bytes=65537), "request_bytes must be a multiple of 4096"),
        (dict(bounce_bytes=MIB), "bounce_bytes must be at least request_bytes + 131072"),
        (dict(segment_bytes=1), "segment_bytes must be at least 4096"),
        (dict(workers=257), "workers must be at most 256"),
        (dict(workers=-1), "workers"),
        (dict(faults="typo=1"), "unknown fault 'typo'"),
        (dict(faults="late=often"), "late=often"),
        (dict(faults="late=-"), "the fault 'late=-' needs a number"),
        (dict(faults="seed=99999999999999999999"), "the fault 'seed=99999999999999999999' needs a number"),
    ],
    ids=str,
)
def test_a_bad_option_is_refused_in_words(tmp_path, records, options, words):
    with pytest.raises(ValueError) as error:
        next(iter(read(tmp_path, options=EngineOptions(**options))))
    assert words in str(error.value)


def test_a_source_without_files_is_refused_in_words(tmp_path):
    for source in (tmp_path / "absent.npy", f"{tmp_path}/*.npy", tmp_path):
        with pytest.raises(FileNotFoundError, match="is no file, no directory with files and no glob of any"):
            GDSDataset(source)
    with pytest.raises(ValueError, match="source is an empty list: name at least one file, directory or glob"):
        GDSDataset([])


def test_files_that_do_not_show_their_format_are_refused_in_words(tmp_path, records):
    with pytest.raises(ValueError, match=r"does not show its format .*pass format=Tokens\("):
        GDSDataset(tmp_path)


# -------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("direct", ["auto", "always", "never"])
def test_keeping_every_batch_of_an_epoch_is_safe(tmp_path, backend, direct):
    # A batch belongs to its consumer alone, who may also write to it.
    expected = write_records(tmp_path / "0.bin", 300, 5000)
    if direct == "always":
        require_direct(tmp_path / "0.bin")
    options = EngineOptions(backend=backend, direct=direct)
    dataset = GDSDataset(
        tmp_path, 7, Records("u1", (5000,)), shuffle=False, device="cpu", reading=Reading(prefetch=3, options=options)
    )
    kept = []
    for batch in dataset:
        kept.append((batch, batch.clone()))
        batch += 1
    assert all(torch.equal(batch, copy + 1) for batch, copy in kept)
    assert_same_batches([torch.cat([copy for _, copy in kept])], [expected])


def test_a_batch_outlives_dataset_and_engine(tmp_path, records):
    dataset = read(tmp_path, shuffle=False, options=EngineOptions(workers=2, queue_depth=3))  # its own engine
    batches = iter(dataset)
    first, second = next(batches), next(batches)
    del batches, dataset
    gc.collect()
    again = arrays(read(tmp_path, shuffle=False))  # reuses freed memory
    assert_same_batches([first, second], [records[:8], records[8:16]])
    assert_same_batches([first, second], again[:2])


def peak_growth_of_an_epoch(folder: Path, options: EngineOptions) -> tuple[int, int]:
    """Return by how much an epoch raised peak memory, and by how much it may."""
    warm_up = GDSDataset(
        sorted(folder.iterdir())[:1], 1, device="cpu", reading=Reading(options=EngineOptions(workers=1))
    )
    arrays(warm_up)
    dataset = GDSDataset(folder, 4, device="cpu", reading=Reading(options=options))
    statistics = dataset.stats()
    reset_peak()
    before, seen = peak_bytes(), 0
    for batch in dataset:
        seen += batch.nbytes
        del batch
    assert seen == 256 * MIB
    return peak_bytes() - before, statistics["ring_bytes"] + statistics["engine"]["bounce_bytes"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("direct", ["auto", "never"])
def test_an_epoch_whose_batches_are_dropped_takes_bounded_memory(tmp_path, backend, direct):
    for i in range(128):
        header = np.lib.format.header_data_from_array_1_0(np.empty(2 * MIB, np.uint8))
        with open(tmp_path / f"{i}.npy", "wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + 2 * MIB)  # holes read like data, and take no disk
    options = EngineOptions(backend=backend, direct=direct, workers=2, bounce_bytes=8 * MIB)
    grown, allowed = in_new_process(peak_growth_of_an_epoch, tmp_path, options)
    slack = 8 * MIB  # threads' stacks, the plan, the allocator
    stated = (4 + 2) * 8 * MIB + 2 * 8 * MIB  # prefetch + 2 batches, two workers' bounce memory; rounded up to pages
    assert 0 <= allowed - stated < MIB
    assert grown < allowed + slack


@pytest.mark.parametrize(
    ("workers", "request_mib", "stated_mib"), [(1, 1, 64), (2, 1, 64), (4, 1, 64), (8, 1, 128), (4, 32, 4 * 32)]
)
def test_bounce_memory_is_shared_out_among_workers_and_holds_a_request(
    tmp_path, records, workers, request_mib, stated_mib
):
    options = EngineOptions(workers=workers, request_bytes=request_mib * MIB)
    stated = read(tmp_path, options=options).stats()["engine"]["bounce_bytes"]
    assert 0 <= stated - stated_mib * MIB < MIB
