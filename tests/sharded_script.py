"""Models that FSDP2 shards over the ranks, in Lightning and in accelerate, under `torch_hooks`.

    torchrun --standalone --nproc-per-node=2 tests/sharded_script.py FOLDER [FRAMEWORK ...]

Each rank writes FOLDER/sharded-R.json. For each framework it has what the rank saw in an
uninterrupted run, in one with a stop in the middle of the second epoch, and from there on. It also
has the hooks' reports of the last two: which calls gdsdata served, and which it left to torch.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
from integrations_script import EPOCHS, ON_GPU, lightning_fit, read
from torch.distributed.fsdp import FSDPModule, fully_shard

import gdsdata

STOP_AFTER = 19  # batches: 13 an epoch


class Model(torch.nn.Module):
    """A regression. Its `seen` has the numbers and the loss of each batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        self.seen = []

    def forward(self, values):
        loss = (self.layers(values / 100) - values % 7).square().mean()
        self.seen.append((values[:, 0].int().tolist(), loss.item()))
        return loss


def with_lightning(folder, place, stops=False, resumes=False):
    import lightning.pytorch as lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def configure_model(self):
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch, _):
            return self.model(batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 0.01)

    strategy = ModelParallelStrategy(data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1)
    return lightning_fit(Module(), folder, place, STOP_AFTER if stops else None, resumes, strategy=strategy)


def with_accelerate(folder, place, stops=False, resumes=False):
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState

    from gdsdata.integrations import accelerate

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=not ON_GPU, fsdp_plugin=plugin)
    if not ON_GPU:
        # AcceleratorState.__init__ does this for ranks on GPUs. On a CPU it ignores the plug-in.
        accelerator.state.fsdp_plugin = plugin
        PartialState._shared_state["distributed_type"] = accelerator.state.distributed_type = DistributedType.FSDP
    plain = Model()
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), 0.01))
    assert model is plain and isinstance(model, FSDPModule)
    data = accelerate.prepare(accelerator, read(folder))
    if resumes:
        accelerator.load_state(place)
    for _ in range(data.state_dict()["epoch"], EPOCHS):
        for batch in data:
            accelerator.backward(model(batch))
            optimizer.step()
            optimizer.zero_grad()
            if stops and len(plain.seen) == STOP_AFTER:
                accelerator.save_state(place)
                return plain.seen
    return plain.seen


TRAINERS = {"lightning": with_lightning, "accelerate": with_accelerate}


def calls_of(report):
    """Return calls and bytes of what gdsdata served, and the reasons for what torch did."""
    served = {call: [one.calls, one.bytes] for call, one in report.served.items()}
    return {"served": served, "left": [[one.call, one.reason] for one in report.left_to_torch]}


def runs_of(framework, folder, place):
    train = TRAINERS[framework]
    found = {"whole": train(folder, place / "whole")}
    with gdsdata.torch_hooks() as hooks:
        found["stopped"] = train(folder, place / "stopped", stops=True)
    found["saves"] = calls_of(hooks.report())
    with gdsdata.torch_hooks() as hooks:
        found["resumed"] = train(folder, place / "stopped", resumes=True)
    found["loads"] = calls_of(hooks.report())
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # workers, loggers and a missing validation
    folder = Path(sys.argv[1])
    results = {name: runs_of(name, folder, folder / name) for name in sys.argv[2:] or TRAINERS}
    (folder / f"sharded-{os.environ['RANK']}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()
