"""Save and load an FSDP2 model by DCP on gdsdata's engine, beside torch's own storage.

    torchrun --nproc-per-node=2 benchmarks/fsdp.py save FOLDER
    python benchmarks/fsdp.py load FOLDER           # on one GPU
    python benchmarks/fsdp.py save OTHER
    torchrun --nproc-per-node=2 benchmarks/fsdp.py load OTHER

`load` compares every parameter and every moment of AdamW with what `save` made, bit for bit.
"""

import argparse
import functools
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

import gdsdata

LAYERS, WIDTH = 12, 4096  # 0.8 GB of float32 parameters, and twice as much of AdamW's state


def trained(seed, device):
    """Return the state of a sharded model after one step of its optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, device=device) for _ in range(LAYERS)))
    for layer in (*model, model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}


def leaves(nest):
    return torch.utils._pytree.tree_leaves(nest)


def timed(call, state_bytes):
    dist.barrier()
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    dist.barrier()
    seconds = time.perf_counter() - started
    return f"{state_bytes / seconds / 1e9:.2f} GB/s ({seconds:.2f} s)"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=["save", "load"])
    parser.add_argument("folder")
    args = parser.parse_args()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29511")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    state = trained(0, device)
    state_bytes = sum(leaf.nbytes for leaf in leaves(state))  # all of a DTensor
    lines = []
    for name, writer, reader in (
        ("gdsdata", gdsdata.GDSStorageWriter, gdsdata.GDSStorageReader),
        ("torch", dcp.FileSystemWriter, dcp.FileSystemReader),
    ):
        path = os.path.join(args.folder, name)
        if args.work == "save":
            rate = timed(functools.partial(dcp.save, state, storage_writer=writer(path)), state_bytes)
            lines.append(f"{name}: saved at {rate}")
            continue
        for of in ("gdsdata", "torch"):
            found = trained(1, device)
            of_it = reader(os.path.join(args.folder, of))
            rate = timed(functools.partial(dcp.load, found, storage_reader=of_it), state_bytes)
            lines.append(f"{name}: what {of} wrote, loaded at {rate}")
            for expected, got in zip(leaves(state), leaves(found), strict=True):
                local = [leaf.to_local() if hasattr(leaf, "to_local") else leaf for leaf in (expected, got)]
                assert torch.equal(*local), "what was loaded is not what was saved"
    if dist.get_rank() == 0:
        title = f"{args.work} on {dist.get_world_size()} ranks, {state_bytes / 1e9:.2f} GB"
        print(title, *lines, sep="\n  ", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
