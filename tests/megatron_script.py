"""Checkpoints of Megatron-core on several ranks of gloo, on the CPU.

    torchrun --standalone --nproc-per-node=2 tests/megatron_script.py FOLDER PART

PART is ``pair`` (two ranks save, load, save in the background, and fail) or ``other`` (any number
of ranks loads what two have saved). Each rank writes FOLDER/PART-rank-R.json.

Megatron's own checks of its format are in its repository, and not in its wheel: these are the same
ones. Its `AsyncCallsQueue` asks for GPUs, to wait for them and to agree. `on_cpu` replaces that. So
these tests show no copies from GPUs to pinned memory, no CUDA IPC, and no NCCL.
"""

import contextlib
import json
import os
import sys
import warnings
from pathlib import Path
from unittest import mock

import torch

COLUMNS, LAYERS = 8, 4  # of a tensor of 12 rows, which 1, 2 and 3 ranks share
ROWS = 12


def on_cpu():
    """Have Megatron's queue of saves in the background run on the CPU."""
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch("torch.cuda.synchronize", lambda *_: None))
    stack.enter_context(mock.patch("torch.cuda.current_device", lambda: "cpu"))
    return stack


def whole(seed):
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + 1000 * seed


def state_of(rank, ranks, seed=None):
    """Return a sharded state: of values that ``seed`` chooses, or empty to be filled."""
    from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    filled = seed is not None
    rows = ROWS // ranks
    part = whole(seed)[rank * rows : (rank + 1) * rows].clone() if filled else torch.empty(rows, COLUMNS)
    columns = whole(seed).bfloat16().t() if filled else torch.empty(COLUMNS, ROWS, dtype=torch.bfloat16)
    replica = torch.full((COLUMNS,), float(seed)) if filled else torch.empty(COLUMNS)
    state = {
        "rows": ShardedTensor.from_rank_offsets("rows", part, (0, rank, ranks)),
        "everywhere": ShardedTensor.from_rank_offsets("everywhere", replica, replica_id=rank),
        "transposed": ShardedTensor.from_rank_offsets("transposed", columns, replica_id=rank),
        "layers": [
            ShardedTensor.from_rank_offsets(
                "layers",
                part + layer if filled else torch.empty(rows, COLUMNS),
                (0, layer, LAYERS),
                (1, rank, ranks),
                prepend_axis_num=1,
            )
            for layer in range(LAYERS)
        ],
        "generators": ShardedObject(
            "generators", {"seed": seed, "rank": rank % 2} if filled else None, (1,), (0,), rank
        ),
        "made": ShardedTensorFactory(
            "made",
            part * 2 if filled else torch.empty(rows, COLUMNS),
            lambda key, data, replica_id, _: {
                "low": ShardedTensor.from_rank_offsets(f"{key}.low", data[:, :3].contiguous(), (0, rank, ranks)),
                "high": ShardedTensor.from_rank_offsets(f"{key}.high", data[:, 3:].contiguous(), (0, rank, ranks)),
            },
            lambda found: torch.cat([found["low"], found["high"]], 1),
        ),
        "own": LocalNonpersistentObject(("stays", rank)),
    }
    if filled:
        state |= {"iteration": seed, "args": {"lr": 0.1, "names": ["a", "b"]}}
    return state


def check(found, rank, ranks, seed):
    """Check what was loaded into the state of a rank."""
    rows = ROWS // ranks
    part = whole(seed)[rank * rows : (rank + 1) * rows]
    assert torch.equal(found["rows"], part)
    assert torch.equal(found["everywhere"], torch.full((COLUMNS,), float(seed)))
    assert torch.equal(found["transposed"], whole(seed).bfloat16().t())
    assert [torch.equal(one, part + layer) for layer, one in enumerate(found["layers"])] == [True] * LAYERS
    assert torch.equal(found["made"], part * 2)
    assert found["generators"] == {"seed": seed, "rank": 0} and found["own"] == ("stays", rank)
    assert found["iteration"] == seed and found["args"] == {"lr": 0.1, "names": ["a", "b"]}


def made(folder):
    """Return a folder that rank 0 makes, as Megatron's training does."""
    if torch.distributed.get_rank() == 0:
        folder.mkdir(exist_ok=True)
    torch.distributed.barrier()
    return folder


def load(folder, seed, strategy=None):
    """Load a checkpoint and check it."""
    from megatron.core import dist_checkpointing

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    check(dist_checkpointing.load(state_of(rank, ranks), folder, strategy), rank, ranks, seed)


def save(folder, seed, strategy=None):
    from megatron.core import dist_checkpointing

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    dist_checkpointing.save(state_of(rank, ranks, seed), made(folder), strategy)


def begin(queue, folder, seed, strategy):
    """Begin a save in the background, and change what is being saved."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    state = state_of(torch.distributed.get_rank(), torch.distributed.get_world_size(), seed)
    tensors = [one.data for one in nested_values(state) if isinstance(getattr(one, "data", None), torch.Tensor)]
    request = dist_checkpointing.save(state, made(folder), strategy, async_sharded_save=True, async_strategy="mcore")
    queue.schedule_async_request(request)
    for one in tensors:
        one.fill_(-1)


def names(folder):
    """Return the names in a folder, without the random parts of data files."""
    return sorted({name[:6] if name.startswith("__") else name for name in os.listdir(folder)})


def refused(where):
    """Have the files of rank 1 in a folder not be written."""
    from gdsdata import GDSStorageWriter
    from gdsdata.errors import IoError

    write_items = GDSStorageWriter.write_items

    def fail(writer, name, items):
        if name.startswith("__1_") and str(writer.path) == str(where):
            raise IoError(28, "the disk is full", name)
        return write_items(writer, name, items)

    return mock.patch.object(GDSStorageWriter, "write_items", fail)


def error_of(call, *arguments):
    try:
        call(*arguments)
    except BaseException as error:  # as CheckpointException is
        return f"{type(error).__name__}: {error}"
    return None


def pair(folder):
    """Return what the tests look at, by name."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    from gdsdata.integrations.megatron import GDSLoadStrategy, GDSSaveStrategy

    found = {}
    ours = folder / "ours"
    save(ours, 1, GDSSaveStrategy())
    load(ours, 1, GDSLoadStrategy(verify=True))
    load(ours, 1)  # by the stock strategy
    save(ours, 2, GDSSaveStrategy())  # over the first one
    load(ours, 2, GDSLoadStrategy())
    found["ours"] = names(ours)

    stock = folder / "stock"
    with on_cpu():
        save(stock, 3)
    load(stock, 3, GDSLoadStrategy())

    parallel = folder / "parallel"
    strategy = FullyParallelSaveStrategyWrapper(GDSSaveStrategy(thread_count=2, cached_metadata=True))
    for seed in (4, 5, 6):  # the plan of the second one is kept
        save(parallel, seed, strategy)
        load(parallel, seed, GDSLoadStrategy(cache_metadata=True))
    found["parallel"] = names(parallel)

    queue, strategy = AsyncCallsQueue(), GDSSaveStrategy()
    with on_cpu():
        for seed in (7, 8):
            begin(queue, folder / f"async-{seed}", seed, strategy)
        found["finalized"] = queue.maybe_finalize_async_calls(blocking=True)
    for seed in (7, 8):
        load(folder / f"async-{seed}", seed, GDSLoadStrategy())

    failed = folder / "failed"
    with refused(failed):
        found["error"] = error_of(save, failed, 9, GDSSaveStrategy())
        found["names of failed"] = names(failed)
        with on_cpu():
            begin(queue, failed, 9, GDSSaveStrategy())
            found["error in the background"] = error_of(queue.maybe_finalize_async_calls, True)
    found["names of failed later"] = names(failed)
    with refused(ours):
        found["error over another"] = error_of(save, ours, 9, GDSSaveStrategy())
    load(ours, 2, GDSLoadStrategy())  # the older one

    killed = folder / "killed"
    begun = killed_writer if torch.distributed.get_rank() == 1 else contextlib.nullcontext
    with on_cpu(), begun():
        begin(queue, killed, 9, GDSSaveStrategy())
        found["error of a killed one"] = error_of(queue.maybe_finalize_async_calls, True)
    found["names of killed"] = [one for one in names(killed) if "metadata" in one]
    with on_cpu():
        begin(queue, killed, 10, GDSSaveStrategy())  # the next save works again
        queue.close()
    load(killed, 10, GDSLoadStrategy())
    return found


def killed_writer():
    """Have the process of a save in the background be killed."""
    from gdsdata import GDSStorageWriter

    return mock.patch.object(GDSStorageWriter, "write_items", lambda *_: os.kill(os.getpid(), 9))


def other(folder):
    from gdsdata.integrations.megatron import GDSLoadStrategy

    for name, seed in (("ours", 2), ("stock", 3), ("parallel", 6)):
        load(folder / name, seed, GDSLoadStrategy())
    return {}


def main():
    warnings.filterwarnings("ignore")
    folder, part = Path(sys.argv[1]), sys.argv[2]
    torch.distributed.init_process_group("gloo")
    found = {"pair": pair, "other": other}[part](folder)
    (folder / f"{part}-rank-{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
