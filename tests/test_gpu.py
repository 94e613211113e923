"""On a GPU: batches are right on any streams, memory is the user's, and errors are clear.

test_dataset.py checks the content of batches on every path of the bytes.
"""

import contextlib
import gc
import itertools
import os
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    MIB,
    assert_same_batches,
    drop_cache,
    eventually,
    exit_code_of_fork,
    grouped,
    in_new_process,
    random_bytes,
    run_script,
    write_records,
)

import gdsdata
from gdsdata import EngineOptions, GDSDataset, Reading, read_tensor, write_tensor
from gdsdata.data import indexing
from gdsdata.errors import BackendUnavailable, CorruptData, EngineClosed, IoError
from gdsdata.formats import Records, Tokens
from gdsdata.io import engine

pytestmark = pytest.mark.gpu

RECORD_BYTES = 65536
BATCHES = 48
# Cycles for which `torch.cuda._sleep` blocks a stream: some milliseconds, and part of a second.
SHORT, LONG = 5_000_000, 300_000_000

DELIVERIES = {
    "copied": {},
    "zero_copy": dict(zero_copy=True),
    "pinned": dict(residency="pinned"),
    "pinned zero_copy": dict(residency="pinned", zero_copy=True),
}


@pytest.fixture
def records(tmp_path) -> np.ndarray:
    """Write 192 records of 64 KiB in tmp_path: 48 batches of 256 KiB."""
    return write_records(tmp_path / "0.bin", 4 * BATCHES, RECORD_BYTES)


def read(folder: Path, device: str = "cuda", **arguments) -> GDSDataset:
    records = Records("u1", (RECORD_BYTES,))
    return GDSDataset(folder / "0.bin", 4, records, shuffle=False, device=device, **grouped(arguments))


def settle(dataset: GDSDataset) -> GDSDataset:
    """Return the data set when its residency, if it has one, is complete."""
    if dataset._samples.settings.residency:
        assert eventually(lambda: dataset.stats()["residency"]["ready"], 30), dataset.stats()["residency"]["error"]
    return dataset


def epoch_of(records: np.ndarray) -> list[np.ndarray]:
    return np.split(records, BATCHES)


def free_bytes() -> int:
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.fixture(params=list(DELIVERIES))
def delivery(request) -> dict:
    return DELIVERIES[request.param]


# --------------------------------------------------------------------------------------------- batches and streams


def test_keeping_every_batch_of_an_epoch_is_safe(tmp_path, records, delivery):
    dataset = settle(read(tmp_path, prefetch=3, **delivery))
    kept = list(dataset)
    assert len({batch.data_ptr() for batch in kept}) == BATCHES
    assert_same_batches(kept, epoch_of(records))


def test_a_consumer_may_write_to_its_batch(tmp_path, records, delivery):
    dataset = settle(read(tmp_path, prefetch=3, **delivery))
    kept = []
    for batch in dataset:
        kept.append((batch, batch.clone()))
        batch += 1
    assert all(torch.equal(batch, copy + 1) for batch, copy in kept)
    assert_same_batches([copy for _, copy in kept], epoch_of(records))


def test_a_slow_kernel_on_the_current_stream_finds_the_batch_as_it_came(tmp_path, records, delivery):
    got = []
    for i, batch in enumerate(settle(read(tmp_path, prefetch=2, **delivery))):
        if i % 4 == 0:
            torch.cuda._sleep(SHORT)  # the batch is dropped long before the kernel ends
        got.append(batch.clone())
        del batch
    assert_same_batches(got, epoch_of(records))


def test_a_slow_second_stream_finds_the_batch_as_it_came_when_it_is_named(tmp_path, records, delivery):
    second, got = torch.cuda.Stream(), []
    for batch in settle(read(tmp_path, prefetch=2, **delivery)):
        second.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(second):
            torch.cuda._sleep(SHORT)
            got.append(batch.clone())
        gdsdata.record_stream(batch, second)
        del batch
    torch.cuda.current_stream().wait_stream(second)
    assert_same_batches(got, epoch_of(records))


def test_the_stream_is_asked_anew_at_each_batch(tmp_path, records, delivery):
    streams, got = [torch.cuda.Stream() for _ in range(3)], []
    batches = iter(settle(read(tmp_path, prefetch=2, **delivery)))
    for i in range(BATCHES):
        with torch.cuda.stream(streams[i % 3]):
            torch.cuda._sleep(SHORT // 4)
            got.append(next(batches) + 0)
    for stream in streams:
        stream.synchronize()
    assert_same_batches(got, epoch_of(records))


def test_next_does_not_wait_for_the_streams_work(tmp_path, records):
    batches = iter(read(tmp_path, prefetch=4))
    next(batches)  # allocates everything that is allocated once
    torch.cuda.synchronize()
    time.sleep(0.2)  # the next ones are ready
    torch.cuda._sleep(LONG)
    began = time.monotonic()
    batch = next(batches)
    took = time.monotonic() - began
    assert not torch.cuda.current_stream().query(), "the sleep was too short to show anything"
    assert took < 0.05
    assert_same_batches([batch], [records[4:8]])


def test_keeping_all_zero_copy_batches_gives_copies_and_no_deadlock(tmp_path, records):
    for prefetch in (1, 4):
        dataset = read(tmp_path, prefetch=prefetch, zero_copy=True)
        kept = list(itertools.islice(dataset, 3 * prefetch + 5))
        leases = sum(gdsdata.io.engine._engine.record_stream(batch.data_ptr(), 0) for batch in kept)
        assert leases == prefetch
        assert_same_batches(kept, epoch_of(records)[: len(kept)])


def test_record_stream_takes_any_batch_view_or_tensor_of_a_gpu_only(tmp_path, records):
    stream = torch.cuda.Stream()
    for zero_copy in (False, True):
        batch = next(iter(read(tmp_path, zero_copy=zero_copy)))
        gdsdata.record_stream(batch, stream)
        gdsdata.record_stream(batch[2:, 5:], stream)
    gdsdata.record_stream(torch.ones(3, device="cuda"), stream)
    with pytest.raises(ValueError, match="the batch is on cpu, which has no streams"):
        gdsdata.record_stream(torch.ones(3), stream)


@pytest.mark.parametrize("ragged", ["flat", "nested", "padded", "list"])
def test_record_stream_takes_batches_with_fields(tmp_path, ragged):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(__file__, "0.txt")
        tar.add(gdsdata.__file__, "1.txt")
    (batch,) = GDSDataset(tmp_path, 2, device="cuda", fields=gdsdata.Fields(ragged=ragged))
    gdsdata.record_stream(batch, torch.cuda.Stream())


def test_epochs_broken_off_a_hundred_times_leave_content_right(tmp_path, records, delivery):
    dataset, got, expected = read(tmp_path, prefetch=3, **delivery), [], []
    for i in range(100):
        if i % 10 == 0:
            drop_cache(tmp_path / "0.bin")
        for j, batch in enumerate(dataset):
            if j % 3 == 0:
                torch.cuda._sleep(SHORT // 20)
            got.append(batch[:, :4096].clone())
            expected.append(records[4 * j : 4 * j + 4, :4096])
            if j == i % 5:
                break
    assert_same_batches(got, expected)
    dataset.set_epoch(0)
    assert_same_batches(dataset, epoch_of(records))


def test_two_iterators_and_several_threads_do_not_disturb_each_other(tmp_path, records, delivery):
    dataset = settle(read(tmp_path, prefetch=2, **delivery))

    def epoch(i: int) -> list[torch.Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            got = [batch.clone() for batch in (dataset if i % 2 else read(tmp_path, **delivery))]
            torch.cuda.current_stream().synchronize()
        return got

    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(epoch, range(4)):
            assert_same_batches(got, epoch_of(records))


@pytest.mark.parametrize("residency", [None, "pinned"])
def test_other_threads_run_while_an_iterator_ends_behind_a_slow_kernel(tmp_path, records, residency):
    batches = iter(settle(read(tmp_path, prefetch=2, residency=residency)))
    torch.cuda._sleep(LONG)
    for _ in range(4):
        next(batches)  # later batches reuse this memory after the kernel
    gaps, ended = [], threading.Event()

    def tick() -> None:
        before = time.perf_counter()
        while not ended.is_set():
            time.sleep(0.001)
            gaps.append(time.perf_counter() - before)
            before = time.perf_counter()

    with ThreadPoolExecutor(1) as pool:
        ticking = pool.submit(tick)
        del batches
        ended.set()
        ticking.result()
    assert max(gaps) < 0.05
    torch.cuda.synchronize()


def test_a_batch_outlives_dataset_and_engine(tmp_path, records, delivery):
    dataset = settle(read(tmp_path, options=EngineOptions(workers=2, queue_depth=3), **delivery))
    batches = iter(dataset)
    first, second = next(batches), next(batches)
    del batches, dataset
    gc.collect()
    again = list(read(tmp_path))
    assert_same_batches([first, second], [records[:4], records[4:8]])
    assert_same_batches(again, epoch_of(records))


@pytest.mark.parametrize("dtype", ["u1", "i1", "<u2", "<i2", "<u4", "<i4", "<i8", ">u2", ">i2", ">u4", ">i4", ">i8"])
def test_tokens_of_every_integer_dtype_become_int64_on_the_gpu(tmp_path, dtype):
    info = np.iinfo(dtype)
    tokens = np.random.default_rng(0).integers(info.min, info.max, 5001, np.int64, endpoint=True).astype(dtype)
    tokens[:2] = info.min, info.max
    (tmp_path / "tokens.bin").write_bytes(tokens.tobytes())
    dataset = GDSDataset(tmp_path / "tokens.bin", 7, Tokens(dtype, seq_len=50), shuffle=False, device="cuda")
    got = torch.cat(list(dataset))
    assert got.dtype == torch.int64 and got.device.type == "cuda"
    expected = np.stack([tokens[start : start + 51] for start in range(0, 5000, 50)]).astype(np.int64)
    assert_same_batches([got], [expected])


def test_an_error_of_the_disk_is_raised_at_its_batch_and_the_next_epoch_works(tmp_path, records):
    dataset = read(tmp_path)
    os.truncate(tmp_path / "0.bin", 20 * RECORD_BYTES + 7)
    with pytest.raises(CorruptData, match=r"0\.bin"):
        list(dataset)
    write_records(tmp_path / "0.bin", 4 * BATCHES, RECORD_BYTES)
    dataset.set_epoch(0)
    assert_same_batches(dataset, epoch_of(records))


@pytest.mark.parametrize(
    "source, steps",
    {
        "folder": ["list", "engine", "index"],
        "files": ["engine", "list", "index"],
        "Parquet": ["list", "index", "engine"],  # which is not read to the GPU
    }.items(),
)
def test_the_engine_gets_its_memory_while_files_are_listed_and_indexed(tmp_path, records, monkeypatch, source, steps):
    kind = gdsdata.formats.Parquet if source == "Parquet" else gdsdata.formats.Records
    found = []

    def note(where, name, step):
        usual = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *some, **named: found.append(step) or usual(*some, **named))

    note(engine._engine, "Engine", "engine")
    note(indexing, "listing_of", "list")
    note(kind, "index", "index")
    reading = Reading(EngineOptions(queue_depth=37 + len(source)))  # no other data set has this engine: one is kept
    if source == "Parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"n": range(8)}), tmp_path / "0.parquet")
        dataset = GDSDataset(tmp_path / "0.parquet", 4, device="cuda", reading=reading)
    else:
        files = tmp_path if source == "folder" else [tmp_path / "0.bin"]
        dataset = GDSDataset(files, 4, Records("u1", (RECORD_BYTES,)), device="cuda", reading=reading)
    assert found == steps
    assert len(list(dataset)) == len(dataset) and found == steps


def test_statistics_name_what_happened(tmp_path, records):
    dataset = settle(read(tmp_path, residency="pinned"))
    list(dataset)
    statistics = dataset.stats()
    assert statistics["bytes"]["pinned_page_cache"] == records.size == sum(statistics["bytes"].values())
    assert set(statistics["residency"]) == {"ready", "registered_bytes", "error"}
    assert statistics["residency"]["registered_bytes"] >= records.size and not statistics["residency"]["error"]
    assert {"backend", "device_backend", "workers", "bounce_bytes", "retries", "errors"} <= set(statistics["engine"])
    plain = read(tmp_path)
    list(plain)
    assert "residency" not in plain.stats()
    assert plain.stats()["bytes"]["pinned_page_cache"] == 0
    assert sum(plain.stats()["bytes"].values()) == records.size
    assert plain.stats()["ring_bytes"] >= (plain.prefetch + 2) * 4 * RECORD_BYTES


def test_twenty_epochs_take_no_more_memory_of_the_gpu_than_a_few(tmp_path, records, delivery):
    dataset = read(tmp_path, **delivery)

    def epoch(number: int) -> None:
        for batch in dataset:
            batch.sum()
            del batch
        next(iter(dataset))
        dataset.set_epoch(number)

    epoch(0)
    settle(dataset)  # what it takes then is taken in its next epochs
    for i in range(3):
        epoch(i)
    before = free_bytes()
    for i in range(20):
        epoch(i)
    # Its pool may have had fewer buffers before: the GPU was behind by less.
    assert before - free_bytes() <= dataset.stats()["ring_bytes"] + 4 * MIB


def test_data_sets_made_and_dropped_release_the_memory_of_the_gpu(tmp_path, records, delivery):
    def use() -> None:
        list(itertools.islice(read(tmp_path, prefetch=8, **delivery), 5))

    for _ in range(3):
        use()
    # Other threads release some buffers a moment later: 12 to 20 MiB, at one of ten looks (H200).
    before = max(free_bytes() for _ in range(3))
    for _ in range(20):
        use()
    assert eventually(lambda: before - free_bytes() <= 4 * MIB, 10), f"{(before - free_bytes()) / MIB} MiB are gone"


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (4, 4), (64, 12)])
def test_an_engine_of_a_gpu_has_a_worker_for_each_core_of_its_share(monkeypatch, cores, workers):
    monkeypatch.setattr(engine, "share_of_cores", lambda least: cores)
    options = EngineOptions(backend="uring", calibrate=False, coalesce_gap_bytes=5000 + cores)  # its own engine
    assert engine.shared_engine(options, torch.device("cuda", 0)).workers == workers


# ---------------------------------------------------------------------------------------------------- CUDA graphs


def capture_a_graph(seconds: float = 0.0) -> None:
    """Capture in torch's default mode, in which many calls of other threads would end a capture."""
    ones, graph = torch.ones(1000, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ones * 2
        time.sleep(seconds)
    graph.replay()
    assert (found == 2).all()


def test_graphs_are_captured_while_batches_are_read_ahead(tmp_path, records, delivery):
    got = []
    for batch in read(tmp_path, prefetch=8, **delivery):
        got.append(batch)
        capture_a_graph()
    assert_same_batches(got, epoch_of(records))


@pytest.mark.parametrize(
    ("format", "samples"), [(Records("u1", (MIB // 16,)), 1024), (Tokens("u2", MIB // 32), 1023)], ids=["copy", "cast"]
)
def test_graphs_are_captured_while_another_thread_reads_batches(tmp_path, format, samples):
    (tmp_path / "0.bin").write_bytes(os.urandom(64 * MIB))
    dataset = GDSDataset(tmp_path / "0.bin", 64, format, device="cuda")
    over = threading.Event()

    def read_epochs() -> int:
        epochs = 0
        while not over.is_set():
            assert sum(len(batch) for batch in dataset) == samples
            epochs += 1
        return epochs

    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(read_epochs)
        try:
            for _ in range(40):  # each gives torch's free memory back, so the other thread allocates
                capture_a_graph(seconds=0.01)
        finally:
            over.set()
        assert done.result() > 0


@pytest.mark.parametrize("device_staging_bytes", [0, 64 * MIB])
def test_graphs_are_captured_while_a_checkpoint_is_saved(tmp_path, device_staging_bytes):
    saved = {str(i): torch.full((MIB,), float(i), device="cuda") for i in range(8)}
    with gdsdata.AsyncCheckpointer(tmp_path / "saves", device_staging_bytes=device_staging_bytes) as checkpointer:
        for step in range(4):
            checkpointer.save(step, {"model": saved})
            for _ in range(5):
                capture_a_graph(seconds=0.002)
        checkpointer.wait()
        restored = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
        assert checkpointer.restore({"model": restored}) == 3
    assert all(torch.equal(restored[name], tensor) for name, tensor in saved.items())


def test_graphs_are_captured_while_another_thread_saves_and_loads(tmp_path):
    saved = {str(i): torch.full((MIB,), float(i), device="cuda") for i in range(8)}
    over, loaded = threading.Event(), {}

    def repeat() -> None:
        while not over.is_set():
            gdsdata.save(saved, tmp_path / "a.safetensors")
            loaded.update(gdsdata.load(tmp_path / "a.safetensors", device="cuda"))

    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(repeat)
        try:
            assert eventually(lambda: loaded or done.done(), 30)
            for _ in range(20):
                capture_a_graph(seconds=0.02)
        finally:
            over.set()
        done.result()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())


# -------------------------------------------------------------------------------------------------- casts of loads


def test_values_that_a_load_casts_are_in_place_for_every_stream(tmp_path, monkeypatch):
    saved = {"a": torch.randn(MIB, device="cuda")}
    gdsdata.save(saved, tmp_path / "a.safetensors")
    targets = {"a": torch.zeros(MIB, dtype=torch.float64, device="cuda")}
    for name in ("to", "copy_"):  # each lasts longer than what follows it in a load
        slow = slow_on_the_stream(getattr(torch.Tensor, name))
        monkeypatch.setattr(torch.Tensor, name, slow)
    for load in (
        lambda: gdsdata.load(tmp_path / "a.safetensors", device="cuda", dtype=torch.float64),
        lambda: gdsdata.load(tmp_path / "a.safetensors", into=targets, dtype=torch.float64),
    ):
        loaded = load()
        assert torch.cuda.current_stream().query()
        assert torch.equal(loaded["a"], saved["a"].double())


def slow_on_the_stream(work):
    def call(tensor, *args, **named):
        torch.cuda._sleep(SHORT)
        return work(tensor, *args, **named)

    return call


# ------------------------------------------------------------------------------------------------------- residency


def test_batches_come_from_the_disk_until_the_files_are_resident(tmp_path, records):
    drop_cache(tmp_path / "0.bin")
    dataset = read(tmp_path, residency="pinned")
    assert_same_batches(dataset, epoch_of(records))
    settle(dataset)
    dataset.set_epoch(0)
    before = dataset.stats()["bytes"]["pinned_page_cache"]
    assert_same_batches(dataset, epoch_of(records))
    assert dataset.stats()["bytes"]["pinned_page_cache"] - before == records.size


def test_an_empty_file_hinders_no_residency(tmp_path, records):
    (tmp_path / "1.bin").write_bytes(b"")
    dataset = GDSDataset(
        f"{tmp_path}/*.bin", 4, Records("u1", (RECORD_BYTES,)), shuffle=False, reading=Reading(residency="pinned")
    )
    assert_same_batches(settle(dataset), epoch_of(records))


@pytest.mark.parametrize("dtype", [">i2", ">f8"])
def test_residency_is_refused_for_the_other_byte_order(tmp_path, dtype):
    (tmp_path / "0.bin").write_bytes(bytes(8000))
    with pytest.raises(ValueError, match="of the other byte order: leave residency out"):
        GDSDataset(tmp_path / "0.bin", 4, Records(dtype, (10,)), device="cuda", reading=Reading(residency="pinned"))


def test_residency_is_refused_for_more_than_fits_into_memory(tmp_path, records, monkeypatch):
    monkeypatch.setattr(gdsdata.io.engine, "_memory_for_pinning", lambda: records.size - 1)
    with pytest.raises(BackendUnavailable, match=r"the files have 0\.0 GB, and at most 0\.0 GB of this machine"):
        read(tmp_path, residency="pinned")
    monkeypatch.setattr(gdsdata.io.engine, "_memory_for_pinning", lambda: records.size)
    settle(read(tmp_path, residency="pinned"))


def test_a_residency_that_fails_warns_once_and_batches_are_read(tmp_path, records, monkeypatch):
    extension = gdsdata.io.engine._engine

    def of_an_absent_file(engine, files, index, sample, most_samples):
        path = np.frombuffer(os.fsencode(f"{tmp_path}/absent"), np.uint8)
        absent = extension.FileTable(path, np.array([1]), np.array([1]))
        return extension.Residence(engine, absent, most_samples)

    monkeypatch.setattr(gdsdata.io.engine, "residence_of", of_an_absent_file)
    dataset = read(tmp_path, residency="pinned")
    assert eventually(lambda: dataset.stats()["residency"]["error"])
    with pytest.warns(RuntimeWarning, match="is not available: could not open .*absent"):
        assert_same_batches(dataset, epoch_of(records))
    assert not dataset.stats()["residency"]["ready"] and dataset.stats()["bytes"]["pinned_page_cache"] == 0


# --------------------------------------------------------------------------------------------------------- tensors

SIZES = [0, 1, 511, 512, 4095, 4096, 4097, MIB + 1, 9 * MIB + 4095]
OFFSETS = [0, 1, 511, 4096, MIB + 3]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", OFFSETS)
def test_bytes_of_any_size_and_offset_come_back_warm_and_cold(tmp_path, size, offset):
    data = torch.frombuffer(bytearray(random_bytes(size + 1, seed=size + offset)), dtype=torch.uint8)[:size]
    write_tensor(data.cuda(), tmp_path / "x", offset)
    assert (tmp_path / "x").read_bytes() == (bytes(offset) + bytes(data.numpy()) if size or not offset else b"")
    for _ in range(2):
        got = read_tensor(tmp_path / "x", torch.uint8, (size,), offset, device="cuda")
        assert got.device.type == "cuda" and torch.equal(got.cpu(), data)
        drop_cache(tmp_path / "x")


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.bfloat16, torch.float8_e4m3fn, torch.complex128])
def test_a_tensor_of_any_dtype_comes_back_as_it_was(tmp_path, dtype):
    tensor = torch.frombuffer(bytearray(b"\0\1" * 800), dtype=dtype).cuda().reshape(5, -1)
    write_tensor(tensor, tmp_path / "x")
    again = read_tensor(tmp_path / "x", dtype, tensor.shape, device="cuda")
    assert torch.equal(again.view(torch.uint8), tensor.view(torch.uint8))


def test_a_file_that_ends_before_the_tensor_is_corrupt(tmp_path):
    (tmp_path / "x").write_bytes(bytes(4096))
    for size, offset in ((4097, 0), (1, 4096), (10, 4090), (MIB, 5000)):
        for cold in (False, True):
            if cold:
                drop_cache(tmp_path / "x")
            with pytest.raises(CorruptData, match="ends at 4096 bytes"):
                read_tensor(tmp_path / "x", torch.uint8, (size,), offset, device="cuda")
    with pytest.raises(FileNotFoundError):
        read_tensor(tmp_path / "absent", torch.uint8, (1,), device="cuda")


@pytest.mark.parametrize("shape", [(1000, 3000), (1000, 3001)], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("offset", [0, 77])
def test_a_tensor_still_being_computed_is_written_when_it_is(tmp_path, shape, offset):
    tensor = torch.zeros(shape, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    tensor += torch.arange(shape[1], device="cuda")
    write_tensor(tensor, tmp_path / "x", offset)
    assert torch.equal(read_tensor(tmp_path / "x", torch.float32, shape, offset), tensor.cpu())


def test_a_write_waits_for_the_stream_that_computes_its_tensor(tmp_path):
    stream, tensor = torch.cuda.Stream(), torch.zeros(MIB, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        tensor += 7
        write_tensor(tensor, tmp_path / "x")
    assert read_tensor(tmp_path / "x", torch.float32, (MIB,)).min() == 7


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.transpose(0, 2),
        lambda x: x[:, 1:, ::2],
        lambda x: x[1],
        lambda x: x[0, 0, 0].expand(3, 7),
        lambda x: torch.complex(x, -x).conj(),
        lambda x: torch.nn.Parameter(x),
    ],
    ids=["transposed", "strided", "part of a storage", "expanded", "conjugate view", "parameter"],
)
def test_a_view_is_written_as_the_values_that_it_shows(tmp_path, make):
    torch.cuda._sleep(SHORT)
    tensor = make(torch.arange(24000, dtype=torch.float32, device="cuda").reshape(20, 30, 40))
    write_tensor(tensor, tmp_path / "x")
    again = read_tensor(tmp_path / "x", tensor.dtype, tensor.shape, device="cuda")
    assert torch.equal(again, tensor.detach().clone())


def test_a_tensor_read_anew_is_not_overwritten_under_a_kernel_that_uses_it(tmp_path):
    (tmp_path / "x").write_bytes(b"\7" * MIB)
    with gdsdata.Engine() as engine:
        for _ in range(5):
            tensor = torch.full((MIB,), 3, dtype=torch.uint8, device="cuda")
            torch.cuda._sleep(LONG // 4)
            seen = tensor.clone()
            assert engine.read(tmp_path / "x", tensor).result() is tensor
            assert seen.eq(3).all() and tensor.eq(7).all()


def test_a_waiting_caller_does_a_short_read_from_the_page_cache_itself(tmp_path):
    data = torch.frombuffer(bytearray(random_bytes(MIB)), dtype=torch.uint8)
    (tmp_path / "x").write_bytes(bytes(data.numpy()))
    for size in (1, 4096, 65_537, MIB):
        read_tensor(tmp_path / "x", torch.uint8, (size,), device="cuda")
        gdsdata.io.engine.begin_spans()
        got = read_tensor(tmp_path / "x", torch.uint8, (size,), device="cuda")
        spans = gdsdata.io.engine.end_spans()
        assert torch.equal(got.cpu(), data[:size])
        assert [name for name, _, _ in spans] == ["gdsdata in waiting threads (cuda:0)"]


def test_short_reads_of_many_threads_and_streams_are_right(tmp_path):
    data = torch.frombuffer(bytearray(random_bytes(2 * MIB)), dtype=torch.uint8)
    (tmp_path / "x").write_bytes(bytes(data.numpy()))

    def read_some(thread: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(50):
                offset, size = 1001 * i + thread, (4096, 100_003, MIB)[i % 3]
                if i % 10 == 0:
                    torch.cuda._sleep(SHORT // 10)
                got = read_tensor(tmp_path / "x", torch.uint8, (size,), offset, device="cuda")
                assert torch.equal(got.cpu(), data[offset : offset + size])
                into = torch.full((size,), 3, dtype=torch.uint8, device="cuda")
                seen = into.clone()
                assert engine.read(tmp_path / "x", into, offset).result() is into
                assert seen.eq(3).all() and torch.equal(into.cpu(), data[offset : offset + size])

    with gdsdata.Engine() as engine, ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(read_some, thread) for thread in range(4)]:
            done.result()


# ---------------------------------------------------------------------------------------------------------- Engine


def test_many_reads_and_writes_at_once_on_both_devices(tmp_path):
    def tensor_of(i: int) -> torch.Tensor:
        return torch.full((100_000 + 1000 * i + i % 3,), i, dtype=torch.int32, device=("cpu", "cuda")[i % 2])

    with gdsdata.Engine(EngineOptions(workers=3), most_calls=8) as engine:  # its own engine, for its counts
        written = [
            engine.write(tmp_path / str(i), tensor_of(i), priority=("training", "background")[i % 3 == 0])
            for i in range(40)
        ]
        assert [future.result() for future in written] == [None] * 40
        into = [torch.empty_like(tensor_of(i), device=("cuda", "cpu")[i % 2]) for i in range(40)]
        futures = [engine.read(tmp_path / str(i), tensor) for i, tensor in enumerate(into)]
        for i, future in enumerate(futures):
            assert future.result() is into[i] and torch.equal(into[i].cpu(), tensor_of(i).cpu())
        statistics = engine.stats()
        assert set(statistics) == {"cpu", "cuda:0"} and all(one["errors"] == 0 for one in statistics.values())


def test_a_finished_read_is_complete_for_every_stream(tmp_path):
    data = torch.frombuffer(bytearray(random_bytes(8 * MIB)), dtype=torch.uint8)
    (tmp_path / "x").write_bytes(bytes(data.numpy()))
    with gdsdata.Engine() as engine:
        for _ in range(10):
            tensor = engine.read(tmp_path / "x", torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")).result()
            with torch.cuda.stream(torch.cuda.Stream()):
                copy = tensor.cpu()
            assert torch.equal(copy, data)


def test_errors_come_in_the_future_and_the_engine_goes_on(tmp_path):
    (tmp_path / "x").write_bytes(bytes(100))
    with gdsdata.Engine() as engine:
        on_gpu = lambda count: torch.zeros(count, dtype=torch.uint8, device="cuda")  # noqa: E731
        assert isinstance(engine.read(tmp_path / "absent", on_gpu(1)).exception(), FileNotFoundError)
        assert isinstance(engine.read(tmp_path / "x", on_gpu(101)).exception(), CorruptData)
        assert isinstance(engine.write(tmp_path / "absent" / "x", on_gpu(1)).exception(), (FileNotFoundError, IoError))
        assert engine.read(tmp_path / "x", on_gpu(100)).result().sum() == 0
        with pytest.raises(ValueError, match="is not contiguous"):
            engine.read(tmp_path / "x", on_gpu(100)[::2])


def test_a_checkpoint_and_training_data_both_get_on(tmp_path, records):
    dataset, state = read(tmp_path), torch.arange(16 * MIB // 8, device="cuda")
    with gdsdata.Engine() as engine:
        futures = [engine.write(tmp_path / f"checkpoint{i}", state) for i in range(4)]
        for _ in range(3):
            dataset.set_epoch(0)
            assert_same_batches(dataset, epoch_of(records))
        for future in futures:
            future.result(60)
    for i in range(4):
        assert torch.equal(read_tensor(tmp_path / f"checkpoint{i}", torch.int64, state.shape, device="cuda"), state)


# ---------------------------------------------------------------------------------------- devices, processes, ends


@pytest.mark.parametrize("use", ["data set", "read_tensor", "Engine"])
def test_a_gpu_that_is_not_there_is_refused_in_words(tmp_path, records, use):
    with pytest.raises(BackendUnavailable, match="device=cuda:99 cannot be used here"):
        if use == "data set":
            read(tmp_path, device="cuda:99")
        elif use == "read_tensor":
            read_tensor(tmp_path / "0.bin", torch.uint8, (1,), device="cuda:99")
        else:
            gdsdata.io.engine.shared_engine(EngineOptions(), torch.device("cuda:99"))


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")


@needs_two
def test_two_gpus_in_one_process_get_their_own_batches(tmp_path, records, delivery):
    datasets = [read(tmp_path, device=f"cuda:{i}", **delivery) for i in range(2)]
    for current in range(2):  # which device is current makes no difference
        with torch.cuda.device(current):
            got = [list(dataset) for dataset in datasets]
        for i in range(2):
            assert {batch.device for batch in got[i]} == {torch.device("cuda", i)}
            assert_same_batches(got[i], epoch_of(records))
            datasets[i].set_epoch(0)


@needs_two
def test_tensors_of_two_gpus_are_read_and_written_whichever_is_current(tmp_path):
    for current, other, count in ((0, 1, 300_001), (1, 0, 300_001), (0, 1, 1000), (1, 0, 1000)):
        with torch.cuda.device(current):
            tensor = torch.full((count,), other, dtype=torch.int32, device=f"cuda:{other}")
            write_tensor(tensor, tmp_path / "x")
            again = read_tensor(tmp_path / "x", torch.int32, tensor.shape, device=f"cuda:{other}")
            assert again.device == tensor.device and torch.equal(again, tensor)
            here = read_tensor(tmp_path / "x", torch.int32, tensor.shape, device="cuda")
            assert here.device == torch.device("cuda", current) and torch.equal(here.cpu(), tensor.cpu())
            assert torch.cuda.current_device() == current


@needs_two
def test_a_data_set_stays_on_the_gpu_that_was_current_when_it_was_made(tmp_path, records):
    with torch.cuda.device(0):
        dataset = read(tmp_path)
    with torch.cuda.device(1):
        got = list(dataset)
    assert {batch.device for batch in got} == {torch.device("cuda", 0)}
    assert_same_batches(got, epoch_of(records))


def what_a_forked_child_says(folder: Path) -> list[int]:
    dataset, engine = read(folder), gdsdata.Engine()
    batches = iter(dataset)
    next(batches)
    engine.read(folder / "0.bin", torch.empty(100, dtype=torch.uint8, device="cuda")).result()

    def use_the_parents_engine() -> None:
        with contextlib.suppress(EngineClosed):
            engine.read(folder / "0.bin", torch.empty(100, dtype=torch.uint8))
            raise AssertionError("it was read")

    def use_the_parents_iterator() -> None:
        with contextlib.suppress(EngineClosed):
            for _ in batches:
                raise AssertionError("a batch came")

    def use_the_cpu() -> None:
        assert len(list(read(folder, device="cpu"))) == BATCHES

    def use_cuda() -> None:
        with contextlib.suppress(BackendUnavailable, RuntimeError):
            read(folder)
            raise AssertionError("CUDA worked")

    codes = [
        exit_code_of_fork(child)
        for child in (use_the_parents_engine, use_the_parents_iterator, use_the_cpu, use_cuda, lambda: None)
    ]
    assert sum(1 for _ in batches) == BATCHES - 1, "the parent goes on"
    return codes


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_an_error_and_the_parent_goes_on(tmp_path, records):
    assert in_new_process(what_a_forked_child_says, tmp_path) == [0] * 5


# torch itself maps the driver when it counts devices without NVML. gdsdata's part is the
# difference.
CPU_EPOCH = """
import os, sys
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
import torch
def mapped():
    return {line.split()[-1] for line in open("/proc/self/maps") if "libcuda.so" in line}
before = mapped()
import gdsdata
from gdsdata.formats import Records
for device in ("cpu",):
    for batch in gdsdata.GDSDataset(sys.argv[1], 4, Records("u1", (65536,)), device=device):
        pass
gdsdata.read_tensor(sys.argv[1], torch.uint8, (100,))
assert not torch.cuda.is_initialized(), "CUDA was initialised"
assert mapped() == before, f"these were mapped: {mapped() - before}"
"""


def test_an_epoch_on_the_cpu_leaves_cuda_alone(tmp_path, records):
    assert run_script(CPU_EPOCH, tmp_path / "0.bin", timeout_s=60) == (0, "", "")


PROGRAM = f"""
import sys, threading, time
import torch, gdsdata
from gdsdata.formats import Records
def read(**arguments):
    records, reading = Records("u1", ({RECORD_BYTES},)), gdsdata.Reading(**arguments)
    return gdsdata.GDSDataset(sys.argv[1], 4, records, device="cuda", reading=reading)
"""


def test_the_interpreter_ends_with_iterators_alive_and_batches_held(tmp_path, records):
    program = """
iterators = [iter(read(**how)) for how in ({}, dict(zero_copy=True), dict(residency="pinned", zero_copy=True))]
held = [next(batches) for batches in iterators for _ in range(3)]
engine = gdsdata.Engine()
engine.read(sys.argv[1], torch.empty(1000, dtype=torch.uint8, device="cuda"))
torch.cuda._sleep(100_000_000)
cycle = [held, iterators]; cycle.append(cycle)
"""
    assert run_script(PROGRAM + program, tmp_path / "0.bin", timeout_s=60) == (0, "", "")


@pytest.mark.parametrize("then", ["", "batches = iter(data)", "next(iter(data))"])
def test_the_interpreter_ends_while_a_cast_is_still_loaded(tmp_path, then):
    np.arange(10_000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    program = f"""
import sys, torch, gdsdata
torch.empty(1, device="cuda")
data = gdsdata.GDSDataset(sys.argv[1], 4, gdsdata.formats.Tokens("uint16", 64), device="cuda")
{then}
"""
    assert run_script(program, tmp_path / "tokens.bin", timeout_s=60) == (0, "", "")


def test_the_interpreter_ends_while_a_daemon_thread_waits_for_a_batch(tmp_path, records):
    program = """
options = gdsdata.EngineOptions(direct="always", faults="late=1,late_ms=1000")
batches = iter(read(options=options))
threading.Thread(target=next, args=(batches,), daemon=True).start()
time.sleep(0.2)
"""
    code, _, stderr = run_script(PROGRAM + program, tmp_path / "0.bin", timeout_s=60)
    assert code == 0, stderr


def test_batches_dropped_in_other_threads_come_back_right(tmp_path, records):
    got, batches = [], iter(read(tmp_path, prefetch=2, zero_copy=True))
    for batch in batches:
        got.append(batch.clone())
        held = [batch]
        del batch
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
    assert_same_batches(got, epoch_of(records))
