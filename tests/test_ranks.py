"""A process's share of the data: the environment's variables, and when a data set reads them."""

import os
import warnings
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist
from helpers import arrays, assert_same_batches, grouped, in_new_process, write_records
from torch.utils.data import DataLoader

from gdsdata import GDSDataset, Mix, Sharding
from gdsdata.data import ranks
from gdsdata.data.order import measured
from gdsdata.data.ranks import EpochRanks, Ranks, Share
from gdsdata.formats import Records

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "OMPI_", "MPI_", "PMI_", "SLURM_")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)
    ranks._warn_once.cache_clear()


def found(monkeypatch, said):
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    return Ranks().found()


# ------------------------------------------------------------------------------------------------- the environment


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, None),
        ({"RANK": "2", "WORLD_SIZE": "4"}, (2, 4)),
        ({"WORLD_SIZE": "1"}, (0, 1)),
        ({"RANK": "0"}, (0, 1)),
        ({"RANK": "", "WORLD_SIZE": ""}, None),
        # Lightning's launcher
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "3", "NODE_RANK": "0"}, (3, 4)),
        ({"WORLD_SIZE": "8", "LOCAL_RANK": "1", "NODE_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, (5, 8)),
        ({"LOCAL_RANK": "0", "NODE_RANK": "0"}, None),  # its rank 0 after a fit
        # MPI
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2)),
        # SLURM: a task of srun, also in an interactive allocation
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (1, 2)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, (0, 2)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0"}, (0, 2)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEPID": "3"}, (0, 2)),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "1", "SLURM_JOB_NAME": "bash"}, (0, 2)),
        # salloc's shell, on the login node and by use_interactive_step; one task of many
        ({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "interactive"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "7"}, None),
        # The launcher that was called last decides.
        ({"RANK": "3", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "LOCAL_RANK": "1"}, (3, 4)),
        ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (5, 8)),
        ({"WORLD_SIZE": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (1, 2)),
    ],
    ids=str,
)
def test_the_environment_says_rank_and_world_size(monkeypatch, said, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found(monkeypatch, said) == expected


@pytest.mark.parametrize(
    ("said", "current", "expected"),
    [
        ({}, 0, "cuda"),
        ({"LOCAL_RANK": "0"}, 0, "cuda"),
        ({"LOCAL_RANK": "3"}, 0, "cuda:3"),
        ({"LOCAL_RANK": "3"}, 2, "cuda"),  # the program chose one
        ({"LOCAL_RANK": "4"}, 0, "cuda"),  # each process sees GPUs of its own, or several share one
        ({"LOCAL_RANK": ""}, 0, "cuda"),
        ({"LOCAL_RANK": "x"}, 0, "cuda"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 0, "cuda:1"),
        ({"MPI_LOCALRANKID": "1"}, 0, "cuda:1"),
        ({"SLURM_LOCALID": "2"}, 0, "cuda:2"),
        ({"LOCAL_RANK": "1", "SLURM_LOCALID": "0"}, 0, "cuda:1"),  # torchrun in a task of srun
    ],
    ids=str,
)
def test_a_launcher_says_which_gpu_batches_go_to(monkeypatch, said, current, expected):
    in_process(monkeypatch, said, current)
    assert ranks.device_of_batches(None) == expected


def in_process(monkeypatch, said, current=0):
    """Have this process see four GPUs, and these variables."""
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda")])
def test_a_gpu_that_another_process_probably_uses_is_warned_of(monkeypatch, device):
    in_process(monkeypatch, {"LOCAL_RANK": "3"})
    with pytest.warns(UserWarning, match=r'"cuda" is cuda:0 .* is 3\. If it trains on cuda:3, leave device= out'):
        assert ranks.device_of_batches(device) == device


@pytest.mark.parametrize(
    ("device", "current", "said"),
    [("cuda:0", 0, "3"), (torch.device("cuda", 0), 0, "3"), ("cpu", 0, "3"), ("cuda", 3, "3"), ("cuda", 0, "0")],
)
def test_a_device_that_is_named_or_chosen_is_not_warned_of(monkeypatch, device, current, said):
    in_process(monkeypatch, {"LOCAL_RANK": said}, current)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ranks.device_of_batches(device) == device


def test_without_a_gpu_batches_go_to_the_cpu_of_any_process(monkeypatch, tmp_path):
    write_records(tmp_path / "0.bin", 4, 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    sharding = Sharding(rank=1, world_size=2)
    assert GDSDataset(tmp_path / "0.bin", 1, Records("u1", (8,)), sharding=sharding).device == torch.device("cpu")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"WORLD_SIZE": "4"}, "RANK is not set, WORLD_SIZE is '4', LOCAL_RANK is not set: there are several processes"),
        ({"RANK": "1"}, "RANK is '1', WORLD_SIZE is not set"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK is '1': there are several processes"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, "RANK is 'x', which is no number"),
        ({"RANK": "1", "WORLD_SIZE": "-"}, "WORLD_SIZE is '-', which is no number"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK is '4', WORLD_SIZE is '4': that is no rank of so many"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK is '-1'"),
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODE_RANK": "1"}, "how many ranks a node has is not said"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "2", "NODE_RANK": "0"}, "that is rank 2 of 2"),
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "1"}, "there are several processes"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE is not set"),
        ({"PMI_SIZE": "2"}, "PMI_RANK is not set"),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "2"}, "SLURM_PROCID is '2', SLURM_NTASKS is '2'"),
        ({"WORLD_SIZE": "4", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "its launcher says rank 1 of 2"),
        ({"RANK": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "its launcher says rank 1 of 2"),
    ],
    ids=str,
)
def test_an_environment_that_says_half_or_nonsense_is_refused(monkeypatch, said, words):
    with pytest.raises(ValueError) as error:
        found(monkeypatch, said)
    assert words in str(error.value)
    assert "pass sharding=gdsdata.Sharding(rank=..., world_size=...), or call init_process_group()" in str(error.value)


@pytest.mark.parametrize(
    "said",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},  # a batch script, or its notebook
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "bash"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "interactive", "SLURM_STEP_ID": "0"},
    ],
    ids=str,
)
def test_one_process_of_an_allocation_for_several_is_alone_and_warns_once(monkeypatch, said):
    with pytest.warns(UserWarning, match="allocation is for 4 tasks, but srun did not start this process") as warned:
        assert found(monkeypatch, said) is None and found(monkeypatch, said) is None
    assert len(warned) == 1


class Mesh:
    """A mesh of two nodes of four, of which this is the third process of the second."""

    mesh_dim_names, ndim = ("node", "gpu"), 2

    def get_coordinate(self):
        return [1, 2]

    def size(self, dim):
        return (2, 4)[dim]


@pytest.mark.parametrize(
    ("dims", "expected"), [("gpu", (2, 4)), (-2, (1, 2)), (("node", "gpu"), (6, 8)), ((1, 0), (5, 8))]
)
def test_dimensions_of_a_mesh_are_counted_with_the_first_outermost(dims, expected):
    assert Ranks(device_mesh=Mesh(), dp_dim=dims).found() == expected


@pytest.mark.parametrize("dims", [("gpu", "gpu"), (0, -2), ("node", 0)])
def test_a_dimension_named_twice_is_refused(dims):
    with pytest.raises(ValueError, match="twice"):
        Ranks(device_mesh=Mesh(), dp_dim=dims)


# ---------------------------------------------------------------------------------------------- when a data set asks


@pytest.fixture
def folder(tmp_path):
    """Write 103 records: each of two ranks has 7 batches of 8, the last one smaller."""
    write_records(tmp_path / "0.bin", 103, 64)
    return tmp_path


def read(folder, **arguments):
    return GDSDataset(
        folder / "0.bin", **grouped({"batch_size": 8, "format": Records("u1", (64,)), "device": "cpu", **arguments})
    )


def mixed(folder, **arguments):
    return Mix([read(folder, seed=1, **arguments), read(folder, seed=2, **arguments)])


MAKERS = pytest.mark.parametrize("make", [read, mixed], ids=lambda make: make.__name__)


@pytest.fixture
def become(monkeypatch):
    """Set this rank and the world size of torch.distributed. Without them, it is uninitialized."""

    def change(*share):
        monkeypatch.setattr(dist, "is_initialized", lambda: bool(share))
        monkeypatch.setattr(dist, "get_rank", lambda: share[0])
        monkeypatch.setattr(dist, "get_world_size", lambda: share[1])

    return change


def share_of(make, folder, rank, world_size):
    return make(folder, rank=rank, world_size=world_size)


@MAKERS
def test_a_data_set_made_before_torch_distributed_reads_its_ranks_share(folder, become, make):
    dataset, asked_for_len = make(folder), make(folder)
    become(1, 2)
    expected = share_of(make, folder, 1, 2)
    assert len(asked_for_len) == len(expected) < len(make(folder, rank=0, world_size=1))
    for one in (dataset, asked_for_len):
        assert_same_batches([*arrays(one), *arrays(one)], [*arrays(expected), *arrays(expected)])
        expected.set_epoch(0)
    assert dataset.state_dict() == {**asked_for_len.state_dict()}


def test_rank_and_world_size_are_those_of_now(folder, become):
    dataset = read(folder)
    assert (dataset.rank, dataset.world_size) == (0, 1)
    become(1, 2)
    assert (dataset.rank, dataset.world_size, dataset.samples) == (1, 2, 103)
    assert dataset.state_dict()["samples_per_step"] == 16


@MAKERS
@pytest.mark.parametrize("asked", [len, lambda dataset: next(iter(dataset))], ids=["len", "a batch"])
def test_ranks_that_change_in_an_epoch_are_an_error_that_says_so(folder, become, make, asked):
    dataset = make(folder)
    asked(dataset)
    become(1, 2)
    for again in (len, iter, len):
        with pytest.raises(RuntimeError, match="this process was rank 0 of 1, and now it is rank 1 of 2"):
            again(dataset)
    dataset.set_epoch(1)
    expected = share_of(make, folder, 1, 2)
    expected.set_epoch(1)
    assert_same_batches(arrays(dataset), arrays(expected))


@MAKERS
def test_an_iterator_of_before_torch_distributed_ends_with_an_error(folder, become, make):
    untouched, begun = iter(make(folder)), iter(make(folder))
    next(begun)
    become(0, 2)
    for batches in (untouched, begun):
        with pytest.raises(RuntimeError, match="was rank 0 of 1, and now it is rank 0 of 2"):
            list(batches)


def test_it_ends_with_the_next_batch_even_if_all_are_planned(folder, become):
    begun = iter(read(folder))
    for _ in range(8):  # of 13: the rest is planned by now
        next(begun)
    become(0, 2)
    with pytest.raises(RuntimeError, match="was rank 0 of 1, and now it is rank 0 of 2"):
        next(begun)


@MAKERS
def test_another_epoch_may_have_other_ranks(folder, become, make):
    dataset = make(folder)
    whole = make(folder, rank=0, world_size=1)
    assert_same_batches(arrays(dataset), arrays(whole))
    become(1, 2)
    expected = share_of(make, folder, 1, 2)
    expected.set_epoch(1)
    assert_same_batches(arrays(dataset), arrays(expected))


@MAKERS
def test_ranks_that_are_given_do_not_change(folder, become, make):
    dataset = make(folder, rank=0, world_size=2)
    batches = iter(dataset)
    length = len(dataset)
    become(1, 4)
    assert len(dataset) == length == len(list(batches))


@MAKERS
def test_the_end_of_torch_distributed_ends_no_epoch(folder, become, make):
    become(1, 2)
    dataset = make(folder)
    batches = iter(dataset)
    got = [next(batches)]
    become()
    assert len([*got, *batches]) == len(share_of(make, folder, 1, 2))
    assert dataset.state_dict()["epoch"] == 1


@MAKERS
def test_an_environment_that_says_half_is_refused_when_it_matters(folder, become, monkeypatch, make):
    monkeypatch.setenv("WORLD_SIZE", "2")
    dataset = make(folder)
    for asked in (len, iter):
        with pytest.raises(ValueError, match="WORLD_SIZE is '2'"):
            asked(dataset)
    become(1, 2)
    assert_same_batches(arrays(dataset), arrays(share_of(make, folder, 1, 2)))


# ------------------------------------------------------------------------------------------------------- and resumes


@MAKERS
@pytest.mark.parametrize("shuffle", [True, "lanes"])
def test_a_state_of_two_ranks_is_loaded_before_torch_distributed(folder, become, make, shuffle):
    become(1, 2)
    before = make(folder, shuffle=shuffle)
    batches = iter(before)
    got = arrays(next(batches) for _ in range(3))
    state, whole = before.state_dict(), arrays(share_of(make, folder, 1, 2)) if shuffle is True else None
    become()
    dataset = make(folder, shuffle=shuffle)
    dataset.load_state_dict(state)
    assert dataset.state_dict() == state
    become(1, 2)
    rest = arrays(dataset)
    assert_same_batches(rest, arrays(batches))
    if whole:
        assert_same_batches([*got, *rest], whole)


@MAKERS
def test_a_state_of_two_ranks_is_refused_by_one_when_iteration_begins(folder, become, make):
    become(1, 2)
    state = make(folder).state_dict()
    become()
    dataset = make(folder)
    dataset.load_state_dict({**state, "batches": 2})
    with pytest.raises(ValueError, match=r"batch_size x world_size.*init_process_group"):
        iter(dataset)
    dataset.set_epoch(1)  # begins anew
    assert len(arrays(dataset)) == len(make(folder))


def test_a_state_that_no_number_of_ranks_would_fit_is_refused_at_once(folder):
    with pytest.raises(ValueError, match=r"batch_size \* world_size was 12 and is 8"):
        read(folder).load_state_dict({**read(folder).state_dict(), "samples_per_step": 12})


# ------------------------------------------------------------------------------------------------------ shuffle="auto"


@pytest.fixture
def broadcast(monkeypatch):
    """Record this rank's calls of broadcast, and give rank 0's answer."""
    said = []

    def broadcast_object_list(objects, src):
        said.append(objects[0])
        objects[0] = objects[0] or ("lanes", "rank 0 said so")

    monkeypatch.setattr(dist, "broadcast_object_list", broadcast_object_list)
    return said


def test_auto_is_agreed_on_when_iteration_begins_if_it_was_chosen_before(folder, become, broadcast, monkeypatch):
    measurements = []
    monkeypatch.setattr(measured, "_choose", lambda index, ranks: measurements.append(1) or ("uniform", "measured"))
    dataset = read(folder, shuffle="auto")
    assert measurements == [1] and dataset.stats()["shuffle"] == "uniform: measured"
    become(1, 2)
    len(dataset)
    assert not broadcast  # len() must not wait for other ranks
    arrays(dataset)
    assert broadcast == [None] and measurements == [1]
    assert dataset.stats()["shuffle"].startswith("Lanes(") and "rank 0 said so" in dataset.stats()["shuffle"]
    arrays(dataset)
    assert len(broadcast) == 1
    assert_same_batches(arrays(dataset), _epochs(share_of_lanes(folder), 3)[2])


def share_of_lanes(folder):
    return read(folder, shuffle="lanes", rank=1, world_size=2)


def _epochs(dataset, count):
    return [arrays(dataset) for _ in range(count)]


def test_rank_0_says_what_it_measured_before(folder, become, broadcast, monkeypatch):
    monkeypatch.setattr(measured, "_choose", lambda index, ranks: ("lanes", "measured"))
    dataset = read(folder, shuffle="auto")
    become(0, 2)
    arrays(dataset)
    assert broadcast == [("lanes", "measured")]


def test_auto_of_an_environment_for_several_ranks_waits_for_torch_distributed(folder, become, broadcast, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    dataset = read(folder, shuffle="auto")
    assert dataset.stats()["shuffle"] == "uniform: until iteration begins"
    with pytest.raises(ValueError, match="initialize torch.distributed first"):
        iter(dataset)
    become(1, 2)
    arrays(dataset)
    assert broadcast == [None]


# ------------------------------------------------------------------------------------------------------ real processes


def epochs_of_a_rank(rank, data_sets, store, results):
    """Save a rank's batches of data sets that were made before it, in another process."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    got = []
    for workers, data in data_sets:
        loader = DataLoader(
            data, batch_size=None, num_workers=workers, multiprocessing_context="fork" if workers else None
        )
        got += [batch.tolist() for _ in range(2) for batch in loader]
        dist.barrier()
    torch.save(got, f"{results}-{rank}")
    dist.destroy_process_group()


def epochs_of_two_ranks(folder, method):
    data_sets = [(workers, make(folder)) for workers in (2, 0) for make in (read, mixed)]
    arguments = (data_sets, folder / f"store-{method}", folder / "results")
    processes = [get_context(method).Process(target=epochs_of_a_rank, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert {data.state_dict()["epoch"] for _, data in data_sets} == {0}  # the ranks changed their own copies
    return [torch.load(folder / f"results-{rank}") for rank in range(2)]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ranks_that_are_begun_with_a_data_set_read_their_shares(folder, method):
    """They read with two workers and with none, because the start of a rank takes seconds."""
    got = in_new_process(epochs_of_two_ranks, folder, method, timeout_s=100)
    for rank in range(2):
        alone = [share_of(make, folder, rank, 2) for make in (read, mixed)]
        assert got[rank] == 2 * [batch.tolist() for one in alone for _ in range(2) for batch in one]


def test_a_spawned_worker_reads_the_share_of_the_process_that_began_it(folder, become):
    become(1, 2)  # in this process alone
    loader = DataLoader(read(folder), batch_size=None, num_workers=1, multiprocessing_context="forkserver")
    assert_same_batches(arrays(loader), arrays(share_of(read, folder, 1, 2)))


@MAKERS
def test_states_are_equal_on_all_ranks_if_the_data_sets_are_alike(folder, make):
    """A page compares them, because other ranks would wait for a batch that does not come."""
    first, second = (share_of(make, folder, rank, 2).state_dict() for rank in range(2))
    assert first == second
    for different in (dict(batch_size=4), dict(drop_last=True), dict(split=(0, 0.5)), dict(shuffle=False)):
        assert make(folder, rank=1, world_size=2, **different).state_dict() != first
    write_records(folder / "0.bin", 104, 64)
    assert share_of(make, folder, 1, 2).state_dict() != first


def test_a_process_that_gets_an_epochs_ranks_asks_for_its_own():
    fixed = EpochRanks()
    assert fixed.fix(0, None) == Share(0, 1) == fixed.of(0)
    assert in_new_process(EpochRanks.of, fixed, 0) is None
