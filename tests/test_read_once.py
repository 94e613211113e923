"""`load(group=)`: ranks read once what several want, and share the errors."""

import ast
import contextlib
import hashlib
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import MIB, drop_cache
from object_server import serving
from test_dcp import on_ranks
from torch.distributed.device_mesh import init_device_mesh

import gdsdata
from gdsdata import EngineOptions
from gdsdata.checkpoint import api, casts
from gdsdata.checkpoint.extents import Extents, SharedExtents
from gdsdata.checkpoint.open_object import OpenObject
from gdsdata.checkpoint.tensor_reader import TensorReader
from gdsdata.collective import agreement, routes
from gdsdata.collective.plan import Parts
from gdsdata.errors import RankLost

DIRECT = EngineOptions(direct="always")
FAILS = EngineOptions(direct="always", faults="seed=1,fail=1")
RANKS = 4


def state_of(long_count=12):
    """Return long tensors, short ones, an empty one, and two that are views of one storage."""
    torch.manual_seed(4)
    state = {f"layers.{i}.weight": torch.randn(700_000 + i) for i in range(long_count)}
    state |= {f"layers.{i}.bias": torch.randn(1000 + i) for i in range(200)}
    return state | {"empty": torch.empty(0, 3), "half": torch.randn(900_000).half()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("once")
    state = state_of()
    gdsdata.save(state, folder / "m.safetensors")
    whole = torch.randn(500_000)
    gdsdata.save({**state, "step": 7, "a": whole[:300_000], "b": whole[200_000:]}, folder / "m.pt")
    names = sorted(state)
    for number in range(3):
        gdsdata.save({name: state[name] for name in names[number::3]}, folder / f"part-{number}.safetensors")
    of_tensor = {name: f"part-{place % 3}.safetensors" for place, name in enumerate(names)}
    (folder / "m.safetensors.index.json").write_text(repr({"weight_map": of_tensor}).replace("'", '"'))
    damaged = bytearray((folder / "m.safetensors").read_bytes())
    damaged[20 * MIB] ^= 1
    (folder / "damaged.safetensors").write_bytes(damaged)
    gdsdata.save({"x": torch.zeros(3)}, folder / "small.pt")
    return folder


def digest_of(state):
    found = hashlib.sha1()
    for name in sorted(state):
        value = state[name]
        content = (
            value.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes() if torch.is_tensor(value) else value
        )
        found.update(f"{name}{content!r}".encode() if not isinstance(content, bytes) else name.encode() + content)
    return found.hexdigest()


def read_bytes():
    """Return how many bytes this process had the storage read."""
    (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("read_bytes"))
    return int(line.split()[1])


def error_of(call):
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "__notes__", []), time.monotonic() - began
    return None


def counted(folder, name, **arguments):
    """Load a file that is in no cache. Returns the digest, and the bytes that this rank read."""
    if dist.get_rank() == 0:
        drop_cache(*folder.glob("*.safetensors"), *folder.glob("*.pt"))
    dist.barrier()
    before = read_bytes()
    found = gdsdata.load(folder / name, group="auto", **arguments)
    counts = read_bytes() - before
    dist.barrier()
    return digest_of(found), counts


@contextlib.contextmanager
def changed(owner, name, value):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


def two_nodes(rank):
    return changed(agreement, "node_name", lambda: f"node {rank // 2}")


def _loads(rank, folder):
    counted(folder, "small.pt")  # imports are read from storage too
    found = {
        name: counted(folder, name, options=DIRECT) for name in ("m.safetensors", "m.pt", "m.safetensors.index.json")
    }
    found["verify"] = counted(folder, "m.safetensors", verify=True, options=DIRECT)
    with changed(casts, "ROUND_BYTES", 3 * MIB):
        only = ["layers.*"] if rank == 1 else None  # so its rounds would be others
        found["float16"] = counted(folder, "m.safetensors", dtype=torch.float16, only=only, options=DIRECT)
    found["parts"] = counted(folder, "m.safetensors", only=[f"layers.{rank}.*", "*.bias", "half"], options=DIRECT)
    into = {name: torch.zeros_like(value) for name, value in state_of().items()}
    found["into"] = counted(folder, "m.safetensors", into=into, options=DIRECT)
    found["other files"] = counted(folder, "m.pt" if rank == 1 else "m.safetensors", options=DIRECT)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found["mesh"] = digest_of(gdsdata.load(folder / "m.pt", group=mesh["dp"]))
    found["chosen"] = digest_of(gdsdata.load(folder / "m.pt", group="auto", only=["*"] if rank else None))
    return found


def _errors(rank, folder):
    def load(name="m.safetensors", **arguments):
        return error_of(lambda: gdsdata.load(folder / name, group="auto", **arguments))

    def with_another_version(extents):
        wants = _wants(extents)
        return wants._replace(files=tuple(file._replace(version=5) for file in wants.files))

    _wants = SharedExtents._wants
    found = {
        "missing": load("lost.pt" if rank == 2 else "m.pt"),
        "after": load(),
        "read": load(options=FAILS if rank == 1 else DIRECT),
        "damaged": load("damaged.safetensors", verify=True),
        "into": load(into={"other": torch.zeros(3)} if rank == 3 else None),
        "arguments": load(verify=rank > 1),
        "once": load(once="job" if rank == 0 else None),
        "wrong once": load(once="twice"),
    }
    with changed(SharedExtents, "_wants", with_another_version if rank == 3 else _wants):
        found["versions"] = load()
    return found | {"at last": load()}


def _on_two_nodes(rank, folder):
    with two_nodes(rank):
        return {once: counted(folder, "m.safetensors", once=once, options=DIRECT) for once in ("node", "job")}


def _slow(rank, folder):
    def slowly(reader, *arguments):
        if rank == 2:
            time.sleep(2.5)
        return read(reader, *arguments)

    def open_late(path):
        time.sleep(4)  # nothing says meanwhile that this rank is alive
        return open_path(path)

    read, open_path = TensorReader._read, api.open_path
    patient, options = EngineOptions(stall_timeout_s=1.0), EngineOptions(stall_timeout_s=0.4)
    with changed(TensorReader, "_read", slowly), changed(agreement, "_BEAT_S", 0.1):
        digest = digest_of(gdsdata.load(folder / "m.safetensors", group="auto", options=patient))
    with changed(api, "open_path", open_late if rank == 1 else api.open_path):
        return digest, error_of(lambda: gdsdata.load(folder / "m.pt", group="auto", options=options))


@pytest.fixture(scope="module")
def loads(folder):
    return on_ranks(RANKS, _loads, folder)


@pytest.fixture(scope="module")
def errors(folder):
    return on_ranks(RANKS, _errors, folder)


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt", "m.safetensors.index.json", "verify", "into"])
def test_replicas_have_all_bytes_and_the_storage_reads_them_once(name, loads, folder):
    file = name if name.startswith("m.") else "m.safetensors"
    assert {rank[name][0] for rank in loads} == {digest_of(gdsdata.load(folder / file))}
    if not drop_cache(folder / "m.pt"):
        pytest.skip("this file system has no storage")
    files = [folder / file] if file != "m.safetensors.index.json" else list(folder.glob("part-*"))
    size = sum(one.stat().st_size for one in files)
    counts = [rank[name][1] for rank in loads]
    assert size <= sum(counts) + MIB and sum(counts) <= 1.02 * size + RANKS * MIB  # headers, which all read
    assert max(counts) < 1.5 * size / RANKS + MIB


def test_ranks_that_want_different_tensors_share_those_in_common(loads, folder):
    whole = gdsdata.load(folder / "m.safetensors")
    total = 0
    for rank, found in enumerate(loads):
        mine = {name: value for name, value in whole.items() if name.startswith(f"layers.{rank}.")}
        common = {name: value for name, value in whole.items() if name.endswith(".bias") or name == "half"}
        assert found["parts"][0] == digest_of(mine | common)
        total += mine[f"layers.{rank}.weight"].nbytes
    if drop_cache(folder / "m.pt"):
        total += sum(value.nbytes for value in common.values())
        assert sum(rank["parts"][1] for rank in loads) <= 1.1 * total + RANKS * MIB


def test_ranks_may_load_different_files_and_be_done_early(loads, folder):
    for rank, found in enumerate(loads):
        name = "m.pt" if rank == 1 else "m.safetensors"
        assert found["other files"][0] == digest_of(gdsdata.load(folder / name))
        assert found["mesh"] == found["chosen"] == digest_of(gdsdata.load(folder / "m.pt"))


def test_ranks_that_cast_different_tensors_share_those_in_common(loads, folder):
    whole = gdsdata.load(folder / "m.safetensors")
    for rank, found in enumerate(loads):
        wanted = {name: value.half() for name, value in whole.items() if rank != 1 or name.startswith("layers.")}
        assert found["float16"][0] == digest_of(wanted)
    if drop_cache(folder / "m.safetensors"):
        size_bytes = sum(value.nbytes for value in whole.values())
        of_guesses = RANKS * 4 * MIB  # each rank began as if all wanted the same
        assert sum(rank["float16"][1] for rank in loads) <= size_bytes + of_guesses


@pytest.mark.parametrize(
    ("name", "kind", "text", "rank"),
    [
        ("missing", "FileNotFoundError", "lost.pt", 2),
        ("read", "IoError", "m.safetensors", 1),
        ("damaged", "CorruptData", "has the checksum", None),
        ("into", "ValueError", "no name in common", 3),
        ("arguments", "ValueError", "verify=False on ranks 0, 1, True on ranks 2, 3", None),
        ("once", "ValueError", "once='job' on rank 0, None on ranks 1-3", None),
        ("wrong once", "ValueError", 'once=\'twice\': give "node", "job" or None', None),
        ("versions", "CorruptData", "differs between the ranks", None),
    ],
)
def test_all_ranks_raise_the_error_of_one(name, kind, text, rank, errors):
    assert {error[name][:2] for error in errors} == {errors[0][name][:2]}
    for error in errors:
        assert error[name][0] == kind and text in error[name][1]
        assert error[name][3] < 20
        if rank is not None:
            assert error[name][2] == [f"on rank {rank} of {RANKS} that read together"]


def test_the_group_works_after_errors(errors):
    assert [error["after"] for error in errors] == [error["at last"] for error in errors] == [None] * RANKS


def test_nodes_read_each_by_themselves_or_once_for_all(folder):
    found = on_ranks(RANKS, _on_two_nodes, folder)
    assert {digest for rank in found for digest, _ in rank.values()} == {digest_of(state_of())}
    if drop_cache(folder / "m.pt"):
        size = (folder / "m.safetensors").stat().st_size
        for once, copies in (("node", 2), ("job", 1)):
            assert sum(rank[once][1] for rank in found) == pytest.approx(copies * size, rel=0.03)


def test_a_slow_read_is_awaited_and_a_silent_rank_is_not(folder):
    for digest, error in on_ranks(2, _slow, folder):
        assert digest == digest_of(state_of())
        assert error[0] == "RankLost" and "silent for 2 s" in error[1] and error[3] < 10


def _die_on_rank_2(rank, folder, owner, name):
    original = getattr(owner, name)

    def die(*arguments):
        os.kill(os.getpid(), signal.SIGKILL)

    with changed(owner, name, die if rank == 2 else original):
        found = error_of(lambda: gdsdata.load(folder / "m.safetensors", group="auto"))
    (folder / f"error-{rank}").write_text(repr(found))
    while len(list(folder.glob("error-*"))) < RANKS - 1:
        time.sleep(0.01)
    os._exit(0)


def _load_when_a_rank_comes_later(rank, folder):
    options = EngineOptions(stall_timeout_s=0.2)
    for _ in range(2 if rank == 0 else 0):
        with pytest.raises(RankLost, match="not all of them had begun"):
            gdsdata.load(folder / "small.pt", group="auto", options=options)
    dist.barrier()
    return len(gdsdata.load(folder / "small.pt", group="auto", options=options))


def test_a_rank_that_comes_after_others_have_given_up_reads_with_them(folder):
    assert on_ranks(2, _load_when_a_rank_comes_later, folder) == [1, 1]


@pytest.mark.parametrize(("owner", "name"), [(TensorReader, "_read"), (routes.CpuRoute, "exchange")])
def test_a_rank_that_dies_is_an_error_on_the_others(owner, name, folder, tmp_path):
    shutil.copy(folder / "m.safetensors", tmp_path)
    with pytest.raises(BaseException):  # no rank answers  # noqa: B017
        on_ranks(RANKS, _die_on_rank_2, tmp_path, owner, name)
    for rank in (0, 1, 3):
        kind, _, _, seconds = ast.literal_eval((tmp_path / f"error-{rank}").read_text())
        assert kind == "RankLost" and seconds < 20


def _load_url(rank, folder, url):
    with two_nodes(rank):
        return [digest_of(gdsdata.load(url, group="auto", once=once)) for once in (None, "node")]


def test_ranks_of_all_nodes_read_a_url_once(folder, monkeypatch):
    name = "part-0.safetensors"
    with serving(monkeypatch) as server:
        server.content[name] = (folder / name).read_bytes()
        found = on_ranks(RANKS, _load_url, folder, f"{server.address}/bucket/{name}")
        asked = sum(end - begin for method, _, begin, end in server.requests if method == "GET")
    assert {digest for rank in found for digest in rank} == {digest_of(gdsdata.load(folder / name))}
    heads = 2 * RANKS * OpenObject.ends_bytes  # each rank reads them, for the header
    assert asked - heads == pytest.approx(3 * len(server.content[name]), rel=0.05)  # once, and by each of two nodes


class _Event:
    """An event of a GPU that has done its work at the second look."""

    def __init__(self):
        self._looks = 0

    def record(self):
        pass

    def query(self):
        self._looks += 1
        return self._looks > 1


def _error_is_shared_and_leaves_doubt(rank, folder, patch):
    """Have a transfer between GPUs fail on rank 1 before anything moves."""

    def fail(route, *memories):
        if rank == 1:
            raise RuntimeError("NCCL fails")

    with patch.context() as inner:
        inner.setattr(routes.GpuRoute, "broadcast", fail)
        error = error_of(lambda: gdsdata.load(folder / "m.safetensors", group="auto"))
    return error[:1] == (("RuntimeError",) if rank == 1 else ("RankLost",))


def _load_by_the_gpus_route(rank, folder):
    """Have the CPU's tensors take the way of a GPU's: the user's group, here of gloo."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    moved, wants_gpu = {"exchange": 0, "broadcast": 0}, True

    def watch(name):
        original = getattr(routes.GpuRoute, name)

        def watched(route, *memories):
            moved[name] += sum(map(len, memories))
            original(route, *memories)

        patch.setattr(routes.GpuRoute, name, watched)

    original = SharedExtents.__init__

    def with_gpu(extents, *arguments):
        original(extents, *arguments)
        extents._gpu = torch.device("cpu") if wants_gpu else None

    def load(group="auto", **arguments):
        return digest_of(gdsdata.load(folder / "m.safetensors", group=group, **arguments))

    def load_few():
        return load(only=["*.bias"])

    with pytest.MonkeyPatch.context() as patch:

        def use_gpu(number, has_one=True):
            patch.setattr(routes, "number_of_gpu", lambda device: number)
            patch.setattr(routes, "current_gpu", lambda: torch.device("cpu") if has_one else None)

        use_gpu(1 + rank)
        patch.setattr(SharedExtents, "__init__", with_gpu)
        watch("exchange"), watch("broadcast")
        patch.setattr(routes, "reaches_gpus", lambda session: True)
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(torch.cuda, "Event", _Event)
        wants_gpu = rank != 1  # which takes part in connecting the others
        few = [load_few()]
        use_gpu(max(1, rank))  # the GPU of rank 0 is the current one of rank 1 too
        with pytest.warns(RuntimeWarning, match="several ranks use the same GPU"):
            few.append(load_few())
        use_gpu(1 + rank, rank != 1)
        with pytest.warns(RuntimeWarning, match="a rank of the group has no GPU"):
            few.append(load_few())
        wants_gpu = True
        found = [load(), load(mesh["dp"])]
        use_gpu(10 + rank)  # all ranks change theirs: NCCL connects them again
        few.append(load_few())
        before = dict(moved)
        use_gpu(1 + rank if rank == 1 else 10 + rank)
        with pytest.warns(RuntimeWarning, match="some ranks use another GPU than in an earlier load"):
            few.append(load_few())
        use_gpu(1 + rank)
        assert _error_is_shared_and_leaves_doubt(rank, folder, patch)
        with pytest.warns(RuntimeWarning, match="an earlier load has left transfers"):
            few.append(load_few())
        assert moved == before
    return found, few, moved


def test_gpus_pass_bytes_on_over_the_users_group(folder):
    few_of_all = {name: value for name, value in state_of().items() if name.endswith(".bias")}
    for rank, (found, few, moved) in enumerate(on_ranks(RANKS, _load_by_the_gpus_route, folder)):
        assert set(found) == {digest_of(state_of())} and set(few) == {digest_of(few_of_all)}
        assert moved["broadcast"] > 0  # where all ranks want the same
        assert (moved["exchange"] > 0) == (rank != 1)  # where rank 1 wants nothing on its GPU


def test_without_other_ranks_a_group_changes_nothing(folder):
    assert digest_of(gdsdata.load(folder / "m.pt", group="auto", once="job")) == digest_of(
        gdsdata.load(folder / "m.pt")
    )
    with pytest.raises(ValueError, match="once='twice'"):
        gdsdata.load(folder / "m.pt", once="twice")


def test_shared_extents_know_the_memory_of_each_part():
    """Rows of a tensor are extents into its storage; a part of one is in the right place."""
    target = torch.arange(32, dtype=torch.uint8)
    extents = Extents(["a", "b"], [], [0, 8], [4, 8], [2, 20], [target, target.untyped_storage()], 12)
    shared = SharedExtents({torch.device("cpu"): extents}, {}, False)
    memories = shared.memories(Parts(np.array([0, 1]), np.array([1, 3]), np.array([2, 5])))
    assert [one.tolist() for one in memories] == [[3, 4], [23, 24, 25, 26, 27]]


def test_shared_extents_know_the_memory_of_one_element_of_any_stride():
    target = torch.arange(9.0)[4::7]
    extents = Extents(["a"], [], [0], [4], [0], [target], 4)
    (memory,) = SharedExtents({torch.device("cpu"): extents}, {}, False).memories(
        Parts(np.array([0]), np.array([0]), np.array([4]))
    )
    assert memory.view(torch.float32).tolist() == [4.0]
