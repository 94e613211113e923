"""`dcp.load` with ``read_once``: ranks read once what several want."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import MIB, drop_cache, sharded
from test_dcp import on_ranks
from test_read_once import DIRECT, FAILS, digest_of, read_bytes, state_of
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh

from gdsdata import GDSLoadPlanner, GDSStorageReader, GDSStorageWriter
from gdsdata.checkpoint import tensor_reader

RANKS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Give folders that one process saved."""
    folder = tmp_path_factory.mktemp("once")
    state = state_of(8)
    dcp.save(state, storage_writer=GDSStorageWriter(folder / "ours"), no_dist=True)
    dcp.save(state, storage_writer=FileSystemWriter(folder / "torchs"), no_dist=True)
    return folder


def counted(path, state, planner, options=DIRECT, no_dist=False, **arguments):
    """Load a checkpoint that is in no cache. Returns how many bytes this rank read."""
    if dist.get_rank() == 0:
        drop_cache(*path.glob("*.distcp"))
    dist.barrier()
    before = read_bytes()
    reader = GDSStorageReader(path, options=options, **arguments)
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=no_dist)
    counts = read_bytes() - before
    dist.barrier()
    return counts


def zeros():
    return {name: torch.zeros_like(value) for name, value in state_of(8).items()}


def parts_of(model, optimizer):
    """Return this rank's parts of all tensors."""
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    found = {}
    for name, values in (("model", states["model"]), *states["optimizer"]["state"].items()):
        found |= {f"{name}.{key}": getattr(one, "_local_tensor", one).clone() for key, one in values.items()}
    return states, found


def _loads(rank, folder):
    found = {}
    counted(folder / "ours", zeros(), GDSLoadPlanner(read_once=True))  # imports are read from storage too
    for name in ("ours", "torchs"):
        state = zeros()
        counts = counted(folder / name, state, GDSLoadPlanner(read_once=True))
        found[name] = digest_of(state), counts
    state = zeros()
    found["verify"] = counted(folder / "ours", state, GDSLoadPlanner(read_once=True), verify=True), digest_of(state)
    with pytest.MonkeyPatch.context() as patch:
        # Ranks read in different numbers of rounds.
        patch.setattr(tensor_reader, "MOST_OWN_BYTES", 3 * MIB * (rank + 1))
        transposed = {
            "layers.1.weight": torch.zeros(2 * 700_001)[::2],
            "layers.2.weight": torch.zeros(700_002, 2)[:, 0],
        }
        counted(folder / "ours", transposed, GDSLoadPlanner(read_once=dist.group.WORLD))
        found["rounds"] = digest_of(transposed)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    states, saved = parts_of(*sharded(1, mesh))
    dcp.save(states, storage_writer=GDSStorageWriter(folder / "hsdp"))
    model, optimizer = sharded(2, mesh)
    states, before = parts_of(model, optimizer)
    found["hsdp"] = counted(folder / "hsdp", states, GDSLoadPlanner(read_once=True))
    _, after = parts_of(model, optimizer)
    assert not all(torch.equal(before[name], saved[name]) for name in saved)
    assert all(torch.equal(after[name], saved[name]) for name in saved)
    reader = GDSStorageReader(folder / "ours", options=FAILS if rank == 1 else DIRECT)
    with pytest.raises(CheckpointException) as raised:
        dcp.load(zeros(), storage_reader=reader, planner=GDSLoadPlanner(read_once=True))
    found["error"] = [(type(error).__name__, str(error)) for error, _ in raised.value.failures.values()]
    with pytest.raises(CheckpointException) as raised:
        dcp.load(zeros(), storage_reader=reader, planner=GDSLoadPlanner(read_once=True), no_dist=True)
    found["own error"] = [(type(error).__name__, str(error)) for error, _ in raised.value.failures.values()]
    state = zeros()
    counts = counted(folder / "ours", state, GDSLoadPlanner(read_once=True), no_dist=True)
    found["no_dist"] = digest_of(state), counts
    state = zeros()
    counted(folder / "ours", state, GDSLoadPlanner(read_once=True))
    return found | {"after": digest_of(state)}


@pytest.fixture(scope="module")
def loads(folder):
    return on_ranks(RANKS, _loads, folder)


def bytes_in(folder):
    return sum(path.stat().st_size for path in folder.glob("*.distcp"))


@pytest.mark.parametrize(("name", "pages"), [("ours", 0), ("torchs", 3)])
def test_replicated_tensors_are_read_once(name, pages, loads, folder):
    """Each rank looks at the ends of the archives that torch writes, to find the tensors there."""
    assert {rank[name][0] for rank in loads} == {digest_of(state_of(8))}
    if drop_cache(*(folder / name).glob("*.distcp")):
        of_ends = RANKS * len(state_of(8)) * pages * 4096
        assert sum(rank[name][1] for rank in loads) <= 1.02 * bytes_in(folder / name) + of_ends + RANKS * MIB


def test_torch_need_not_exchange_plans_for_that(loads, folder):
    assert {rank["no_dist"][0] for rank in loads} == {digest_of(state_of(8))}
    if drop_cache(*(folder / "ours").glob("*.distcp")):
        assert sum(rank["no_dist"][1] for rank in loads) <= 1.02 * bytes_in(folder / "ours") + RANKS * MIB
    ((name, message),) = {error for rank in loads for error in rank["own error"]}
    assert name == "IoError" and "__0_0.distcp" in message


def test_checksums_are_compared_by_the_rank_that_reads(loads, folder):
    assert {digest for rank in loads for _, digest in [rank["verify"]]} == {digest_of(state_of(8))}
    if drop_cache(*(folder / "ours").glob("*.distcp")):
        assert sum(counts for rank in loads for counts, _ in [rank["verify"]]) <= 1.02 * bytes_in(folder / "ours") + MIB


def test_ranks_may_need_different_numbers_of_rounds(loads):
    whole = state_of(8)
    names = ("layers.1.weight", "layers.2.weight")
    assert {rank["rounds"] for rank in loads} == {digest_of({name: whole[name] for name in names})}


def test_replicas_of_hsdp_are_read_once(loads, folder):
    if drop_cache(*(folder / "hsdp").glob("*.distcp")):
        assert sum(rank["hsdp"] for rank in loads) <= 1.05 * bytes_in(folder / "hsdp") + RANKS * MIB


def test_an_error_of_one_rank_is_raised_on_all_and_the_next_load_works(loads):
    for rank in loads:
        (error,) = set(rank["error"])  # of each rank
        assert len(rank["error"]) == RANKS and error[0] == "IoError" and "__0_0.distcp" in error[1]
    assert {rank["after"] for rank in loads} == {digest_of(state_of(8))}
