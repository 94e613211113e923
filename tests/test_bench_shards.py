"""case=loader of the bench: volumes in other loaders' formats, and the loaders that read them."""

import gc
import importlib.util
import io
import multiprocessing
import os
import tarfile

import numpy as np
import pytest
import torch
from test_bench import results_in, small
from torch.utils.data import DataLoader

from gdsdata.bench import cases, settings
from gdsdata.bench import run as bench_run
from gdsdata.bench.cases.loader.case import Batches, Loader
from gdsdata.bench.cases.loader.row import LoaderRow
from gdsdata.bench.cases.train.case import Train, Work
from gdsdata.bench.cases.train.row import TrainRow
from gdsdata.bench.data import copies, sources
from gdsdata.bench.peers import registry
from gdsdata.bench.peers.by_hand.windows import NumpyGather
from gdsdata.bench.peers.ffcv import Ffcv
from gdsdata.bench.peers.gdsdata.batches import TarBatches
from gdsdata.bench.peers.shards import Shards

pytestmark = pytest.mark.usefixtures("quick_programs")

SHAPE = [4, 8, 16]
VOLUMES = {"data_kind": "npy", "data_shape": SHAPE, "data_size_bytes": 256 * 4 * int(np.prod(SHAPE))}
OTHERS = [peer for peer in registry.rows("loader", "npy", "warm") if peer.stored_as or peer.key == "spdl"]
PACKAGES = {peer.key: peer.package for peer in OTHERS}


def volumes(folder, count=20):
    wanted = settings.DataSettings(folder=str(folder), shape=SHAPE, size_bytes=count * 4 * int(np.prod(SHAPE)))
    return sources.source_for("npy", wanted)


def needs(package):
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def row_of(source, folder, peer):
    """Open a row in this process. `peer` is a key, or a class."""
    key = peer if isinstance(peer, str) else f"{__name__}:{peer.__qualname__}"
    kind = registry.find("loader", key).stored_as
    made = {kind: copies.copied(source, kind, folder)} if kind else {}
    data_set = sources.DataSet(source.kind, source, 3, made)
    return LoaderRow(key, data_set, cases.LoaderSettings(seed=1), {}, "cpu")


def test_a_tar_has_the_arrays_and_is_made_once(tmp_path):
    source = volumes(tmp_path)
    copy = copies.copied(source, "tar", tmp_path)
    found = []
    for file in copy.files:
        with tarfile.open(file) as archive:
            found += [np.load(io.BytesIO(archive.extractfile(member).read())) for member in archive.getmembers()]
    assert len(found) == copy.samples == 20
    assert all(np.array_equal(one, np.load(path)) for one, path in zip(found, source.files, strict=True))
    before = [os.stat(file).st_mtime_ns for file in copy.files]
    assert copies.copied(source, "tar", tmp_path) == copy
    assert [os.stat(file).st_mtime_ns for file in copy.files] == before


def test_a_copy_of_files_that_have_changed_is_made_anew(tmp_path):
    source = volumes(tmp_path)
    before = copies.copied(source, "tar", tmp_path)
    np.save(source.files[0], np.ones(SHAPE, np.float32))
    after = copies.copied(source, "tar", tmp_path)
    assert not set(after.files) & set(before.files)


@pytest.mark.parametrize("key", PACKAGES)
def test_a_rows_batches_are_the_datas_own(tmp_path, key):
    needs(PACKAGES[key])
    row = row_of(volumes(tmp_path), tmp_path, key)
    row.settings.verify_batches = 5
    checked = row.verify("float32")
    assert checked["checked_batches"] == 10
    run = row.timed("float32", epochs=2, seconds=60)
    row.close()
    assert run["samples"] >= 20 and run["bytes"] == run["samples"] * 4 * np.prod(SHAPE)


class Doubling(TarBatches):
    """Gives each sample twice in an epoch, in an order of its own."""

    def expected_ids(self, epoch, batches):
        return [None] * batches

    def epoch(self, epoch):
        for batch in super().epoch(epoch):
            yield from (batch, batch)


class Damaging(Doubling):
    def epoch(self, epoch):
        for batch in TarBatches.epoch(self, epoch):
            changed = batch.clone()
            changed[-1].view(-1)[-1] += 1
            yield changed


@pytest.mark.parametrize(
    ("peer", "words"), [(Doubling, "came before in the epoch"), (Damaging, "is none of the data's")]
)
def test_wrong_samples_of_a_row_with_an_order_of_its_own_are_found(tmp_path, peer, words):
    row = row_of(volumes(tmp_path), tmp_path, peer)
    with pytest.raises(ValueError, match=words):
        row.verify("float32")


def test_samples_that_are_alike_are_distinguished_by_how_many_came(tmp_path):
    source = volumes(tmp_path, count=3)
    np.save(source.files[1], np.load(source.files[0]))
    truth = sources.Truth(source)
    twice = np.stack([np.load(source.files[0])] * 2)
    assert truth.ids_of(twice, set()) == [0, 1]
    with pytest.raises(ValueError, match="came before"):
        truth.ids_of(twice, {0})


def test_a_run_names_the_shards_row_and_verifies_it(tmp_path, capsys):
    rows = ["gdsdata", "gdsdata_tar"]
    chosen = small(tmp_path, **VOLUMES, case_cache=["warm"], case_rows=rows)
    assert bench_run.main(chosen, tmp_path) == 0, capsys.readouterr().out
    results = results_in(tmp_path)
    assert [row["key"] for row in results["rows"]] == rows and results["verified"] is True
    assert all(sum(row["served_bytes"].values()) > 0 for row in results["rows"])


class Settled(NumpyGather):
    """Has read its first epoch before the clock starts, in 2 s."""

    def settle(self):
        self.first_batch_s, self.first_epoch_s = 0.5, 2.0
        return 1


def test_the_first_epoch_and_later_ones_are_timed_apart(tmp_path):
    wanted = settings.DataSettings(folder=str(tmp_path), seq_len=7, stride=8, size_bytes=16 * 4001)
    source = sources.source_for("tokens", wanted)
    assert source.samples == 4000 + 1

    def run(peer, **ends):
        row = row_of(source, tmp_path, peer)
        found = row.timed("raw", **({"epochs": 3, "seconds": 60} | ends))
        row.close()
        return [found[name] for name in ("samples", "first_epoch_gb_per_s", "later_gb_per_s")], found

    (samples, first, later), found = run("numpy")
    assert samples == 3 * 4001
    assert found["bytes"] / found["seconds"] / 1e9 == pytest.approx(3 / (1 / first + 2 / later))
    (samples, first, later), found = run(Settled)
    assert samples == 3 * 4001 and first == 16 * 4001 / 2e9 and found["first_batch_ms"] == 500
    assert later == found["bytes"] / found["seconds"] / 1e9
    (samples, first, later), _ = run("numpy", epochs=1)
    assert samples == 4001 and first > 0 and later is None
    (samples, first, later), _ = run("numpy", seconds=1e-9)
    assert samples == 3 and first is later is None, "the run was over within its first epoch"


class OfWorkers(Shards):
    workers = 2

    def open(self):
        self.loader = DataLoader(torch.arange(100), **self.loader_options)


@pytest.mark.parametrize("peer", [OfWorkers, "webdataset_2", "mosaic_2", "litdata_2"])
def test_workers_have_ended_when_their_row_is_closed(tmp_path, peer):
    """They end at once, during and after an epoch, and not when Python's collector runs."""
    needs(PACKAGES.get(peer))
    row = row_of(volumes(tmp_path), tmp_path, peer)
    row.construct("float32")
    begun = iter(row.peer.epoch(0))
    next(begun)
    assert len(multiprocessing.active_children()) >= 2
    gc.disable()
    try:
        row.close()
        assert not multiprocessing.active_children()
    finally:
        gc.enable()


def test_a_library_that_cannot_write_its_copies_fails_its_own_rows_alone(tmp_path, monkeypatch):
    def broken(*_):
        raise ModuleNotFoundError("No module named 'catalogue'")

    monkeypatch.setitem(copies.WRITERS, "tar", broken)
    rows = ["gdsdata", "gdsdata_tar"]
    chosen = small(tmp_path, **VOLUMES, case_cache=["warm"], case_rows=rows)
    bench_run.main(chosen, tmp_path)
    sound, without = results_in(tmp_path)["rows"]
    assert sound["verified"] and not sound["error"]
    assert without["error"] == "volumes could not be written as tar: ModuleNotFoundError: No module named 'catalogue'"


def test_your_own_files_are_copied_only_when_a_row_is_named(tmp_path):
    source = Batches("npy", volumes(tmp_path), 16)
    chosen = small(tmp_path, data_kind="npy", data_path=str(tmp_path / "*.npy"), case_rows=[])
    asked = Loader(chosen, tmp_path, None)
    assert not any(asked.copy_for(source, key) for key in asked.wanted(source, "warm"))
    assert any("copies of your files, as tar" in note for note in asked.notes)
    chosen.case.rows = ["gdsdata_tar"]
    assert asked.wanted(source, "warm") == ["gdsdata_tar"]
    chosen.data.path, chosen.case.rows = None, []
    assert "gdsdata_tar" in asked.wanted(source, "warm")


def test_ffcv_which_compiles_by_reading_has_a_row_out_of_the_page_cache_alone(tmp_path):
    asked = Loader(small(tmp_path, data_kind="npy", data_shape=SHAPE), tmp_path, None)
    source = Batches("npy", volumes(tmp_path), 16)
    rows = {cache: [peer.key for peer in asked.rows_for(source, cache)] for cache in ("warm", "cold")}
    assert "ffcv" in rows["warm"] and "ffcv" not in rows["cold"]
    assert asked.copy_for(source, "ffcv") == "beton" and asked.find("ffcv") is Ffcv


@pytest.mark.parametrize(("key", "package"), [("webdataset", "webdataset"), ("spdl", "spdl")])
def test_a_training_loops_batches_are_the_datas_own(tmp_path, key, package):
    needs(package)
    wanted = settings.DataSettings(folder=str(tmp_path), shape=[16, 32, 32], size_bytes=16 * 4 * 16 * 32 * 32)
    source = sources.source_for("npy", wanted)
    made = {"tar": copies.copied(source, "tar", tmp_path)}
    chosen = cases.TrainSettings(seed=1, steps=1, verify_batches=2)
    row = TrainRow(key, Work("volumes", source, 3, made, folder=tmp_path), chosen, {}, "cpu")
    assert row.verify("float32")["checked_batches"] == 4


def test_a_training_run_copies_volumes_for_the_rows_that_read_shards(tmp_path):
    chosen = small(tmp_path, cases.TrainSettings, case_work=["volumes"], data_shape=[16, 32, 32])
    one = Train(chosen, tmp_path, None)
    work = Work("volumes", sources.source_for("npy", chosen.data), 3)
    kinds = {peer.key: one.copy_for(work, peer.key) for peer in one.rows_for(work, "warm")}
    assert kinds.pop("webdataset") == "tar" and not any(kinds.values())
    assert one.copy_for(Work("images", work.source, 3), "webdataset") == "", "the images are tars already"
