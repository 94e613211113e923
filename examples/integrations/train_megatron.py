"""Train on a data set of Megatron-core, with checkpoints in its format, stop, and resume.

    python examples/integrations/train_megatron.py --stop-at 25   # a few seconds on 2 cores
    python examples/integrations/train_megatron.py                # resumes behind step 25
    torchrun --nproc-per-node=2 examples/integrations/train_megatron.py   # the checkpoint fits too

The losses are the same as without the stop, digit for digit. A small network learns which byte
follows 16 others in the Python standard library. With several processes each has a part of the
layers' rows in the checkpoint, as a tensor-parallel model has.
tests/test_integration_examples.py runs this example.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.dist_checkpointing import ShardedTensor
from torch import nn

from gdsdata.integrations.megatron import GDSLoadStrategy, GDSSaveStrategy
from gdsdata.integrations.megatron_data import install_bin_reader

FILES = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py"))
SEQ_LEN, BATCH = 16, 512  # tokens, samples of all processes


class Bytes:
    """A token is a byte. A data set wants to know this of a tokenizer."""

    eod, vocab_size, unique_identifiers = 0, 256, {"name": "bytes"}


def dataset_of(folder: Path, samples: int):
    """Return Megatron's data set of the files' bytes, whose .bin file gdsdata reads."""
    if dist.get_rank() == 0 and not (folder / "text.idx").exists():
        builder = IndexedDatasetBuilder(str(folder / "text.bin"), dtype=np.uint16)
        for file in FILES:
            tokens = torch.from_numpy(np.fromfile(file, np.uint8).astype(np.uint16))
            builder.add_document(tokens, [len(tokens)])
        builder.finalize(str(folder / "text.idx"))
    dist.barrier()
    install_bin_reader()
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=SEQ_LEN,
        blend=([str(folder / "text")], None),  # or s3://..., with object_storage_cache_path=
        split="1",
        path_to_cache=str(folder / "cache"),
        tokenizer=Bytes(),
        mmap_bin_files=False,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()[0]


def sharded(name: str, tensor: torch.Tensor) -> ShardedTensor:
    """Return this process's rows of a tensor, which all processes have in full here."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return ShardedTensor.from_rank_offsets(name, tensor.chunk(ranks)[rank], (0, rank, ranks))


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Return a sharded state: the weights, and the optimizer's state of each."""
    state = {"model": {}, "momentum": {}}
    for name, weight in net.named_parameters():
        momentum = optimizer.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
        state["model"][name] = sharded(f"model.{name}", weight.detach())
        state["momentum"][name] = sharded(f"momentum.{name}", momentum)
    return state


def load(folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint, and return its step."""
    found = dist_checkpointing.load(state_of(net, optimizer), folder, GDSLoadStrategy())
    for name, weight in net.named_parameters():
        for target, rows in (
            (weight.detach(), found["model"][name]),
            (optimizer.state[weight]["momentum_buffer"], found["momentum"][name]),
        ):
            parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, rows)
            target.copy_(torch.cat(parts))
    return found["step"]


def main():
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdsdata"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps in all, those before a restart included")
    parser.add_argument("--stop-at", type=int, help="save and stop after this step")
    parser.add_argument("--folder", type=Path, default=cache / "train_megatron", help="folder of data and checkpoint")
    args = parser.parse_args()
    for name, value in dict(RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=29500).items():
        os.environ.setdefault(name, str(value))  # torchrun sets them
    dist.init_process_group("gloo")
    rank, ranks, checkpoint = dist.get_rank(), dist.get_world_size(), args.folder / "checkpoint"
    checkpoint.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 256))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    dataset = dataset_of(args.folder, args.steps * BATCH)
    step = 0
    if dist_checkpointing.check_is_distributed_checkpoint(checkpoint):
        step = load(checkpoint, net, optimizer)

    last = args.stop_at or args.steps
    while step < last:
        own = [dataset[step * BATCH + i] for i in range(rank, BATCH, ranks)]
        tokens, labels = (torch.stack([one[name] for one in own]) for name in ("tokens", "labels"))
        loss = nn.functional.cross_entropy(net(tokens), labels[:, -1])
        optimizer.zero_grad()
        loss.backward()
        for weight in net.parameters():
            dist.all_reduce(weight.grad)
            weight.grad /= ranks
        optimizer.step()
        step += 1
        if rank == 0:
            print(f"step {step}: loss {loss.item():.9g}", flush=True)
    dist_checkpointing.save({**state_of(net, optimizer), "step": step}, checkpoint, GDSSaveStrategy())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
