"""Train a sharded model (FSDP2), kill a rank, and resume on fewer ranks with the same batches.

    torchrun --nproc-per-node=2 examples/train_fsdp.py                # some seconds on 2 cores
    torchrun --nproc-per-node=2 examples/train_fsdp.py --folder new --kill-at 30  # as by kill -9
    torchrun --nproc-per-node=1 examples/train_fsdp.py --folder new   # one rank resumes

With --replicas=2, each half of the ranks has all of the model (HSDP). Resuming, one replica reads
each part of the checkpoint, and sends it to the other.

The ranks use nccl on GPUs, and gloo elsewhere. --kill-at ends the last rank. If a folder's
checkpoint has all of --steps, nothing is trained: raise --steps, or use another folder.

With --max-restarts=1 torchrun starts the ranks again by itself. In that case set
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. Without it, new ranks of torch 2.15 found the addresses of the
ranks that had ended, and gave up.

Each step prints its loss and a checksum of the bytes that all ranks together trained on. Step n
prints the same bytes for any number of ranks and any interruption. Its loss differs by rounding
only. A small transformer learns which byte comes next in the Python standard library.
tests/test_examples.py runs this example.
"""

import argparse
import os
import signal
import sysconfig
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gdsdata

cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdsdata"
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=60, help="steps in all, those before a restart included")
parser.add_argument("--save-every", type=int, default=20, help="steps from one checkpoint to the next")
parser.add_argument("--kill-at", type=int, help="end the last rank after this step, unless torchrun restarted it")
parser.add_argument("--global-batch", type=int, default=32, help="samples in a step of all ranks together")
parser.add_argument("--replicas", type=int, default=1, help="copies of the model, each on as many ranks")
parser.add_argument("--folder", type=Path, default=cache / "train_fsdp", help="folder that all ranks share")
args = parser.parse_args()
if args.save_every < 1:
    parser.error("--save-every must be 1 or more")
if "RANK" not in os.environ:
    parser.error("start it with torchrun --nproc-per-node=N examples/train_fsdp.py")

on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one each, or all ranks use the CPU
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
if args.global_batch % ranks or ranks % args.replicas:
    parser.error(f"--global-batch must be a multiple of the {ranks} ranks, and these of --replicas")
mesh = init_device_mesh(device.type, (args.replicas, ranks // args.replicas), mesh_dim_names=("replicate", "shard"))


def say(what: str) -> None:
    if rank == 0:
        print(what, flush=True)


# ---------------------------------------------------------------------------------------------------------------- data

seq_len = 64
dataset = gdsdata.GDSDataset(
    sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")),
    batch_size=args.global_batch // ranks,  # the same global batch gives the same order on any number of ranks
    format=gdsdata.formats.Tokens("uint8", seq_len),
    seed=0,
    device=device,
    drop_last=True,  # an epoch's last, smaller step would depend on the number of ranks
    sharding=gdsdata.Sharding(device_mesh=mesh, dp_dim=("replicate", "shard")),  # each rank has other samples
)

# --------------------------------------------------------------------------------------------------------------- model


class Transformer(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(seq_len, width)
        # No dropout: its random numbers would depend on which rank has which sample.
        layer = dict(nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, **layer) for _ in range(layers))
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(seq_len), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.bytes(inputs) + self.positions(torch.arange(seq_len, device=inputs.device))
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.head(x)


torch.manual_seed(0)  # all ranks make the same weights, and each keeps its part
model = Transformer().to(device)
for part in (*model.layers, model):
    fully_shard(part, mesh=mesh if args.replicas > 1 else mesh["shard"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# ---------------------------------------------------------------------------------------------------------- checkpoint


def state(step: int) -> dict:
    of_model, of_optimizer = get_state_dict(model, optimizer)  # this rank's parts
    return {"model": of_model, "optimizer": of_optimizer, "dataset": dataset, "step": step}  # dataset: its place


# torch warns that it overwrites a checkpoint. Here the old one stays until the new one is complete.
warnings.filterwarnings("ignore", "Detected an existing checkpoint")
step = 0
if (args.folder / ".metadata").exists():  # it is written last: without it there is no checkpoint
    found, reader = state(step), gdsdata.GDSStorageReader(args.folder)  # any number of ranks may have saved it
    dcp.load(found, storage_reader=reader, planner=gdsdata.GDSLoadPlanner(read_once=True))
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    step = found["step"]
say(f"from step {step} on {ranks} ranks, {device.type}, {args.global_batch} samples a step")

# ---------------------------------------------------------------------------------------------------------------- loop

powers = torch.tensor([pow(31, i, 2**31) for i in range(seq_len + 1)], device=device)
while step < args.steps:
    for batch in dataset:  # this rank's share: int64 (B, seq_len + 1)
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        mean, number = loss.detach() / ranks, (batch * powers).sum()
        dist.all_reduce(mean)
        dist.all_reduce(number)
        say(f"step {step}: loss {mean.item():.9g} of bytes {number.item() % 2**32:08x}")
        if step % args.save_every == 0 or step == args.steps:
            dcp.save(state(step), storage_writer=gdsdata.GDSStorageWriter(args.folder))
        if step == args.kill_at and rank == ranks - 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == args.steps:
            break
say(f"rank 0 read {sum(dataset.stats()['bytes'].values()):,} bytes: {dataset.report()}")
dist.destroy_process_group()
