"""The programs of docs/guide/loops.md after a stop, and with the frameworks that they name."""

import contextlib
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from test_docs import ROOT, blocks

import gdsdata

PAGE = ROOT / "docs" / "guide" / "loops.md"
TOKENS = gdsdata.formats.Tokens("uint16", seq_len=1024)
SAMPLES, BATCHES = 130, 17  # 17 batches of 8 of all samples; 15 of those for training


def program(words: str, page: Path = PAGE) -> str:
    """Return the program of a page that has these words."""
    (found,) = [code for _, code in blocks(page, "python") if words in code]
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.arange(SAMPLES * 1024 + 1, dtype=np.uint16).tofile("train.bin")
    return tmp_path


def known(**more):
    return {"gdsdata": gdsdata, "torch": torch, "tokens": TOKENS, "__name__": "page", **more}


# --- the plain loop ---------------------------------------------------------------------------------------------------


class Stopped(Exception):
    pass


def trained_by_the_plain_loop() -> list[list[float]]:
    """Run the page's loop with dropout. Return the model's parameters, and the best validation."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))
    names = known(model=model, optimizer=torch.optim.Adam(model.parameters(), 0.01))
    exec(compile(program("import itertools"), str(PAGE), "exec"), names)
    assert names["counters"]["updates"] == 8  # 4, 4, 4 and 3 batches, twice
    return [one.flatten().tolist() for one in model.parameters()] + [[names["counters"]["best"]]]


@pytest.mark.parametrize("stop_at", [3, 6])
def test_the_plain_loop_stopped_after_a_save_ends_with_the_same_model(folder, monkeypatch, stop_at):
    expected = trained_by_the_plain_loop()
    (folder / "runs").rename(folder / "whole")
    save = gdsdata.AsyncCheckpointer.save

    def stopping(self, step, state):
        save(self, step, state).result()
        if step == stop_at:
            self.close()
            raise Stopped

    with monkeypatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(gdsdata.AsyncCheckpointer, "save", stopping)
        trained_by_the_plain_loop()
    assert trained_by_the_plain_loop() == expected


# --- torchdata --------------------------------------------------------------------------------------------------------


def numbers(loader, count: int = 1000) -> list[list[int]]:
    """Return what a loader yields: the first token of each sample."""
    batches = iter(loader)
    found: list[list[int]] = []
    with contextlib.suppress(StopIteration):
        while len(found) < count:
            found.append(next(batches)[:, 0].tolist())
    return found


@pytest.mark.parametrize("kind", ["alone", "mapped by threads", "prefetched"])
def test_nodes_of_torchdata_resume_with_the_next_batch_and_epoch(folder, kind):
    nodes = pytest.importorskip("torchdata.nodes", reason="torchdata is not installed")

    def pipeline():
        node = nodes.IterableWrapper(gdsdata.GDSDataset("train.bin", 8, TOKENS, device="cpu"))
        if kind == "mapped by threads":
            node = nodes.ParallelMapper(node, lambda batch: batch, num_workers=2, method="thread")
        return nodes.Loader(nodes.Prefetcher(node, 3) if kind == "prefetched" else node)

    whole = pipeline()
    first, second = numbers(whole), numbers(whole)
    assert len(first) == len(second) == BATCHES and first != second
    for taken in (0, 5, BATCHES, 1000):
        loader = pipeline()
        numbers(loader, taken)
        resumed = pipeline()
        resumed.load_state_dict(loader.state_dict())
        assert numbers(resumed) == (first[taken:] or second)


def test_nodes_of_torchdata_draw_from_data_sets_and_resume(folder):
    nodes = pytest.importorskip("torchdata.nodes", reason="torchdata is not installed")

    def pipeline():
        sources = {
            name: nodes.IterableWrapper(gdsdata.GDSDataset("train.bin", 8, TOKENS, device="cpu", split=part))
            for name, part in {"a": (0, 0.5), "b": (0.5, 1)}.items()
        }
        return nodes.Loader(nodes.MultiNodeWeightedSampler(sources, {"a": 0.7, "b": 0.3}, seed=1))

    whole, loader, resumed = numbers(pipeline()), pipeline(), pipeline()
    numbers(loader, 7)
    resumed.load_state_dict(loader.state_dict())
    assert numbers(resumed) == whole[7:]


# --- Ray Train --------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # it starts Ray, and its workers twice
@pytest.mark.timeout(400)
def test_workers_of_ray_go_on_after_one_has_died(folder, monkeypatch):
    ray = pytest.importorskip("ray", reason="ray is not installed")
    pytest.importorskip("ray.train", reason="ray[train] is not installed")
    code = program("TorchTrainer").replace("/data", str(folder)).replace("/checkpoints", str(folder / "checkpoints"))
    died = folder / "died"
    stop = f"if step == 12 and ray.train.get_context().get_world_rank() == 1 and not Path('{died}').exists():"
    line = "                step += 1\n"
    assert line in code
    indent = "\n" + " " * 16
    code = code.replace(line, f"{line}{indent}{stop}{indent}    Path('{died}').touch(); ckpt.wait(); os._exit(1)\n")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        exec(compile("import os\n" + code, str(PAGE), "exec"), known(Path=Path))
    finally:
        ray.shutdown()
    assert died.exists()
    checkpointer = gdsdata.AsyncCheckpointer(folder / "checkpoints" / "a")
    assert checkpointer.steps() == [10, 15, 20]


KEPT_BY_RAY = """
import os, tempfile, ray.train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_on_each_worker(config):
    rank, step = ray.train.get_context().get_world_rank(), 0
    dataset = gdsdata.GDSDataset(config["folder"] + "/train.bin", 8, tokens, device="cpu")
    if resumed := ray.train.get_checkpoint():
        with resumed.as_directory() as folder:
            found = gdsdata.load(folder + "/state.pt")
        dataset.load_state_dict(found["data"])
        step = found["step"]
    for batch in dataset:
        step += 1
        with open(config["folder"] + f"/seen-{rank}", "a") as file:
            print(step, *batch[:, 0].tolist(), file=file)
        if step == 4 and rank == 1 and not resumed:
            os._exit(1)
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                gdsdata.save({"data": dataset.state_dict(), "step": step}, folder + "/state.pt")
            ray.train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


trainer = TorchTrainer(
    train_on_each_worker,
    train_loop_config={"folder": os.getcwd()},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=os.getcwd() + "/kept", failure_config=FailureConfig(max_failures=3)),
)
trainer.fit()
"""


@pytest.mark.slow  # as above
@pytest.mark.timeout(400)
def test_a_checkpoint_that_ray_keeps_resumes_the_data_of_all_workers(folder):
    ray = pytest.importorskip("ray", reason="ray is not installed")
    pytest.importorskip("ray.train", reason="ray[train] is not installed")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        exec(compile(KEPT_BY_RAY, "kept_by_ray", "exec"), known())
    finally:
        ray.shutdown()
    seen = []
    for rank in range(2):
        steps = [line.split() for line in (folder / f"seen-{rank}").read_text().splitlines()]
        assert [int(step) for step, *_ in steps][-1] == 9 and len(steps) > 9, "no worker was started again"
        by_step = {}
        for step, *batch in steps:  # one that was not kept is seen again, and is the same
            assert by_step.setdefault(step, batch) == batch
        assert list(by_step) == [str(step) for step in range(1, 10)]
        seen.append([int(number) for batch in by_step.values() for number in batch])
    whole = [np.arange(SAMPLES * 1024, dtype=np.uint16)[::1024].tolist()]
    assert sorted(sum(seen, [])) == sorted(sum(whole, []))


# --- Composer ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # Composer warns of a small last batch
def test_the_program_with_composer_trains_saves_and_resumes(folder):
    composer = pytest.importorskip("composer", reason="mosaicml (Composer) is not installed")

    class Model(composer.ComposerModel):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, batch):
            return self.layer(batch[:, :4] / 65536)

        def loss(self, outputs, batch):
            return outputs.square().mean()

    code = program("composer import Loader")
    weights = []
    for epochs in ("2ep", "1ep", "2ep"):
        names = known(composer_model=Model())
        exec(compile(code.replace("2ep", epochs), str(PAGE), "exec"), names)
        assert names["trainer"].state.timestamp.batch == int(epochs[0]) * BATCHES
        weights.append(names["composer_model"].layer.weight.tolist())
        names["trainer"].close()
        if len(weights) == 1:
            (folder / "runs").rename(folder / "whole")
    assert weights[0] == weights[2] != weights[1]


# --- torchao ----------------------------------------------------------------------------------------------------------


def test_the_program_with_torchao_goes_on_with_its_states(folder):
    pytest.importorskip("torchao.optim", reason="torchao is not installed")
    page = ROOT / "docs" / "guide" / "frameworks.md"
    code = compile(program("torchao.optim", page), str(page), "exec")
    warnings.simplefilter("error", RuntimeWarning)  # pytest resets it
    ended = []
    with torch.compiler.set_stance("force_eager"):
        for seed in (0, 1):
            torch.manual_seed(seed)
            exec(code, names := known())
            states = names["optimizer"].state_dict()["state"]
            ended.append([states[0]["step"].item(), names["model"][0].weight.dequantize().tolist()])
            assert type(states[0]["exp_avg"]).__name__ == "OptimState8bit"
    assert [steps for steps, _ in ended] == [1, 2] and ended[0][1] == ended[1][1]
