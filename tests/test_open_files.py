"""More files than descriptors: right bytes and no warning for every batch."""

import contextlib
import os
import resource
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import BACKENDS, descriptors, drop_cache, in_new_process, needs_uring

import gdsdata
from gdsdata import EngineOptions, GDSDataset, Reading
from gdsdata.errors import CorruptData, IoError
from gdsdata.formats import Npy

FILES, BATCH = 1024, 512
VALUES = 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for i in range(FILES):
        np.save(folder / f"{i:04}.npy", np.arange(i, i + VALUES))
    return folder


def limit_descriptors(limit: int, left: int | None = None) -> list[int]:
    """Lower the limit, and take all but ``left`` descriptors, as another part of a program may."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    taken = []
    if left is not None:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(left):
            os.close(taken.pop())
    return taken


def read_all(folder: Path, options: EngineOptions, limit: int, left: int | None) -> tuple[list[int], int, list[str]]:
    torch.empty(0)  # torch's libraries open files
    dataset = GDSDataset(folder, BATCH, Npy(), shuffle=True, seed=1, device="cpu", reading=Reading(options=options))
    first = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        drop_cache(*folder.iterdir())
        taken = limit_descriptors(limit, left)
        for epoch in range(2):
            for batch in dataset:
                values = batch.numpy()
                assert (np.diff(values) == 1).all()
                if epoch == 1:
                    first += values[:, 0].tolist()
        for descriptor in taken:
            os.close(descriptor)
        held = descriptors()
    return sorted(first), held, [str(warning.message) for warning in warned]


@pytest.mark.parametrize(
    ("backend", "direct"),
    [("posix", "auto"), ("posix", "never"), *(pytest.param("uring", d, marks=needs_uring) for d in ("auto", "always"))],
)
def test_batches_of_more_files_than_descriptors_are_right(folder, backend, direct):
    options = EngineOptions(backend=backend, workers=4, direct=direct)
    got, held, warned = in_new_process(read_all, folder, options, 256, None)
    assert got == list(range(FILES))
    assert warned == []
    assert held < 200, "the program has none left"


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_are_right_while_the_program_holds_nearly_all_descriptors(folder, backend):
    options = EngineOptions(backend=backend, workers=4)
    got, _, warned = in_new_process(read_all, folder, options, 1024, 12)
    assert got == list(range(FILES))
    assert not [message for message in warned if "O_DIRECT" in message]


def rewrite_some(folder: Path) -> None:
    for i in range(300):
        np.save(folder / f"{i:03}.npy", np.full(VALUES, i))
    reading = Reading(options=EngineOptions(workers=2))
    dataset = GDSDataset(folder, 50, Npy(), shuffle=False, device="cpu", reading=reading)
    limit_descriptors(128)
    for i in range(0, 300, 50):
        got = [batch[:, 0].tolist() for batch in dataset]  # most files are mapped, and have no descriptor
        assert sum(got, []) == [1000 if k < i and k % 50 == 0 else k for k in range(300)]
        np.save(folder / f"{i:03}.npy", np.full(VALUES, 1000))
        with pytest.raises(CorruptData, match=rf"{i:03}\.npy' was replaced or changed since it was indexed"):
            list(dataset)


def test_each_of_many_mapped_files_is_refused_once_it_was_rewritten_in_place(tmp_path):
    in_new_process(rewrite_some, tmp_path)


def read_ranges(folder: Path, limit: int) -> None:
    paths = sorted(folder.iterdir())
    with gdsdata.Engine(EngineOptions(workers=4), most_calls=256) as engine:
        tensors = [torch.empty(VALUES, dtype=torch.int64) for _ in paths]
        limit_descriptors(limit)
        drop_cache(*paths)
        offset = paths[0].stat().st_size - VALUES * 8
        for future in [engine.read(path, tensor, offset=offset) for path, tensor in zip(paths, tensors, strict=True)]:
            future.result()
        for i, tensor in enumerate(tensors):
            assert torch.equal(tensor, torch.arange(i, i + VALUES))


def test_many_ranges_of_many_files_are_read_with_few_descriptors(folder):
    in_new_process(read_ranges, folder, 128)


def save_beside_reading(folder: Path, out: Path) -> None:
    """A save needs descriptors, so files that reading has left open are closed."""
    dataset = GDSDataset(folder, 64, Npy(), device="cpu", reading=Reading(options=EngineOptions(workers=2)))
    torch.save({}, out / "imports")
    gdsdata.save({}, out / "imports.pt")
    limit_descriptors(1024)
    list(dataset)
    taken = limit_descriptors(1024, 0)
    assert taken
    gdsdata.save({"a": torch.arange(100_000)}, out / "saved.pt")
    assert torch.equal(gdsdata.load(out / "saved.pt")["a"], torch.arange(100_000))


def segments_of(dataset: GDSDataset) -> int:
    """Return the segments that an epoch's batches were read in."""
    before = dataset.stats()["engine"]["segments"]
    for _ in dataset:
        pass
    return dataset.stats()["engine"]["segments"] - before


def test_all_workers_share_a_batch_whose_files_have_to_be_opened(folder):
    reading = Reading(options=EngineOptions(workers=4))
    dataset = GDSDataset(folder, BATCH // 8, device="cpu", reading=reading)
    batches = FILES // (BATCH // 8)
    assert segments_of(dataset) == 4 * batches
    assert segments_of(dataset) == 2 * batches  # all are open now: a segment has 256 KiB


def test_a_save_finds_descriptors_that_idle_files_hold(folder, tmp_path):
    in_new_process(save_beside_reading, folder, tmp_path)


def read_without_any(folder: Path) -> str:
    dataset = GDSDataset(
        folder, 64, Npy(), device="cpu", reading=Reading(options=EngineOptions(workers=2, backend="posix"))
    )
    taken = limit_descriptors(1024, 0)
    assert taken
    try:
        list(dataset)
    except IoError as error:
        return str(error)
    return "no error"


def test_without_a_single_descriptor_the_error_says_what_to_raise(folder):
    error = in_new_process(read_without_any, folder)
    assert "Too many open files" in error and "ulimit -n" in error
