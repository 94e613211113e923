"""A rank that dies or hangs while ranks read together: the others raise `RankLost`, all in time."""

import pathlib
import signal
import time
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import write_records
from lost_rank import Place, survivors
from torch.distributed.device_mesh import init_device_mesh

import gdsdata
from gdsdata import (
    AsyncCheckpointer,
    EngineOptions,
    GDSDataset,
    GDSLoadPlanner,
    GDSStorageReader,
    GDSStorageWriter,
    Sharding,
)
from gdsdata.checkpoint.background.ranks import Ranks
from gdsdata.checkpoint.background.saver import Saver
from gdsdata.checkpoint.tensor_reader import TensorReader
from gdsdata.collective import peers, plan, routes, transfers
from gdsdata.collective.agreement import Agreement, Session
from gdsdata.data.batches import shared, shared_parts
from gdsdata.formats import Records

RANKS = 4
RECORDS, RECORD_BYTES, BATCH = 400, 64, 16
LONG_S, SHORT_S, MORE_S = 60.0, 2.0, 3.5  # timeouts, and how much later an error may come on a busy machine
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


def state_of(fill):
    state = {f"w{i}": torch.arange(100_000.0) * i if fill else torch.zeros(100_000) for i in range(8)}
    return state | {f"b{i}": torch.full((100,), float(i) if fill else 0.0) for i in range(20)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lost")
    gdsdata.save(state_of(True), folder / "m.safetensors")
    dcp.save(state_of(True), storage_writer=GDSStorageWriter(folder / "dcp"), no_dist=True)
    with AsyncCheckpointer(folder / "async") as checkpointer:
        checkpointer.save(1, state_of(True))
    write_records(folder / "records", RECORDS, RECORD_BYTES)
    return folder


def is_right(state):
    expected = state_of(True)
    return state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)


def options_of(timeout_s):
    plan._MIB = 1 << 14  # so that these short tensors are several pieces
    return EngineOptions(stall_timeout_s=timeout_s / 5)


def load(rank, _, folder, timeout_s):
    return is_right(gdsdata.load(folder / "m.safetensors", group="auto", options=options_of(timeout_s)))


def restore(rank, _, folder, timeout_s):
    options = options_of(timeout_s)
    checkpointer = AsyncCheckpointer(folder / "async", replicas="auto", options=options, timeout_s=timeout_s)
    state = state_of(False)
    checkpointer.restore(state)
    return is_right(state)


def save(rank, own_folder, folder, timeout_s):
    checkpointer = AsyncCheckpointer(own_folder / "saved", timeout_s=timeout_s)
    return checkpointer.save(1, state_of(True)).result(LONG_S)


def dcp_load(rank, _, folder, timeout_s):
    """Return what gdsdata warns of. torch's own error is another one on each rank."""
    reader = GDSStorageReader(folder / "dcp", options=options_of(timeout_s))
    with warnings.catch_warnings(record=True) as warned, pytest.raises(Exception):  # noqa: B017
        warnings.simplefilter("always")
        dcp.load(state_of(False), storage_reader=reader, planner=GDSLoadPlanner(read_once=True))
    return [str(one.message) for one in warned if "gdsdata" in str(one.message)]


def iterate(rank, _, folder, timeout_s):
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "tp"))
    sharding = Sharding(device_mesh=mesh, dp_dim="dp", share_reads=True)
    records = Records("u1", (RECORD_BYTES,))
    dataset = GDSDataset(folder / "records", BATCH, records, sharding=sharding, device="cpu", shuffle=False)
    return b"".join(batch.numpy().tobytes() for batch in dataset) == (folder / "records").read_bytes()


CALLS = {"load": load, "restore": restore, "iterate": iterate}
GLOO = "torch.distributed", "ProcessGroupGloo"
IN_A_SESSION = {
    "before the session": Place(Agreement, "twin"),
    "while ranks connect": Place(*GLOO),
    "in the first agreement": Place(Session, "_begin"),
    "before the wants": Place(transfers.SharedReads, "read"),
    "behind the wants": Place(transfers.SharedReads, "_follow"),
    "at the first read": Place(TensorReader, "_read"),
    "before a transfer": Place(routes.CpuRoute, "exchange"),
    "in a transfer": Place(Session, "complete"),
    "between pieces": Place(routes.CpuRoute, "exchange", 2),
    "between pieces, the first rank": Place(routes.CpuRoute, "exchange", 2, rank=0),
    "at the end": Place(Session, "_end"),
    "at the end, the first rank": Place(Session, "_end", rank=0),
}
PLACES = {
    "load": IN_A_SESSION,
    "restore": {
        "in the constructor": Place(Ranks, "connect"),
        **{f"in exchange {number}": Place(Ranks, "each", number) for number in range(1, 6)},
        "before the choice": Place(Ranks, "first"),
        "before the choice, the first rank": Place(Ranks, "first", rank=0),
        "behind the session": Place(Session, "_release"),
        **IN_A_SESSION,
    },
    "iterate": {
        "before the first batch": Place(shared_parts.PartsAhead, "begin"),
        "while peers connect": Place(*GLOO),
        "before the layout": Place(peers.Meeting, "contents"),
        "at the first header": Place(peers.Meeting, "numbers"),
        "at a later header": Place(peers.Meeting, "numbers", 5),
        "before peers connect to gather": Place(shared.GlooGathers, "__init__"),
        "at the first gather": Place(shared.GlooGathers, "begin"),
        "at a later gather": Place(shared.GlooGathers, "begin", 5),
        "while a batch is gathered": Place(shared.SharedReader, "_whole", 5),
        "while a batch is gathered, the first rank": Place(shared.SharedReader, "_whole", 5, rank=0),
    },
}
CASES = [(call, place) for call, places in PLACES.items() for place in places]
AT_ONCE = [
    ("load", "in the first agreement"),
    ("load", "between pieces"),
    ("load", "at the end, the first rank"),
    ("restore", "in exchange 2"),
    ("restore", "before the choice, the first rank"),
    ("restore", "at the first read"),
    ("iterate", "at a later header"),
    ("iterate", "at a later gather"),
]


def assert_lost(outcomes, within_s):
    assert len(outcomes) == RANKS - 1
    for outcome in outcomes:
        assert outcome.kind == "RankLost", outcome
        assert "has ended, or " in outcome.text and "Look for its own error" in outcome.text, outcome
        assert outcome.after_s < within_s, outcome


@pytest.mark.parametrize(("call", "place"), AT_ONCE)
def test_a_killed_rank_is_the_same_error_on_all_others_long_before_the_timeout(call, place, folder, tmp_path):
    found = survivors(RANKS, CALLS[call], tmp_path, PLACES[call][place], KILL, LONG_S, folder, LONG_S)
    assert_lost(found, LONG_S / 6)


@pytest.mark.parametrize(("call", "place"), [("load", "before the session"), ("restore", "between pieces")])
def test_a_rank_that_hangs_is_the_same_error_on_all_others_within_the_timeout(call, place, folder, tmp_path):
    found = survivors(RANKS, CALLS[call], tmp_path, PLACES[call][place], STOP, LONG_S, folder, SHORT_S)
    assert_lost(found, SHORT_S + MORE_S)


def test_a_killed_rank_ends_the_save_on_all_others_at_once(folder, tmp_path):
    for outcome in survivors(RANKS, save, tmp_path, Place(Saver, "_write"), KILL, LONG_S, folder, LONG_S):
        assert outcome.kind == "SaveAborted" and "save and restore together has ended" in outcome.text, outcome
        assert outcome.after_s < LONG_S / 6
    assert not list(tmp_path.glob("saved/*/manifest*"))


def save_behind_the_removal(rank, own_folder, folder, timeout_s):
    """Save. The last rank writes when the first one has removed the files that were begun."""
    write = Saver._write

    def late(saver, job, begun, copy):
        begun_in = pathlib.Path(saver._folder.folder_of(begun.step))
        while rank == RANKS - 1 and begun_in.exists():
            time.sleep(0.01)
        if rank == 0:
            time.sleep(1)  # so that its neighbor knows of the loss, and has closed the connection
        return write(saver, job, begun, copy)

    if rank in (0, RANKS - 1):
        Saver._write = late
    return save(rank, own_folder, folder, timeout_s)


def test_a_save_that_fails_because_others_have_removed_its_files_says_that_a_rank_is_lost(folder, tmp_path):
    found = survivors(RANKS, save_behind_the_removal, tmp_path, Place(Saver, "_write"), KILL, LONG_S, folder, LONG_S)
    for outcome in found:
        assert outcome.kind == "SaveAborted" and "save and restore together has ended" in outcome.text, outcome
        assert ("This rank failed too: " in outcome.text) is (outcome.rank == RANKS - 1)


def test_a_rank_lost_in_dcp_load_is_warned_of_before_torch_waits_for_it(folder, tmp_path):
    place = IN_A_SESSION["at the first read"]
    for outcome in survivors(RANKS, dcp_load, tmp_path, place, KILL, SHORT_S, folder, LONG_S):
        (warning,) = outcome.result
        assert "has ended, or was silent for 60 s" in warning and "torch now waits for that rank" in warning
        assert outcome.after_s < SHORT_S + MORE_S


@pytest.mark.slow
@pytest.mark.parametrize("by", [KILL, STOP], ids=["killed", "stopped"])
@pytest.mark.parametrize(("call", "place"), CASES)
def test_a_rank_lost_at_any_place_is_the_same_error_on_all_others(call, place, by, folder, tmp_path):
    found = survivors(RANKS, CALLS[call], tmp_path, PLACES[call][place], by, SHORT_S, folder, SHORT_S)
    assert_lost(found, SHORT_S + MORE_S)


@pytest.mark.slow
@pytest.mark.parametrize("by", [KILL, STOP], ids=["killed", "stopped"])
@pytest.mark.parametrize(("call", "place"), [(call, Place(*GLOO, rank=0)) for call in CALLS])
def test_a_store_whose_host_is_lost_is_an_error_within_the_timeout(call, place, by, folder, tmp_path):
    arguments = place, by, SHORT_S, folder, SHORT_S
    assert_lost(survivors(RANKS, CALLS[call], tmp_path, *arguments, in_host_of_store=True), SHORT_S + MORE_S)
