"""Scripts under torchrun on two and four ranks: data sets find their ranks without arguments.

A start takes seconds, so one run for each number of ranks does everything (`torchrun_script.py`).
The tests look at its results.
"""

import json
from itertools import chain, pairwise

import pytest
import torch
import torchrun_script as script
from helpers import torchrun

from gdsdata import Ragged

pytestmark = pytest.mark.usefixtures("quick_programs", "programs_that_train")

PATIENCE_S = 80


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torchrun")
    script.write_data(folder)
    return folder


def run(folder, ranks, device, states):
    """Resume from these states on so many ranks, and return each rank's results."""
    (folder / "states.json").write_text(json.dumps(states))
    exit_code, said = torchrun(ranks, script.__file__, folder, device, timeout_s=PATIENCE_S)
    assert exit_code == 0, said
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def first_state(folder):
    """Return the first batch of each order in one process, and the states after it."""
    found = {}
    for kind in script.KINDS:
        for name, shuffle in script.SHUFFLES.items():
            dataset = script.dataset_of(folder, kind, 1, shuffle=shuffle, device="cpu")
            steps = [script.numbers(next(iter(dataset)))]
            found[f"{kind}, {name}"] = {"steps": steps, "state": dataset.state_dict()}
    return found


def states(found):
    return {name: one["state"] for name, one in found.items()}


@pytest.fixture(scope="module")
def two_ranks(folder, first_state):
    return run(folder, 2, "cpu", states(first_state))


@pytest.fixture(scope="module")
def four_ranks(folder, two_ranks):
    return run(folder, 4, "cpu", states(two_ranks[0]["resumed"]))


@pytest.fixture(scope="module")
def two_gpus(folder, first_state):
    if torch.cuda.device_count() < 2:
        pytest.skip("there are no two GPUs")
    return run(folder, 2, "cuda", states(first_state))


@pytest.fixture(params=["two_ranks", "four_ranks", pytest.param("two_gpus", marks=pytest.mark.gpu)])
def ranks(request):
    return request.getfixturevalue(request.param)


def steps_of(shares):
    """Join the ranks' batches of each step. Fails if ranks have different numbers of steps."""
    return [list(chain.from_iterable(step)) for step in zip(*shares, strict=True)]


def test_a_rank_is_found_in_the_environment_and_in_torch_distributed(folder, ranks):
    for rank, found in enumerate(ranks):
        said = dict(rank=rank, world_size=len(ranks), uneven="pad", device="cpu")
        expected = script.epoch_of(script.dataset_of(folder, "records", len(ranks), **said))
        assert found["before torch.distributed"] == found["shares"]["records, uniform"] == expected


@pytest.mark.parametrize("shuffle", script.SHUFFLES)
@pytest.mark.parametrize("kind", script.KINDS)
def test_shares_are_disjoint_and_together_everything(ranks, kind, shuffle):
    *whole, last = steps_of([found["shares"][f"{kind}, {shuffle}"] for found in ranks])
    assert [len(step) for step in whole] == [script.STEP] * 6
    seen = list(chain.from_iterable(whole))
    assert len(set(seen)) == len(seen)
    assert set(seen) | set(last) == set(range(script.SAMPLES))
    assert len(last) == 8  # seven samples, and the epoch's first once more
    assert (seen == list(range(6 * script.STEP))) == (shuffle == "none")


@pytest.mark.parametrize(
    ("uneven", "last"), [("drop", {2: 6, 4: 4}), ("pad", {2: 8, 4: 8}), ("repeat", {2: 16, 4: 16})], ids=script.UNEVEN
)
@pytest.mark.parametrize("kind", script.KINDS)
def test_ddp_ends_an_uneven_epoch_as_one_process_that_sees_the_same_steps(ranks, kind, uneven, last):
    runs = [found["trained"][f"{kind}, {uneven}"] for found in ranks]
    assert all(run["weights"] == runs[0]["weights"] for run in runs)
    steps = steps_of([run["seen"] for run in runs])
    assert [len(step) for step in steps] == [script.STEP] * 6 + [last[len(ranks)]]
    weights, _ = script.train(script.model_of(kind), [written(kind, step) for step in steps])
    torch.testing.assert_close(torch.tensor(runs[0]["weights"]), torch.tensor(weights), rtol=1e-4, atol=1e-6)
    untrained = script.model_of(kind).parameters()
    assert runs[0]["weights"] != [value for one in untrained for value in one.flatten().tolist()]


def written(kind, samples):
    """Make a batch of these samples from the written values."""
    if kind == "records":
        return torch.from_numpy(script.record_rows()[samples])
    values = [torch.from_numpy(script.field_values()[sample]) for sample in samples]
    offsets = torch.tensor([0, *map(len, values)]).cumsum(0)
    return {"bin": Ragged(torch.cat(values), offsets), "cls": torch.tensor(samples)}


@pytest.mark.parametrize("shuffle", script.SHUFFLES)
@pytest.mark.parametrize("kind", script.KINDS)
def test_a_run_resumed_on_two_four_and_one_ranks_has_the_steps_of_a_whole_one(
    folder, first_state, two_ranks, four_ranks, kind, shuffle
):
    name, arguments = f"{kind}, {shuffle}", dict(shuffle=script.SHUFFLES[shuffle], device="cpu")
    last = script.dataset_of(folder, kind, 1, **arguments)
    last.load_state_dict(four_ranks[0]["resumed"][name]["state"])
    handed_on = first_state[name]["steps"]
    for found in (two_ranks, four_ranks):
        handed_on = handed_on + steps_of([one["resumed"][name]["steps"] for one in found])
    assert handed_on + script.epoch_of(last) == script.epoch_of(script.dataset_of(folder, kind, 1, **arguments))


@pytest.mark.gpu
def test_two_gpus_go_on_where_one_rank_on_the_cpu_ended(two_gpus, two_ranks):
    for on_gpu, on_cpu in zip(two_gpus, two_ranks, strict=True):
        assert on_gpu["resumed"] == on_cpu["resumed"]


def test_tensor_parallel_peers_of_a_device_mesh_see_the_same_batch(folder, ranks):
    def expected(rank, world_size):
        dataset = script.dataset_of(folder, "fields", world_size, rank=rank, world_size=world_size, device="cpu")
        return script.numbers(next(iter(dataset)))

    for rank, found in enumerate(one["in_a_mesh"] for one in ranks):
        for way in ("by name", "by place", "of one dimension", "auto"):
            assert found[way] == expected(rank // 2, len(ranks) // 2), way
        assert found["along both"] == expected(rank, len(ranks))


def test_a_mesh_that_leaves_the_data_dimension_open_is_refused_in_words(ranks):
    for found in (one["in_a_mesh"] for one in ranks):
        assert "has 2 dimensions ('dp', 'tp'): say by dp_dim=" in found["no dp_dim"]
        assert "dp_dim='pp': the device_mesh has the dimensions ('dp', 'tp')" in found["unknown"]
        assert "rank=0, world_size=1 and a device_mesh are given: give one of them" in found["twice"]


def test_auto_is_what_the_first_rank_measured_on_all_of_them(ranks):
    assert ranks[0]["agreed"].startswith("Lanes(") and "bring 0.20 GB/s" in ranks[0]["agreed"]
    assert all(before["agreed"] == after["agreed"] for before, after in pairwise(ranks))
    assert all(found["agreed when iteration began"] == found["agreed"] for found in ranks)
