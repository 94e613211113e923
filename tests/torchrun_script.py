"""The script of test_torchrun.py. Each rank uses GDSDataset as a training script does.

    torchrun --standalone --nproc-per-node=2 tests/torchrun_script.py FOLDER cpu

FOLDER holds the data of `write_data` and states.json. Each rank writes the results of `CHECKS` to
FOLDER/rank-R.json.
"""

import io
import json
import os
import sys
import tarfile
from datetime import timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from helpers import grouped
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from gdsdata import GDSDataset, Lanes
from gdsdata.data.order import measured
from gdsdata.formats import Records, Tar

SAMPLES, STEP = 103, 16  # six whole steps of all ranks together, and seven samples
RESUMED_STEPS = 2  # of each resumed run
KINDS = ("records", "fields")
SHUFFLES = {"uniform": True, "lanes": "lanes", "few lanes": Lanes(8, 4, 2), "none": False}
UNEVEN = ("drop", "pad", "repeat")
HANG_S = 20  # a rank that waits this long for others hangs


# ------------------------------------------------------------------------------------------------------------- data


def write_data(folder):
    """Write samples that contain their number: records of floats, and tar members of any length."""
    for kind in KINDS:
        (folder / kind).mkdir()
    record_rows().tofile(folder / "records" / "0.bin")
    with tarfile.open(folder / "fields" / "0.tar", "w") as archive:
        for number, values in enumerate(field_values()):
            for extension, content in (("bin", values.tobytes()), ("cls", str(number).encode())):
                member = tarfile.TarInfo(f"{number:04}.{extension}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    with open(folder / "large.bin", "wb") as file:
        file.truncate(300 << 20)  # a hole; large enough for shuffle="auto" to measure


def record_rows():
    """Return float32 (SAMPLES, 5): the sample's number, and four random values."""
    rows = np.random.default_rng(0).standard_normal((SAMPLES, 5), np.float32)
    rows[:, 0] = np.arange(SAMPLES)
    return rows


def field_values():
    """Return 1 to 40 bytes for each sample."""
    rng = np.random.default_rng(1)
    return [rng.integers(0, 256, rng.integers(1, 41), np.uint8) for _ in range(SAMPLES)]


def dataset_of(folder, kind, ranks, **arguments):
    """Make a data set whose batches on ``ranks`` ranks form a step."""
    if kind == "records":
        return GDSDataset(folder / kind, STEP // ranks, Records("f4", (5,)), **grouped(arguments))
    return GDSDataset(folder / kind, STEP // ranks, Tar(), **grouped({"decode": {"cls": "cls"}, **arguments}))


def numbers(batch):
    """Return the numbers of a batch's samples."""
    return (batch["cls"] if isinstance(batch, dict) else batch[:, 0].int()).tolist()


def epoch_of(dataset):
    return [numbers(batch) for batch in dataset]


# ---------------------------------------------------------------------------------------------------------- training


def model_of(kind):
    torch.manual_seed(3)
    if kind == "records":
        return torch.nn.Linear(4, 1)
    return torch.nn.EmbeddingBag(256, 1, mode="mean", include_last_offset=True)


def loss_of(model, batch):
    """Return the mean squared error between the model's output and the parity of sample numbers."""
    if isinstance(batch, dict):
        found = model(batch["bin"].values.long(), batch["bin"].offsets.to(batch["bin"].values.device))
    else:
        found = model(batch[:, 1:])
    parity = torch.tensor(numbers(batch), device=found.device) % 2
    return (found[:, 0] - parity).square().mean()


def train(model, batches):
    """Take a step for each batch. Returns the weights, and the batches' samples."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        seen.append(numbers(batch))
    return [value for weights in model.parameters() for value in weights.flatten().tolist()], seen


# ------------------------------------------------------------------------------------------------------------ checks


def shares(folder, device):
    """Read the shares without an argument that names the rank."""
    ranks = dist.get_world_size()
    misleading = mock.patch.dict(os.environ, RANK="7", WORLD_SIZE="9")  # torch.distributed overrides these
    with misleading:
        return {
            f"{kind}, {name}": epoch_of(dataset_of(folder, kind, ranks, shuffle=shuffle, device=device, uneven="pad"))
            for kind in KINDS
            for name, shuffle in SHUFFLES.items()
        }


def trained(folder, device):
    """Train an epoch with DistributedDataParallel for each uneven end: ranks join all steps."""
    found = {}
    for kind in KINDS:
        for uneven in UNEVEN:
            dataset = dataset_of(folder, kind, dist.get_world_size(), device=device, uneven=uneven)
            weights, seen = train(DistributedDataParallel(model_of(kind).to(device)), dataset)
            found[f"{kind}, {uneven}"] = {"weights": weights, "seen": seen}
    return found


def resumed(folder, device):
    """Resume from the states in FOLDER for some steps. Returns the batches and the new states."""
    found = {}
    for name, state in json.loads((folder / "states.json").read_text()).items():
        kind, shuffle = name.split(", ")
        dataset = dataset_of(folder, kind, dist.get_world_size(), shuffle=SHUFFLES[shuffle], device=device)
        dataset.load_state_dict(state)
        batches = iter(dataset)
        steps = [numbers(next(batches)) for _ in range(RESUMED_STEPS)]
        found[name] = {"steps": steps, "state": dataset.state_dict()}
    return found


def in_a_mesh(folder, device):
    """Return the first batch if pairs of ranks share a model's tensors."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh(torch.device(device).type, (ranks // 2, 2), mesh_dim_names=("dp", "tp"))

    def first(parts, **arguments):
        return numbers(next(iter(dataset_of(folder, "fields", parts, device=device, **arguments))))

    def refusal(**arguments):
        try:
            return f"no error: {dataset_of(folder, 'fields', 1, device=device, **arguments)}"
        except ValueError as error:
            return str(error)

    return {
        "by name": first(ranks // 2, device_mesh=mesh, dp_dim="dp"),
        "by place": first(ranks // 2, device_mesh=mesh, dp_dim=0),
        "of one dimension": first(ranks // 2, device_mesh=mesh["dp"]),
        "along both": first(ranks, device_mesh=mesh, dp_dim=("dp", "tp")),
        "auto": first(ranks // 2, device_mesh=mesh, dp_dim="dp", shuffle="auto"),
        "no dp_dim": refusal(device_mesh=mesh),
        "unknown": refusal(device_mesh=mesh, dp_dim="pp"),
        "twice": refusal(device_mesh=mesh, dp_dim="dp", rank=0, world_size=1),
    }


def unlike_storage():
    """Pretend that large reads are clearly faster on rank 0, and slower on all others."""

    def gb_per_s(index, batch):
        return 2.0 if (index.sample.bytes == 1 << 20) == (dist.get_rank() == 0) else 0.2

    return mock.patch.object(measured, "_gb_per_s", gb_per_s)


def auto_dataset_of(folder, device):
    return GDSDataset(folder / "large.bin", 64, Records("u1", (4096,)), device=device, shuffle="auto")


def agreed(folder, device):
    """Return the choice of "auto" if the ranks' storage differs."""
    with unlike_storage():
        return auto_dataset_of(folder, device).stats()["shuffle"]


CHECKS = (shares, trained, resumed, in_a_mesh, agreed)


def main():
    folder, device = Path(sys.argv[1]), sys.argv[2]
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    made_before = auto_dataset_of(folder, device)
    found = {"before torch.distributed": epoch_of(dataset_of(folder, "records", ranks, device=device, uneven="pad"))}
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=HANG_S))
    with unlike_storage():
        next(iter(made_before))
    found["agreed when iteration began"] = made_before.stats()["shuffle"]
    for check in CHECKS:
        found[check.__name__] = check(folder, device)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
