"""`iterate_weights`, which the loaders of vLLM and SGLang read models with."""

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import MIB, drop_cache
from object_server import serving
from test_dcp import on_ranks
from test_read_once import error_of
from torch.multiprocessing.reductions import StorageWeakRef

from gdsdata import EngineOptions, _engine
from gdsdata.checkpoint import tensor_reader
from gdsdata.checkpoint.open_object import OpenObject
from gdsdata.checkpoint.safetensors.weights import INDEX_NAME, find_weights, iterate_weights, open_weights
from gdsdata.checkpoint.tensor_reader import TensorReader
from gdsdata.errors import CorruptData
from gdsdata.integrations.served_weights import Settings, device_of, served_weights, settings_of

safetensors = pytest.importorskip("safetensors.torch")

CPU = torch.device("cpu")
DIRECT = EngineOptions(direct="always")


def save_model(folder, layers=6, elements=50_000, shards=12):
    """Write layers to shards, and return the tensors in the order of safetensors."""
    torch.manual_seed(3)
    state = {}
    for layer in range(layers):
        state[f"layers.{layer}.weight"] = torch.randn(elements + layer)
        state[f"layers.{layer}.scale"] = torch.randn(3, 5).to(torch.bfloat16)
    state["embed"] = torch.arange(2 * elements).view(2, elements)
    state["empty"] = torch.empty(0, 4)
    names = list(state)
    shards = min(shards, len(names))
    of_shard = {number: names[number::shards] for number in range(shards)}
    of_tensor = {}
    for number, its in of_shard.items():
        file = f"model-{number + 1}-of-{shards}.safetensors"
        safetensors.save_file({name: state[name] for name in its}, folder / file)
        of_tensor |= dict.fromkeys(its, file)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": of_tensor}))
    (folder / "consolidated.safetensors").write_bytes(b"not of the index")
    return {name: state[name] for number in of_shard for name in sorted(of_shard[number])}


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def opened(folder):
    files, index = find_weights(str(folder))
    return open_weights(files, index)


def assert_same(found, expected):
    found = list(found)
    assert [name for name, _ in found] == list(expected)
    for name, tensor in found:
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("batch_bytes", [1, 300_000, 1 << 30])
def test_all_tensors_come_in_the_order_of_safetensors(folder, batch_bytes):
    expected = save_model(folder)
    assert_same(iterate_weights(opened(folder), CPU, batch_bytes=batch_bytes), expected)


def test_shards_come_by_number_without_an_index_too(folder):
    expected = save_model(folder)
    (folder / INDEX_NAME).unlink()
    (folder / "consolidated.safetensors").unlink()
    assert_same(iterate_weights(opened(folder), CPU), expected)


def bytes_asked_for(monkeypatch):
    """Return a list of the sizes of all reads, which grows."""
    sizes, read = [], TensorReader._read

    def noted(reader, shared, before, extents):
        sizes.extend(extents.sizes_bytes)
        return read(reader, shared, before, extents)

    monkeypatch.setattr(TensorReader, "_read", noted)
    return sizes


def test_tensors_that_are_not_wanted_are_not_read(folder, monkeypatch):
    expected, sizes = save_model(folder), bytes_asked_for(monkeypatch)
    found = iterate_weights(opened(folder), CPU, batch_bytes=300_000, wants=lambda name: "layers.1" in name)
    assert_same(found, {name: tensor for name, tensor in expected.items() if "layers.1" in name})
    assert sum(sizes) == sum(tensor.nbytes for name, tensor in expected.items() if "layers.1" in name)
    sizes.clear()
    assert list(iterate_weights(opened(folder), CPU, wants=lambda name: False)) == [] and not sizes


def test_a_name_in_two_files_comes_twice(folder):
    for number in range(2):
        safetensors.save_file({"a": torch.full((3,), number)}, folder / f"{number}.safetensors")
    found = list(iterate_weights(opened(folder), CPU))
    assert [(name, tensor.tolist()) for name, tensor in found] == [("a", [0, 0, 0]), ("a", [1, 1, 1])]


def test_tensors_that_the_caller_holds_keep_their_values(folder):
    """Models hold what they get, so its memory is not used again."""
    expected = save_model(folder)
    held = dict(iterate_weights(opened(folder), CPU, batch_bytes=250_000))
    storages = {tensor.untyped_storage().data_ptr() for tensor in held.values() if tensor.numel()}
    assert len(storages) == sum(tensor.numel() > 0 for tensor in held.values())
    assert_same(held.items(), expected)


def live_bytes(monkeypatch):
    """Return a function that counts the bytes of memory that somebody still holds."""
    made, make = [], tensor_reader.new_tensor

    def noted(*arguments):
        tensor = make(*arguments)
        made.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))
        return tensor

    monkeypatch.setattr(tensor_reader, "new_tensor", noted)
    return lambda: sum(size_bytes for storage, size_bytes in made if not storage.expired())


def test_at_most_three_batches_are_in_memory(folder, monkeypatch):
    expected = save_model(folder, layers=40, elements=50_000, shards=3)
    live, most = live_bytes(monkeypatch), []
    for _, tensor in iterate_weights(opened(folder), CPU, batch_bytes=MIB):
        most.append(live() - tensor.nbytes)
    assert len(most) == len(expected) and 1.5 * MIB < max(most) <= 3 * MIB
    assert most[-1] == 0


def test_a_loop_that_ends_early_leaves_no_reads(folder):
    save_model(folder)
    weights = iterate_weights(opened(folder), CPU, batch_bytes=1)
    next(weights)
    weights.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("gdsdata-read")]


@pytest.mark.gpu
def test_tensors_come_on_the_gpu(folder):
    expected = save_model(folder)
    found = list(iterate_weights(opened(folder), torch.device("cuda", 0), batch_bytes=300_000))
    assert all(tensor.device == torch.device("cuda", 0) for _, tensor in found)
    assert_same([(name, tensor.cpu()) for name, tensor in found], expected)


# ------------------------------------------------------------------------------------------------ errors


def changed_shard(folder, name="model-2-of-12.safetensors"):
    return folder / name


def test_a_missing_shard_is_named_before_anything_is_read(folder):
    save_model(folder)
    changed_shard(folder).unlink()
    files = [str(path) for path in folder.glob("model-*.safetensors")]
    for call in (lambda: opened(folder), lambda: served_weights(files, str(folder), CPU)):
        with pytest.raises(FileNotFoundError, match=r"a shard is missing: .*model-2-of-12.*Fetch that"):
            call()


def test_a_name_that_no_shard_has_is_an_error(folder):
    save_model(folder)
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"]["lost.weight"] = "model-3-of-12.safetensors"
    (folder / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(
        CorruptData, match=r"model-3-of-12.safetensors' has no tensor 'lost.weight', which .*index.json"
    ):
        opened(folder)


def test_a_damaged_header_is_an_error(folder):
    save_model(folder)
    damaged = bytearray(changed_shard(folder).read_bytes())
    damaged[20] ^= 0xFF
    changed_shard(folder).write_bytes(damaged)
    with pytest.raises(CorruptData, match="model-2-of-12"):
        opened(folder)


def test_a_shard_that_is_cut_after_it_was_opened_is_an_error(folder):
    save_model(folder)
    weights = opened(folder)
    os.truncate(changed_shard(folder), 1000)
    with pytest.raises(CorruptData, match=r"model-2-of-12.safetensors' was changed"):
        list(iterate_weights(weights, CPU))


def test_a_folder_without_weights_is_an_error(folder):
    for place in (folder, f"file://{folder}"):
        with pytest.raises(FileNotFoundError, match="no safetensors files: give the folder of a model's weights"):
            find_weights(str(place))
    save_model(folder)
    with pytest.raises(FileNotFoundError, match=r"has no safetensors files that fit \['other-\*'\]"):
        find_weights(str(folder), ["other-*"])


@pytest.mark.parametrize("patterns", [None, ["*.safetensors"]])
def test_a_name_in_two_files_of_a_folder_without_an_index_is_an_error(folder, patterns):
    for name in ("model", "model.fp16"):
        safetensors.save_file({"a": torch.ones(3), f"of {name}": torch.ones(3)}, folder / f"{name}.safetensors")
    with pytest.raises(CorruptData, match=r"model.fp16.safetensors' and '.*model.safetensors' both have .*'a'"):
        served_weights([], str(folder), CPU, patterns=patterns)
    chosen = served_weights([], str(folder), CPU, patterns=["model.fp16.safetensors"])
    assert [name for name, _ in chosen] == ["a", "of model.fp16"]
    both = [str(folder / f"{name}.safetensors") for name in ("model", "model.fp16")]  # as a framework has chosen
    assert len(list(served_weights(both, str(folder), CPU))) == 4


def test_a_shard_that_is_missing_without_an_index_is_an_error(folder):
    expected = save_model(folder, shards=3)
    (folder / INDEX_NAME).unlink()
    (folder / "consolidated.safetensors").unlink()
    assert_same(served_weights([], str(folder), CPU), expected)
    (folder / "model-2-of-3.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has 2 of the 3 files model-.*-of-3.safetensors: fetch the others"):
        served_weights([], str(folder), CPU)
    chosen = dict(served_weights([], str(folder), CPU, patterns=["model-1-of-3.safetensors"]))
    assert chosen and all(torch.equal(tensor, expected[name]) for name, tensor in chosen.items())


def test_an_index_of_other_folders_is_not_compared(folder):
    expected = save_model(folder)
    (folder / "transformer").mkdir()
    for path in folder.glob("model-*"):
        path.rename(folder / "transformer" / path.name)
    files = [str(path) for path in (folder / "transformer").iterdir()]
    assert_same(served_weights(files, str(folder), CPU), expected)


def test_files_of_unused_names_alone_are_left_out(folder):
    expected = save_model(folder, shards=3)
    index = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    (unused,) = {index["embed"]}
    found = list(served_weights([], str(folder), CPU, is_unused=lambda name: index[name] == unused))
    assert [name for name, _ in found] == [name for name in expected if index[name] != unused]
    assert_same(served_weights([], str(folder), CPU, is_unused=lambda name: True), expected)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"other": 1}, "knows 'weights' and 'once'"),
        ({"weights": 3}, "give a string"),
        ("weights", "knows 'weights'"),
        ({"once": "twice"}, "'rank', 'node', 'job'"),
    ],
)
def test_settings_that_are_unknown_are_refused(given, text):
    with pytest.raises(ValueError, match=text):
        settings_of(given)


def test_settings():
    assert settings_of({}) == settings_of(None) == Settings()
    assert settings_of({"weights": "s3://bucket/a/", "once": "job"}) == Settings("s3://bucket/a/", "job")


def test_the_device_is_that_of_the_parameters():
    assert device_of(torch.nn.Linear(2, 2)) == device_of(torch.nn.ReLU()) == CPU
    assert device_of(torch.nn.Linear(2, 2, device="meta")).type == ("cuda" if torch.cuda.is_available() else "cpu")


# ------------------------------------------------------------------------------------------------ objects


@pytest.mark.parametrize("has_index", [True, False])
def test_weights_in_a_store_are_read_in_ranges(folder, monkeypatch, has_index):
    expected = save_model(folder, elements=300_000)
    (folder / "consolidated.safetensors").unlink()
    with serving(monkeypatch) as server:
        server.put_folder(folder, "models/a/")
        if not has_index:
            del server.content[f"models/a/{INDEX_NAME}"]
        server.content["models/a/other/model-1-of-12.safetensors"] = b"of another folder"
        assert_same(served_weights([], server.url("models/a/"), CPU), expected)
        size = sum(len(data) for key, data in server.content.items() if "/other/" not in key)
        read = sum(end - begin for method, _, begin, end in server.requests if method == "GET")
        assert read < 1.3 * size
        some, index = find_weights(server.url("models/a"), ["lost-*", "model-1-*", "*"])
        assert some == [server.url("models/a/model-1-of-12.safetensors")] and index is None
        del server.content["models/a/model-4-of-12.safetensors"]
        with pytest.raises(FileNotFoundError, match="a shard is missing" if has_index else "has 11 of the 12 files"):
            served_weights([], server.url("models/a"), CPU)


# ------------------------------------------------------------------------------------------------ ranks


def _on_ranks(rank, folder):
    def bytes_read():
        (line,) = (one for one in Path("/proc/self/io").read_text().splitlines() if one.startswith("read_bytes"))
        return int(line.split()[1])

    def digests(weights):
        return [(name, tensor.double().sum().item(), tuple(tensor.shape)) for name, tensor in weights]

    def together(folder, **arguments):
        return served_weights([], str(folder), CPU, group=torch.distributed.group.WORLD, **arguments)

    weights = opened(folder)
    list(iterate_weights(weights[:1], CPU, options=DIRECT))  # imports are read from storage too
    list(iterate_weights(weights[:1], CPU, group="auto", options=DIRECT))
    before, found = bytes_read(), {}
    found["all"] = digests(iterate_weights(weights, CPU, group="auto", batch_bytes=3_000_000, options=DIRECT))
    found["read"] = bytes_read() - before
    mine = f"layers.{rank}."  # the experts of a rank
    wants = {"wants": lambda name: not name.startswith("layers.") or name.startswith(mine)}
    found["some"] = digests(iterate_weights(weights, CPU, group="auto", batch_bytes=3_000_000, **wants))
    found["none"] = digests(iterate_weights(weights, CPU, group="auto", wants=lambda name: rank == 1))
    found["missing"] = error_of(lambda: list(together(folder / "lost" if rank else folder)))
    other = weights[: len(weights) // 2] if rank else weights
    found["other"] = error_of(lambda: list(iterate_weights(other, CPU, group="auto")))
    options = EngineOptions(direct="always", faults="seed=1,fail=1") if rank else DIRECT
    found["fails"] = error_of(lambda: list(iterate_weights(weights, CPU, group="auto", options=options)))
    found["after"] = digests(together(f"file://{folder}"))
    found["alone"] = digests(together(folder, once="rank")) if rank == 0 else None
    return found


def test_the_ranks_of_a_group_read_each_byte_once(folder):
    expected = save_model(folder, elements=500_000)
    digests = [(name, tensor.double().sum().item(), tuple(tensor.shape)) for name, tensor in expected.items()]
    (folder / "lost").mkdir()
    has_storage = drop_cache(*folder.glob("model-*.safetensors"))
    ranks = on_ranks(2, _on_ranks, folder)
    for rank, found in enumerate(ranks):
        assert found["all"] == found["after"] == digests
        assert found["some"] == [
            one for one in digests if not one[0].startswith("layers.") or one[0].startswith(f"layers.{rank}.")
        ]
        assert rank == 1 or found["alone"] == digests
        assert found["none"] == (digests if rank == 1 else [])
        assert found["missing"][0] == "FileNotFoundError" and "lost" in found["missing"][1]
        assert found["other"][0] == "ValueError" and "make different calls" in found["other"][1]
        assert found["fails"][0] == "IoError"
    if has_storage:
        size = sum(path.stat().st_size for path in folder.glob("model-*.safetensors"))
        counts = [found["read"] for found in ranks]
        assert 0.9 * size < sum(counts) < 1.2 * size and max(counts) < 0.7 * size


def _from_a_store(rank, folder, url):
    _engine.configure_http(hedge=False)  # requests are counted
    found = served_weights([], url, CPU, group=torch.distributed.group.WORLD)
    return [(name, tensor.double().sum().item()) for name, tensor in found]


def test_the_ranks_of_a_group_request_each_byte_of_an_object_once(folder, monkeypatch):
    expected = save_model(folder, elements=500_000)
    with serving(monkeypatch) as server:
        server.put_folder(folder, "models/a/")
        for found in on_ranks(2, _from_a_store, folder, f"{server.address}/bucket/models/a"):
            assert found == [(name, tensor.double().sum().item()) for name, tensor in expected.items()]
    for path in folder.glob("model-*.safetensors"):
        size, key = path.stat().st_size, f"models/a/{path.name}"
        asked = [(begin, end) for method, its, begin, end in server.requests if (method, its) == ("GET", key)]
        heads, times = [end for begin, end in asked if begin == 0], np.zeros(size, int)
        assert heads == [min(size, OpenObject.ends_bytes)] * 2  # each rank looks for the names of tensors
        for begin, end in asked:
            times[begin:end] += begin > 0
        of_tensors = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        assert times[of_tensors:].min() == times.max() == 1 and times[:of_tensors].max() == 0, path.name
