"""Checkpoints of DeepSpeed by gdsdata, on two processes of the CPU."""

import importlib.metadata
import itertools
import logging
import os
import pickle
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_dcp import on_ranks
from test_read_once import error_of

import gdsdata
from gdsdata import EngineOptions
from gdsdata.formats import Records

try:
    importlib.metadata.version("deepspeed")  # its import takes seconds
except importlib.metadata.PackageNotFoundError:
    pytest.skip("deepspeed is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

SAMPLES, BATCH = 64, 4
OTHER_STAGES = [0, 1, 3]


def start():
    """Import DeepSpeed in a new process, for the CPU, without building its operators."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank()), "RANK": str(dist.get_rank())}
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size()), "DEEPSPEED_LOG_LEVEL": "error"}
    logging.disable(logging.WARNING)
    import deepspeed
    import deepspeed.comm

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def engine_of(model, stage=0, **config):
    import deepspeed

    torch.manual_seed(5)
    given = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    model = model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=given | config)
    return engine


def ours(*arguments, **config):
    from gdsdata.integrations import deepspeed as adapter

    return adapter.use(engine_of(*arguments, **config))


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(1, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))

    def forward(self, values):
        return (self.layers(values / SAMPLES) - values % 7).square().mean()


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.first = torch.nn.Linear(1, 8)
        self.experts = MoE(8, torch.nn.Linear(8, 8), num_experts=2, ep_size=dist.get_world_size(), k=1)
        self.last = torch.nn.Linear(8, 1)

    def forward(self, values):
        found, balance, _ = self.experts(self.first(values / SAMPLES))
        return (self.last(found) - values % 7).square().mean() + 0.01 * balance


def data_of(folder):
    return gdsdata.GDSDataset(folder / "data.bin", BATCH, Records("f4", (1,)), seed=1, device="cpu")


def train(engine, batches, steps):
    losses = []
    for batch in itertools.islice(batches, steps):
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def stopped_and_resumed(place, folder, first, second, model=Plain, stage=0, **config):
    """Return the losses after a checkpoint, of the engine that saved it and a new one."""
    engine, data = first(model, stage, **config), data_of(folder)
    batches = iter(data)
    train(engine, batches, 3)
    engine.save_checkpoint(str(place), client_state={"data": data.state_dict()})
    expected = train(engine, batches, 3)
    again, data = second(model, stage, **config), data_of(folder)
    loaded, client_state = again.load_checkpoint(str(place))
    assert loaded is not None
    data.load_state_dict(client_state["data"])
    return expected, train(again, iter(data), 3)


def latest(place):
    return (place / "latest").read_text() if (place / "latest").exists() else None


def _as_rank(rank, folder):
    start()
    found = {}
    for first, second in [(ours, ours), (ours, engine_of), (engine_of, ours)]:
        name = f"{first.__name__} {second.__name__}"
        found[name] = stopped_and_resumed(folder / name, folder, first, second, stage=2)
    found["tool"] = _shapes(folder / "ours ours")
    found["files"] = _files(folder / f"files {rank}")
    found["failed"] = _failed(rank, folder)
    engine = ours(Plain, 2)
    engine.save_16bit_model(str(folder / "half"))
    found["16 bit"] = sorted(torch.load(folder / "half" / "pytorch_model.bin"))
    found["other writer"] = error_of(_with_another_writer)
    found["data"] = error_of(lambda: _with_training_data(folder))
    return found


def _other_ways(rank, folder):
    start()
    found = {}
    for stage in OTHER_STAGES:
        found[stage] = stopped_and_resumed(folder / f"stage {stage}", folder, ours, ours, stage=stage)
    found["experts"] = stopped_and_resumed(folder / "experts", folder, ours, ours, Experts)
    if dist.get_world_size() == 2:
        found["pipeline"] = _pipeline(folder)
    return found


def _pipeline(folder):
    from deepspeed.pipe import PipelineModule

    def model():
        layers = [torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)]
        return PipelineModule(layers, 2, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform")

    def start(engine):
        ranks = gdsdata.Sharding(engine.mpu.get_data_parallel_rank(), engine.mpu.get_data_parallel_world_size())
        pairs = {"sharding": ranks, "transform": lambda values: (values / SAMPLES, values % 7)}
        return gdsdata.GDSDataset(folder / "data.bin", BATCH, Records("f4", (1,)), seed=1, device="cpu", **pairs)

    def train(engine, batches):
        return [engine.train_batch(data_iter=batches).item() for _ in range(3)]

    engine = ours(model, gradient_accumulation_steps=2, gradient_clipping=0.0)
    data = start(engine)
    batches = iter(data)
    train(engine, batches)
    engine.save_checkpoint(str(folder / "pipeline"), client_state={"data": data.state_dict()})
    expected = train(engine, batches)
    again = ours(model, gradient_accumulation_steps=2, gradient_clipping=0.0)
    data = start(again)
    data.load_state_dict(again.load_checkpoint(str(folder / "pipeline"))[1]["data"])
    return expected, train(again, iter(data))


def _files(place):
    """List the files after a commit that failed because one of them cannot be pickled."""
    from gdsdata.integrations.deepspeed import GDSCheckpointEngine

    engine, info = GDSCheckpointEngine(), types.SimpleNamespace(tag="a", save_dir=str(place), save_latest=True)
    engine.create(info)
    engine.makedirs(str(place / "a" / "b"), exist_ok=True)
    with pytest.raises(FileExistsError):
        engine.makedirs(str(place / "a"))
    engine.save({"x": torch.arange(3)}, str(place / "a" / "x.pt"))
    assert engine.commit(info)
    for map_location in (None, "cpu", torch.device("cpu"), lambda storage, location: storage):
        assert engine.load(str(place / "a" / "x.pt"), map_location)["x"].tolist() == [0, 1, 2]
    engine.save({"x": lambda: None}, str(place / "a" / "y.pt"))
    engine.save({"x": torch.arange(3)}, str(place / "a" / "z.pt"))
    with pytest.raises((AttributeError, pickle.PicklingError)):
        engine.commit(info)
    engine.create(info)
    assert engine.commit(info) and engine.preserves_storage_sharing() and not engine.is_decoupled()
    return sorted(os.listdir(place / "a"))


def _shapes(place):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    state = get_fp32_state_dict_from_zero_checkpoint(str(place))
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _failed(rank, folder):
    """Save twice. The second save fails on rank 1 alone, and a third one is whole."""
    from gdsdata.integrations import deepspeed as adapter

    engine, place = engine_of(Plain, 2), folder / "failed"
    adapter.use(engine)
    engine.save_checkpoint(str(place), tag="first")
    if rank == 1:
        adapter.use(engine, EngineOptions(faults="seed=1,fail=1"))
    error = error_of(lambda: engine.save_checkpoint(str(place), tag="second"))
    before = latest(place)
    adapter.use(engine)
    dist.barrier()
    engine.save_checkpoint(str(place), tag="third")
    return {"error": error, "latest": (before, latest(place)), "files": sorted(os.listdir(place / "second"))}


def _with_another_writer():
    from gdsdata.integrations import deepspeed as adapter

    engine = engine_of(Plain)
    engine.checkpoint_engine = type("FastCheckpointEngine", (), {})()
    adapter.use(engine)


def _with_training_data(folder):
    import deepspeed

    model = Plain()
    *_, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=data_of(folder),
        config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"torch_adam": True}}},
    )
    next(iter(loader))


@pytest.fixture
def folder(tmp_path):
    np.arange(SAMPLES, dtype=np.float32).tofile(tmp_path / "data.bin")
    return tmp_path


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed")
    np.arange(SAMPLES, dtype=np.float32).tofile(folder / "data.bin")
    return folder, on_ranks(2, _as_rank, folder)


@pytest.mark.parametrize("name", ["ours ours", "ours engine_of", "engine_of ours"])
def test_a_run_continues_if_either_engine_writes_or_reads_its_files(ranks, name):
    for found in ranks[1]:
        expected, resumed = found[name]
        assert expected == resumed and len(expected) == 3


@pytest.mark.parametrize("count", [1, 2])
def test_every_stage_experts_and_a_pipeline_go_on_with_the_same_losses(folder, count):
    for found in on_ranks(count, _other_ways, folder):
        for name, (expected, resumed) in found.items():
            assert expected == resumed and len(expected) == 3, name


def test_a_save_that_fails_on_one_rank_is_committed_on_none(ranks):
    for found in ranks[1]:
        kind, _, notes, seconds = found["failed"]["error"]
        assert kind == "IoError" and seconds < 60
        assert notes == ["on rank 1 of 2 that read together"]
        assert found["failed"]["latest"] == ("first", "third")
        assert "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt" not in found["failed"]["files"]


def test_a_model_alone_is_saved(ranks):
    for found in ranks[1]:
        assert found["16 bit"] == ["layers.0.bias", "layers.0.weight", "layers.2.bias", "layers.2.weight"]


def test_deepspeeds_own_tool_reads_a_checkpoint(ranks):
    shapes = {name: tuple(tensor.shape) for name, tensor in Plain().state_dict().items()}
    assert [found["tool"] for found in ranks[1]] == [shapes, shapes]


def test_another_writer_is_refused(ranks):
    for found in ranks[1]:
        kind, text, *_ = found["other writer"]
        assert kind == "ValueError" and "chose FastCheckpointEngine" in text


def test_training_data_is_refused_by_deepspeed(ranks):
    """The guide says so, and to iterate over the data set instead."""
    for found in ranks[1]:
        assert found["data"][0] == "ValueError" and "IterableDataset" in found["data"][1]


def test_a_file_that_cannot_be_written_ends_the_save_of_a_rank(ranks):
    assert [found["files"] for found in ranks[1]] == [["b", "x.pt"]] * 2
