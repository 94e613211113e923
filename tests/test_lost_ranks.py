"""A rank that dies or hangs while ranks read together: the same right error on all others, in time."""

import signal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import write_records
from lost_rank import Place, survivors
from torch.distributed.device_mesh import init_device_mesh

import gdsdata
from gdsdata import AsyncCheckpointer, EngineOptions, GDSDataset, GDSLoadPlanner, GDSStorageReader, GDSStorageWriter
from gdsdata import Sharding
from gdsdata.checkpoint.background.ranks import Ranks
from gdsdata.checkpoint.tensor_reader import TensorReader
from gdsdata.collective import agreement, peers, plan, routes, transfers
from gdsdata.collective.agreement import Agreement, Session
from gdsdata.data.batches import shared, shared_parts
from gdsdata.formats import Records

RANKS, TIMEOUT_S = 4, 2.0
OPTIONS = EngineOptions(stall_timeout_s=TIMEOUT_S / 5)
RECORD_BYTES = 64


def state_of(fill):
    state = {f"w{i}": torch.arange(100_000.0) * i if fill else torch.zeros(100_000) for i in range(8)}
    return state | {f"b{i}": torch.full((100,), float(i) if fill else 0.0) for i in range(20)}


def make_folder(folder):
    gdsdata.save(state_of(True), folder / "m.safetensors")
    dcp.save(state_of(True), storage_writer=GDSStorageWriter(folder / "dcp"), no_dist=True)
    with AsyncCheckpointer(folder / "async") as checkpointer:
        checkpointer.save(1, state_of(True))

    write_records(folder / "records", 400, RECORD_BYTES)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("lost"))


def _small_pieces():
    plan._MIB = 1 << 14


def _is_right(state):
    expected = state_of(True)
    return state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)


def _load(rank, _, folder):
    _small_pieces()
    return _is_right(gdsdata.load(folder / "m.safetensors", group="auto", options=OPTIONS))


def _restore(rank, _, folder):
    _small_pieces()
    checkpointer = AsyncCheckpointer(folder / "async", replicas="auto", options=OPTIONS, timeout_s=TIMEOUT_S)
    state = state_of(False)
    checkpointer.restore(state)
    return _is_right(state)


def _dcp_load(rank, _, folder):
    _small_pieces()
    state = state_of(False)
    reader = GDSStorageReader(folder / "dcp", options=OPTIONS)
    dcp.load(state, storage_reader=reader, planner=GDSLoadPlanner(read_once=True))
    return _is_right(state)


def _iterate(rank, _, folder):
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "tp"))
    sharding = Sharding(device_mesh=mesh, dp_dim="dp", share_reads=True)
    dataset = GDSDataset(
        folder / "records", 16, Records("u1", (RECORD_BYTES,)), sharding=sharding, device="cpu", shuffle=False
    )
    count = 0
    for batch in dataset:
        count += len(batch)
    return count == 400


CALLS = {"load": _load, "restore": _restore, "dcp": _dcp_load, "iterate": _iterate}

_SESSION = {
    "before the session": Place(Agreement, "twin"),
    "while connecting": Place("torch.distributed", "ProcessGroupGloo"),
    "begin": Place(Session, "_begin"),
    "wants": Place(transfers.SharedReads, "read"),
    "after wants": Place(transfers.SharedReads, "_follow"),
    "nodes": Place(Session, "nodes"),
    "first read": Place(TensorReader, "_read"),
    "first exchange": Place(routes.CpuRoute, "exchange"),
    "first send": Place(Session, "send"),
    "first complete": Place(Session, "complete"),
    "second exchange": Place(routes.CpuRoute, "exchange", 2),
    "end": Place(Session, "_end"),
    "end rank 0": Place(Session, "_end", 1, 0),
    "second exchange rank 0": Place(routes.CpuRoute, "exchange", 2, 0),
    "release": Place(Session, "_release"),
}
_PLACES = {
    "load": _SESSION,
    "dcp": _SESSION,
    "restore": {
        "connect": Place(Ranks, "connect"),
        **{f"each {n}": Place(Ranks, "each", n) for n in range(1, 7)},
        **{f"first {n}": Place(Ranks, "first", n) for n in range(1, 2)},
        "first 1 rank 0": Place(Ranks, "first", 1, 0),
        **_SESSION,
    },
    "iterate": {
        "begin": Place(shared_parts.PartsAhead, "begin"),
        "meeting group": Place("gdsdata.collective.peers", "_gloo_group"),
        "connecting": Place("torch.distributed", "ProcessGroupGloo"),
        "connecting rank 0": Place("torch.distributed", "ProcessGroupGloo", 1, 0),
        "contents": Place(peers.Meeting, "contents"),
        "numbers 1": Place(peers.Meeting, "numbers", 1),
        "numbers 5": Place(peers.Meeting, "numbers", 5),
        "gathers group": Place(shared.GlooGathers, "__init__"),
        "gather 1": Place(shared.GlooGathers, "begin", 1),
        "gather 5": Place(shared.GlooGathers, "begin", 5),
        "complete 5": Place("gdsdata.data.batches.shared", "complete", 5),
        "whole 5": Place(shared.SharedReader, "_whole", 5),
        "last whole": Place(shared.SharedReader, "_whole", 25),
    },
}
