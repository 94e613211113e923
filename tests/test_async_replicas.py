"""`AsyncCheckpointer` with ``replicas=``: one rank saves, and all read each byte once."""

import ast
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from folder_store import FolderStore, install
from helpers import MIB, drop_cache, eventually, sharded
from test_dcp import on_ranks
from test_read_once import DIRECT, FAILS, changed, digest_of, error_of, read_bytes, two_nodes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from gdsdata import AsyncCheckpointer, EngineOptions
from gdsdata.checkpoint.tensor_reader import TensorReader
from gdsdata.collective import routes
from gdsdata.collective.agreement import Agreement

RANKS = 4
LONG = 700_000


class Model:
    """A state that the ranks of DDP have: tensors, tied ones, and plain values."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.tensors = {f"layers.{i}.weight": torch.randn(LONG + i) for i in range(10)}
        self.tensors |= {f"layers.{i}.bias": torch.randn(1000 + i) for i in range(50)}
        self.tensors["tied"] = self.tensors["layers.0.weight"][:1000]

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, found):
        self.tensors = dict(found)


def state_of(seed=1):
    return {"model": Model(seed), "step": seed, "table": torch.full((3000,), float(seed))}


def digest(state):
    return digest_of({**state["model"].tensors, "step": state["step"], "table": state["table"]})


def files_of(folder):
    return sorted(folder.glob("*/rank-*.pt"))


def restored(folder, replicas="auto", state=None, options=DIRECT, **arguments):
    """Restore what is in no cache. Returns the digest, and how many bytes this rank read."""
    state = state_of(0) if state is None else state
    checkpointer = AsyncCheckpointer(folder, replicas=replicas, options=options)
    if dist.get_rank() == 0:
        drop_cache(*files_of(folder))
    dist.barrier()
    before = read_bytes()
    assert checkpointer.restore(state, **arguments) is not None
    counts = read_bytes() - before
    dist.barrier()
    checkpointer.close()
    return digest(state), counts


def save(folder, replicas=None, step=1, state=None, **arguments):
    with AsyncCheckpointer(folder, replicas=replicas, **arguments) as checkpointer:
        handle = checkpointer.save(step, state_of() if state is None else state)
        handle.result()
    return handle.bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Give checkpoints that one process saved: a whole one, and a damaged one."""
    folder = tmp_path_factory.mktemp("replicas")
    save(folder / "one")
    save(folder / "damaged")
    (file,) = files_of(folder / "damaged")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return folder


# ------------------------------------------------------------------------------------------------ saves and restores


def parts_of(model, optimizer):
    parts = [one.to_local() for one in model.parameters()]
    return [
        one.clone()
        for one in (
            *parts,
            *(values[key].to_local() for values in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")),
        )
    ]


def _hsdp(folder, mesh):
    """Save and restore HSDP. Returns whether all parts came back, and the bytes that were read."""
    model, optimizer = sharded(1, mesh)
    saved = parts_of(model, optimizer)
    save(folder / "hsdp", mesh["replicate"], state={"model": model, "optimizer": optimizer})
    model, optimizer = sharded(2, mesh)
    before = parts_of(model, optimizer)
    checkpointer = AsyncCheckpointer(folder / "hsdp", replicas=mesh["replicate"], options=DIRECT)
    if dist.get_rank() == 0:
        drop_cache(*files_of(folder / "hsdp"))
    dist.barrier()
    begun = read_bytes()
    checkpointer.restore({"model": model, "optimizer": optimizer})
    counts = read_bytes() - begun
    after = parts_of(model, optimizer)
    is_back = all(map(torch.equal, after, saved)) and not all(map(torch.equal, before, saved))
    return is_back, counts


def _loads(rank, folder):
    restored(folder / "one")  # imports are read from storage too
    found = {"one": restored(folder / "one"), "verify": restored(folder / "one", verify=True)}
    with AsyncCheckpointer(folder / "ddp", replicas="auto") as checkpointer:
        state = state_of(5)
        found["bytes"] = checkpointer.save(5, state).bytes
        state["table"].zero_()
        state["model"] = state["step"] = None
        checkpointer.wait()
        found["memory"] = checkpointer._staging.size_bytes
    found["ddp"] = restored(folder / "ddp")
    save(folder / "each", step=3, state={"mine": torch.full((5000,), float(rank))})
    mine = {"mine": torch.zeros(5000)}
    AsyncCheckpointer(folder / "each", replicas="auto").restore(mine)
    found["each"] = mine["mine"][0].item()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _hsdp(folder, mesh)
    found["hsdp"] = _hsdp(folder, mesh)
    with two_nodes(rank):  # which a group asks once
        others = dist.new_group()
        found |= {once: restored(folder / "one", others, once=once) for once in ("node", "job")}
    found["alone"] = error_of(lambda: AsyncCheckpointer(folder / "one").restore(state_of(0)))
    return found


@pytest.fixture(scope="module")
def loads(folder):
    return on_ranks(RANKS, _loads, folder)


@pytest.mark.parametrize(("name", "copies"), [("one", 1), ("verify", 1), ("ddp", 1), ("node", 2), ("job", 1)])
def test_replicas_have_all_bytes_and_the_storage_reads_them_once(name, copies, loads, folder):
    assert {rank[name][0] for rank in loads} == {digest(state_of(5 if name == "ddp" else 1))}
    (file,) = files_of(folder / ("ddp" if name == "ddp" else "one"))
    if not drop_cache(file):
        pytest.skip("this file system has no storage")
    size, counts = file.stat().st_size, [rank[name][1] for rank in loads]
    assert copies * size <= sum(counts) + MIB and sum(counts) <= 1.02 * copies * size + RANKS * MIB
    assert max(counts) < 1.6 * copies * size / RANKS + MIB


def test_one_replica_saves_for_all_and_the_others_need_no_memory(loads, folder):
    assert len(files_of(folder / "ddp")) == 1
    assert (
        [rank["bytes"] > 0 for rank in loads] == [rank["memory"] > 0 for rank in loads] == [True, False, False, False]
    )


def test_replicas_of_hsdp_save_and_read_each_shard_once(loads, folder):
    assert [rank["hsdp"][0] for rank in loads] == [True] * RANKS
    files = files_of(folder / "hsdp")
    assert len(files) == 2
    if drop_cache(*files):
        size = sum(file.stat().st_size for file in files)
        assert sum(rank["hsdp"][1] for rank in loads) <= 1.05 * size + RANKS * MIB


def test_each_rank_restores_the_value_that_it_saved_for_itself(loads):
    assert [rank["each"] for rank in loads] == [0.0, 1.0, 2.0, 3.0]


def test_a_checkpoint_of_one_rank_needs_replicas_on_several(loads):
    for rank in loads:
        kind, text, _, _ = rank["alone"]
        assert kind == "ValueError" and 'was saved by one rank, and these are 4: give replicas="auto" if' in text


def _restore_on(rank, folder):
    return [restored(folder / "ddp")[0] for _ in range(2)]


def test_another_number_of_replicas_restores(loads, folder):
    assert on_ranks(2, _restore_on, folder) == [[digest(state_of(5))] * 2] * 2
    state = state_of(0)
    assert AsyncCheckpointer(folder / "ddp").restore(state) == 5
    assert digest(state) == digest(state_of(5))


def _in_a_store(rank, folder):
    """Have ranks 0 and 1, and 2 and 3, be replicas: the second state is not that of rank 1."""
    install(FolderStore(folder / "bucket"))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    arguments = {"replicas": pairs[rank // 2], "upload": "s3://bucket/run"}
    with AsyncCheckpointer(folder / "run", **arguments) as checkpointer:
        checkpointer.save(1, {"a": torch.full((5000,), float(rank // 2))}).upload_result()
    state = {"a": torch.zeros(5000)}
    with AsyncCheckpointer(folder / "elsewhere", **arguments) as checkpointer:
        assert checkpointer.restore(state) == 1
    return state["a"][0].item()


def test_replicas_upload_each_file_once_and_restore_from_the_store(tmp_path):
    assert on_ranks(RANKS, _in_a_store, tmp_path) == [0.0, 0.0, 1.0, 1.0]
    assert [path.name.split("-")[1] for path in files_of(tmp_path / "bucket" / "run")] == ["0", "2"]


# ------------------------------------------------------------------------------------------------ errors


def _errors(rank, folder):
    def restore(name="one", replicas="auto", options=DIRECT, state=None, **arguments):
        checkpointer = AsyncCheckpointer(folder / name, replicas=replicas, options=options)
        return error_of(lambda: checkpointer.restore(state_of(0) if state is None else state, **arguments))

    def save_it(value, replicas="auto"):
        with AsyncCheckpointer(folder / "differ", replicas=replicas) as checkpointer:
            return error_of(checkpointer.save(1, {"value": value}).result)

    def construct(**arguments):
        return error_of(lambda: AsyncCheckpointer(folder / "none", **arguments))

    class Broken(Model):
        def state_dict(self):
            raise ArithmeticError("no state")

    groups = [dist.new_group([0, 1]), dist.new_group([1, 2, 3])]
    mesh = init_device_mesh("cpu", (RANKS,))
    found = {
        "read": restore(options=FAILS if rank == 1 else DIRECT),
        "damaged": restore("damaged", verify=True),
        "shapes": restore(state={"table": torch.zeros(2)} if rank == 2 else None),
        "arguments": restore(verify=rank > 1),
        "once": restore(once="job" if rank == 0 else None),
        "wrong once": restore(once="twice"),
        "state": restore(state={"model": Broken(1)} if rank == 3 else None),
        "after": restore(),
        "values": save_it(rank // 2),
        "names": save_it({"a": 1} if rank else {"b": 1}),
        "shards": save_it(distribute_tensor(torch.zeros(8), mesh, [Shard(0)])),
        "replicated": save_it(distribute_tensor(torch.zeros(8), mesh)),
        "division": construct(replicas=groups[0 if rank == 0 else 1]),
        "none": construct(replicas="all"),
        "peers": construct(replicas="auto", peers=1, memory_folder=folder / "memory"),
    }
    value = (lambda: None) if rank == 0 else 1
    found["unpicklable"] = save_it(value) if rank else error_of(lambda: save_it(value))
    return found


@pytest.fixture(scope="module")
def errors(folder):
    return on_ranks(RANKS, _errors, folder)


@pytest.mark.parametrize(
    ("name", "kind", "text", "rank"),
    [
        ("read", "IoError", "rank-0-", 1),
        ("damaged", "CorruptData", "has the checksum", None),
        ("shapes", "ValueError", "table", 2),
        ("arguments", "ValueError", "verify=False on ranks 0, 1, True on ranks 2, 3", None),
        ("once", "ValueError", "once='job' on rank 0, None on ranks 1-3", None),
        ("wrong once", "ValueError", "once='twice'", None),
        ("values", "SaveAborted", "ranks 0-3 in one group, and their states differ: value is 0 on ranks 0, 1, 1", None),
        ("names", "SaveAborted", "value.b is 1 on rank 0, not there on ranks 1-3", None),
        ("shards", "SaveAborted", "value is part (0,) of a tensor of (8,)", None),
        ("division", "ValueError", "rank 0 has a group of ranks 0, 1, and rank 1 one of ranks 1-3", None),
        ("none", "ValueError", "replicas='all'", None),
        ("peers", "ValueError", "give one of them", None),
    ],
)
def test_all_ranks_raise_the_error_of_one(name, kind, text, rank, errors):
    assert {error[name][:2] for error in errors} == {errors[0][name][:2]}
    for error in errors:
        assert error[name][0] == kind and text in error[name][1]
        assert error[name][3] < 30
        if rank is not None:
            assert error[name][2] == [f"on rank {rank} of {RANKS} that read together"]


def test_an_error_of_a_state_reaches_the_others_before_they_read(errors):
    kinds = [error["state"][:2] for error in errors]
    assert kinds == [("SaveAborted", "rank 3 failed: ArithmeticError: no state")] * 3 + [
        ("ArithmeticError", "no state")
    ]


def test_a_state_that_cannot_be_pickled_is_an_error_on_its_replicas(errors):
    assert errors[0]["unpicklable"][0] in ("AttributeError", "PicklingError")
    for error in errors[1:]:
        assert error["unpicklable"][0] == "SaveAborted" and error["unpicklable"][1].startswith("rank 0 failed: ")


def test_ranks_restore_and_save_after_errors(errors):
    assert [error["after"] for error in errors] == [error["replicated"] for error in errors] == [None] * RANKS


def _die_on_rank_2(rank, folder, source, owner, name):
    original = getattr(owner, name)

    def die(*arguments):
        os.kill(os.getpid(), signal.SIGKILL)

    checkpointer = AsyncCheckpointer(source / "one", replicas="auto", timeout_s=20)
    with changed(owner, name, die if rank == 2 else original):
        found = error_of(lambda: checkpointer.restore(state_of(0)))
    (folder / f"error-{rank}").write_text(repr(found))
    os._exit(0)  # torch's own end of the group would wait for the dead rank


@pytest.mark.parametrize(("owner", "name"), [(TensorReader, "_read"), (routes.CpuRoute, "exchange")])
def test_a_rank_that_dies_is_an_error_on_the_others(owner, name, folder, tmp_path):
    with pytest.raises(BaseException):  # no rank answers  # noqa: B017
        on_ranks(RANKS, _die_on_rank_2, tmp_path, folder, owner, name)
    for rank in (0, 1, 3):
        kind, text, _, seconds = ast.literal_eval((tmp_path / f"error-{rank}").read_text())
        assert kind == "RankLost" and "has ended" in text and seconds < 15


def _silent(rank, folder, source):
    """Have rank 1 be silent until rank 0 has given it up, and restore again afterwards."""
    given_up = folder / "given-up"

    def expect_late(reader, *arguments):
        assert eventually(given_up.exists, 30)
        return expect(reader, *arguments)

    def lost(agreement, error):
        given_up.touch()
        return its_error(agreement, error)

    expect, its_error, options = TensorReader.expect, Agreement.lost, EngineOptions(stall_timeout_s=0.4)
    checkpointer = AsyncCheckpointer(source / "one", replicas="auto", options=options)
    with changed(TensorReader, "expect", expect_late if rank == 1 else expect), changed(Agreement, "lost", lost):
        error = error_of(lambda: checkpointer.restore(state_of(0)))
    again = state_of(0)
    checkpointer.restore(again)
    return error, digest(again), restored(source / "one")[0]


def test_a_silent_rank_is_an_error_and_the_ranks_restore_again(folder, tmp_path):
    for error, its, of_another in on_ranks(2, _silent, tmp_path, folder):
        assert error[0] == "RankLost" and "silent for 2 s" in error[1] and error[3] < 20
        assert its == of_another == digest(state_of(1))


# ------------------------------------------------------------------------------------------------ GPUs


def _on_gpus(rank, folder):
    """Save and restore on a GPU each, in a process group of NCCL, two replicas."""
    dist.destroy_process_group()
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/nccl", 2)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    state = state_of(3)
    state["model"].tensors = {key: value.cuda() for key, value in state["model"].tensors.items()}
    expected = digest(state)
    save(folder / "gpus", replicas="auto", step=3, state=state)
    restored(folder / "gpus", state=state)  # the first one starts NCCL
    for tensor in state["model"].tensors.values():
        tensor.zero_()
    found, read = restored(folder / "gpus", state=state)
    devices = {tensor.device for tensor in state["model"].tensors.values()}
    return found == expected, devices == {torch.device("cuda", rank)}, read


@pytest.mark.gpu
@pytest.mark.timeout(200)
def test_replicas_on_two_gpus_have_all_bytes_and_the_storage_reads_them_once(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("there are no two GPUs")
    found = on_ranks(2, _on_gpus, tmp_path)
    assert all(is_equal and is_in_place for is_equal, is_in_place, _ in found)
    files = files_of(tmp_path / "gpus")
    if not drop_cache(*files):
        pytest.skip("this file system has no storage")
    size_bytes = sum(file.stat().st_size for file in files)
    assert size_bytes <= sum(read for *_, read in found) < 1.05 * size_bytes + MIB


def _is_silent_before_replicas_read(rank, folder):
    with AsyncCheckpointer(folder / "run", replicas="auto", timeout_s=3) as checkpointer:
        checkpointer.save(1, {"a": torch.ones(3)}).result(30)
        if rank == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Agreement, "twin", lambda self: time.sleep(12) or self.drop_twin())
                return error_of(lambda: checkpointer.restore({"a": torch.zeros(3)}))
        began = time.monotonic()
        error = error_of(lambda: checkpointer.restore({"a": torch.zeros(3)}))
        return error, time.monotonic() - began


def test_replicas_wait_for_one_that_is_silent_no_longer_than_timeout_s(tmp_path):
    (error, waited_s), _ = on_ranks(2, _is_silent_before_replicas_read, tmp_path)
    assert "RankLost" in str(error) and waited_s < 10
