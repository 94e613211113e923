"""Megatron-core saves and loads through gdsdata, and its data sets give the same samples.

These tests need the package, which wants Python 3.12 and works with 3.11:

    pip install --no-deps --ignore-requires-python megatron-core==0.19.2   # 2.4 MB
    pytest -m "" tests/test_megatron_core.py
"""

import json
import multiprocessing
import pickle
import queue
import warnings
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import megatron_script as script
import numpy as np
import pytest
import torch
from helpers import torchrun
from object_server import serving
from torch.distributed.checkpoint import CheckpointException

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages that it can do without
    from megatron.core import dist_checkpointing
    from megatron.core.datasets import indexed_dataset
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.object_storage_utils import ObjectStorageConfig
    from megatron.core.dist_checkpointing.strategies import torch as strategies

from gdsdata import GDSStorageReader, GDSStorageWriter
from gdsdata.errors import CorruptData
from gdsdata.integrations import megatron, megatron_data

# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_state_is_written_and_read_by_gdsdata(one_process, tmp_path, monkeypatch):
    calls = []
    for kind, method in (
        (GDSStorageWriter, "write_items"),
        (GDSStorageWriter, "finish"),
        (GDSStorageReader, "read_data"),
    ):
        its = getattr(kind, method)
        monkeypatch.setattr(kind, method, lambda *given, its=its, name=method: (calls.append(name), its(*given))[1])
    stock = strategies._get_filesystem_reader
    script.save(tmp_path / "a", 5, megatron.GDSSaveStrategy())
    script.load(tmp_path / "a", 5, megatron.GDSLoadStrategy(verify=True))
    assert calls == ["write_items", "finish", "read_data"]
    assert strategies._get_filesystem_reader is stock
    script.load(tmp_path / "a", 5)
    assert calls[3:] == []  # that was Megatron's own


def test_a_damaged_checkpoint_is_an_error_of_gdsdata(one_process, tmp_path):
    script.save(tmp_path / "a", 5, megatron.GDSSaveStrategy())
    (file,) = (tmp_path / "a").glob("*.distcp")
    content = file.read_bytes()
    wanted = script.whole(5).numpy().tobytes()
    assert wanted in content
    file.write_bytes(content.replace(wanted, wanted[:-4] + b"\0\0\0\0"))
    with pytest.raises(CheckpointException, match="checksum"):
        script.load(tmp_path / "a", 5, megatron.GDSLoadStrategy(verify=True))


def test_writers_of_their_own_are_refused(one_process, tmp_path):
    with pytest.raises(ValueError, match='async_strategy="mcore"'):
        dist_checkpointing.save(
            script.state_of(0, 1, 1),
            tmp_path,
            megatron.GDSSaveStrategy(),
            async_sharded_save=True,
            async_strategy="nvrx",
        )


def test_a_process_that_was_spawned_can_write_a_request(one_process, tmp_path):
    """As `AsyncCallsQueue(persistent=True)` has it do, which itself needs a GPU."""
    state = script.state_of(0, 1, 5)
    (tmp_path / "a").mkdir()
    request = dist_checkpointing.save(
        state, tmp_path / "a", megatron.GDSSaveStrategy(), async_sharded_save=True, async_strategy="mcore"
    )
    sent = pickle.loads(bytes(ForkingPickler.dumps(request._replace(finalize_fns=[]))))
    rank, _, results = sent.async_fn_args
    staged = sent.preload_fn()
    state["rows"].data.fill_(-1)  # what was staged is a copy
    sent.async_fn(rank, staged, results)
    for finalize in request.finalize_fns:
        finalize()
    script.load(tmp_path / "a", 5, megatron.GDSLoadStrategy())


def ran(ranks, folder, part):
    code, said = torchrun(ranks, script.__file__, folder, part, OMP_NUM_THREADS="1")
    assert code == 0, said
    return [json.loads((folder / f"{part}-rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """Return a folder of checkpoints that two ranks have saved and checked, and what they saw."""
    folder = tmp_path_factory.mktemp("pair")
    return folder, ran(2, folder, "pair")


@pytest.mark.slow
def test_two_ranks_save_and_load_as_with_the_stock_strategy(of_two):
    for found in of_two[1]:
        assert found["ours"] == [".metadata", "__0_0_", "__1_0_", "metadata.json"]
        assert found["parallel"] == [".metadata", "__0_0_", "__0_1_", "__1_0_", "__1_1_", "metadata.json"]
        assert found["finalized"] == [0, 1]


@pytest.mark.slow
def test_a_rank_that_fails_is_an_error_on_all_ranks_and_nothing_is_complete(of_two):
    for found in of_two[1]:
        for name in ("error", "error in the background", "error over another"):
            assert "CheckpointException ranks:dict_keys([1])" in found[name] and "the disk is full" in found[name]
        assert found["names of failed"] == found["names of failed later"] == ["__0_0."]


def test_saves_that_end_in_another_order_keep_their_results():
    results = queue.Queue()
    for token in ("second", "third", "first"):
        results.put((token, [token]))
    assert megatron._result_of("first", results) == ["first"]
    assert megatron._result_of("second", results) == ["second"]
    results.put(("fourth", "OSError: the disk is full"))
    assert megatron._result_of("third", results) == ["third"]
    with pytest.raises(RuntimeError, match="OSError: the disk is full"):
        megatron._result_of("fourth", results)
    with pytest.raises(RuntimeError, match="has ended without a result"):
        megatron._result_of("fourth", results)


def test_files_of_a_replaced_checkpoint_are_removed_with_a_hint_in_their_names(one_process, tmp_path):
    for _ in range(2):
        script.save(tmp_path / "a", 5, megatron.GDSSaveStrategy(separation_hint="weights"))
    written = {path.name for path in (tmp_path / "a").glob("*.distcp")}
    named = {info.relative_path for info in GDSStorageReader(tmp_path / "a").read_metadata().storage_data.values()}
    assert written == named


@pytest.mark.slow
def test_a_killed_writer_is_an_error_on_all_ranks_and_nothing_is_complete(of_two):
    for found in of_two[1]:
        assert "CheckpointException ranks:dict_keys([1])" in found["error of a killed one"]
        assert "has ended without a result" in found["error of a killed one"]
        assert found["names of killed"] == []


@pytest.mark.slow
def test_other_numbers_of_ranks_load_what_two_have_saved(of_two, one_process):
    ran(3, of_two[0], "other")
    script.other(of_two[0])


# --- data -------------------------------------------------------------------------------------------------------------


class Tokenizer:
    eod, vocab_size, unique_identifiers = 0, 1000, {}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """Return the prefix of a pair of 60 documents, some of them empty."""
    prefix = str(tmp_path_factory.mktemp("pair") / "text")
    lengths = np.random.default_rng(1).integers(0, 40, 60)
    builder = indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in lengths:
        builder.add_document(torch.randint(1, 1000, (int(length),)), [int(length)])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.fixture
def installed():
    """Install gdsdata's reader for a test."""
    its, objects, copy = (
        indexed_dataset._FileBinReader,
        dict(indexed_dataset.OBJECT_STORAGE_BIN_READERS),
        indexed_dataset.cache_index_file,
    )
    megatron_data.install_bin_reader()
    yield
    indexed_dataset._FileBinReader, indexed_dataset.cache_index_file = its, copy
    indexed_dataset.OBJECT_STORAGE_BIN_READERS.update(objects)


def test_a_version_without_the_reader_is_refused(monkeypatch):
    monkeypatch.delattr(indexed_dataset, "_FileBinReader")
    with pytest.raises(RuntimeError, match="has no _FileBinReader .* tests ran with megatron-core 0.19"):
        megatron_data.install_bin_reader()


def samples_of(prefix, cache, **options):
    """Return the samples of a GPT data set, and the reader that it has."""
    config = GPTDatasetConfig(
        random_seed=3,
        sequence_length=16,
        blend=([prefix], None),
        split="9,1,0",
        path_to_cache=str(cache),
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        **options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, (100, 10, 0), lambda: True, config).build()
    samples = [one["tokens"].tolist() + one["labels"].tolist() for part in (train, valid) for one in part]
    return samples, type(train.dataset.bin_reader)


def test_windows_of_a_gpt_data_set_are_those_of_the_stock_reader(prefix, tmp_path, installed):
    stock, kind = samples_of(prefix, tmp_path / "a", mmap_bin_files=True)
    assert kind is indexed_dataset._MMapBinReader and len(stock) > 110
    assert samples_of(prefix, tmp_path / "b", mmap_bin_files=False) == (stock, megatron_data.GDSBinReader)


def test_windows_of_objects_are_those_of_files(prefix, tmp_path, installed, monkeypatch):
    stock, _ = samples_of(prefix, tmp_path / "a", mmap_bin_files=True)
    with serving(monkeypatch) as server:
        server.put_folder(Path(prefix).parent, "data/")
        cache = tmp_path / "indices"
        options = dict(mmap_bin_files=False, object_storage_cache_path=str(cache))
        assert samples_of(server.url("data/text"), tmp_path / "b", **options) == (stock, megatron_data.GDSBinReader)
        assert [one.name for one in (cache / "bucket" / "data").iterdir()] == ["text.idx"]
        assert len([one for one in server.requests if one[1] == "data/text.bin"]) <= 2  # it is smaller than 256 KiB


def pair_of(prefix, **options):
    return indexed_dataset.IndexedDataset(prefix, mmap=False, **options)


def test_sequences_parts_and_slices_are_those_of_the_stock_reader(prefix, installed):
    stock, ours = indexed_dataset.IndexedDataset(prefix), pair_of(prefix)
    assert type(ours.bin_reader) is megatron_data.GDSBinReader
    assert 0 in stock.sequence_lengths
    for i, length in enumerate(stock.sequence_lengths.tolist()):
        assert ours[i].dtype == stock[i].dtype and np.array_equal(ours[i], stock[i])
        assert np.array_equal(ours.get(i, length // 2), stock.get(i, length // 2))
    for found, expected in zip(ours[3:9], stock[3:9], strict=True):
        assert np.array_equal(found, expected)


def first_of(ours, results):
    results.put(ours[1].tolist())


def test_a_forked_worker_reads_on(prefix, installed):
    ours = pair_of(prefix)
    expected = ours[1].tolist()
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks beside threads
        worker = context.Process(target=first_of, args=(ours, results))
        worker.start()
    assert results.get() == expected
    worker.join()


def test_a_file_that_is_too_short_is_an_error(prefix, tmp_path, installed):
    for suffix in (".idx", ".bin"):
        (tmp_path / f"a{suffix}").write_bytes(Path(prefix + suffix).read_bytes())
    (tmp_path / "a.bin").write_bytes(Path(prefix + ".bin").read_bytes()[:-2])
    ours = pair_of(str(tmp_path / "a"))
    last = max(i for i, length in enumerate(ours.sequence_lengths) if length)
    with pytest.raises(CorruptData, match="a.bin' has .* do not belong together") as caught:
        ours[last]
    assert caught.value.path == str(tmp_path / "a.bin")


def test_an_object_that_is_not_there_is_an_error(tmp_path, installed, monkeypatch):
    with serving(monkeypatch) as server, pytest.raises(FileNotFoundError):
        pair_of(server.url("none"), object_storage_config=ObjectStorageConfig(str(tmp_path)))
    assert list(tmp_path.rglob("*.tmp")) == []
