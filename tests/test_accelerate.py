"""A data set in a training loop of accelerate."""

import json
from pathlib import Path

import pytest
import torch
from helpers import assert_same_batches, note_calls, torchrun
from torch.utils.data import DataLoader

import gdsdata
from gdsdata import GDSDataset, Mix, Sharding
from gdsdata.checkpoint.safetensors import installed
from gdsdata.formats import Records

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

from gdsdata.integrations.accelerate import prepare  # noqa: E402


@pytest.fixture
def read(tmp_path):
    torch.arange(103, dtype=torch.float32).numpy().tofile(tmp_path / "0.bin")
    return lambda: GDSDataset(tmp_path / "0.bin", 8, Records("f4", (1,)), device="cpu")


@pytest.fixture
def accelerator():
    return accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)


def numbers(batch):
    return batch[:, 0].int().tolist()


@pytest.mark.parametrize("mixed", [False, True])
def test_the_last_batch_of_an_epoch_ends_an_accumulation(read, accelerator, mixed):
    model = torch.nn.Linear(1, 1)
    data = prepare(accelerator, Mix([read()]) if mixed else read())
    for _ in range(2):
        synced = []
        for batch in data:
            with accelerator.accumulate(model):
                synced.append(accelerator.sync_gradients)
                gathered = accelerator.gather_for_metrics(batch)
                assert len(gathered) == len(batch)
        assert [at for at, is_synced in enumerate(synced, 1) if is_synced] == [4, 8, 12, 13]


@pytest.mark.parametrize("samples", [27, 32])
def test_two_ranks_gather_each_sample_once_for_a_metric(tmp_path, samples):
    torch.arange(samples, dtype=torch.float32).numpy().tofile(tmp_path / "0.bin")
    script = Path(__file__).parent / "metrics_script.py"
    code, said = torchrun(2, script, tmp_path / "0.bin", "drop", "pad", "repeat", CUDA_VISIBLE_DEVICES="")
    assert code == 0, said
    found = json.loads(said.partition("gathered ")[2].splitlines()[0])
    assert sorted(found["pad"]) == sorted(found["repeat"]) == list(range(samples))
    assert len(set(found["drop"])) == len(found["drop"]) == samples - samples % 2


@pytest.mark.parametrize("rows", [5, 6, 7])
def test_rows_that_are_no_samples_are_all_gathered_for_a_metric(tmp_path, accelerator, rows):
    torch.arange(27, dtype=torch.float32).numpy().tofile(tmp_path / "0.bin")
    share = Sharding(rank=1, world_size=2, uneven="pad")
    records, packed = Records("f4", (1,)), torch.zeros(rows * 3, 1)
    dataset = GDSDataset(tmp_path / "0.bin", 8, records, device="cpu", sharding=share, transform=lambda _: packed)
    assert [len(accelerator.gather_for_metrics(batch)) for batch in prepare(accelerator, dataset)] == [3 * rows] * 2


@pytest.mark.parametrize("uneven", ["drop", "pad"])
def test_last_batches_without_tensors_are_given_as_any_others(tmp_path, accelerator, uneven):
    torch.arange(27, dtype=torch.float32).numpy().tofile(tmp_path / "0.bin")
    share, records = Sharding(rank=1, world_size=2, uneven=uneven), Records("f4", (1,))
    for batch in ({"text": ["a"]}, {}, ["a"]):
        dataset = GDSDataset(
            tmp_path / "0.bin", 8, records, device="cpu", sharding=share, transform=lambda _, batch=batch: batch
        )
        assert list(prepare(accelerator, dataset)) == [batch] * 2


def test_accelerate_takes_a_loader_that_is_prepared_as_it_is(read, accelerator):
    data = prepare(accelerator, read())
    assert accelerator.prepare(data) is data and accelerator.prepare_data_loader(data) is data
    assert len(list(data)) == 13


@pytest.mark.parametrize("is_resumed", [False, True])
def test_skip_first_batches_continues_behind_them_with_or_without_a_state(read, accelerator, is_resumed):
    data = prepare(accelerator, read())
    first, second = ([numbers(batch) for batch in data] for _ in range(2))
    data = prepare(accelerator, read())
    if is_resumed:
        data.load_state_dict(data.state_dict() | {"batches": 5})
    assert [numbers(batch) for batch in accelerator.skip_first_batches(data, 5)] == first[5:]
    assert [numbers(batch) for batch in data] == second


@pytest.mark.parametrize("mixed", [False, True])
def test_the_length_behind_skip_first_batches_is_that_of_the_rest(read, accelerator, mixed):
    skipping = accelerator.skip_first_batches(prepare(accelerator, Mix([read()]) if mixed else read()), 5)
    assert len(skipping) == len(list(skipping)) == 8


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.filterwarnings("ignore:gdsdata")
def test_skip_first_batches_skips_those_of_an_epoch_that_was_broken_off_and_begins_again(read, accelerator, mixed):
    made = (lambda: Mix([read()])) if mixed else read
    whole, data = list(map(numbers, made())), prepare(accelerator, made())
    for _, _ in zip(range(5), data, strict=False):
        pass
    assert [numbers(batch) for batch in accelerator.skip_first_batches(data, 3)] == whole[3:]


def test_a_state_goes_through_the_hooks_with_its_safetensors(tmp_path, accelerator, monkeypatch):
    called = note_calls(monkeypatch, installed, "save_file", "load_file")
    plain = torch.nn.Linear(20, 30)
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters()))

    def step():
        model(torch.ones(20)).sum().backward()
        optimizer.step()

    step()
    saved = {name: one.clone() for name, one in plain.state_dict().items()}
    with gdsdata.torch_hooks(safetensors=True) as hooks:
        accelerator.save_state(tmp_path / "saved")
        step()
        accelerator.load_state(tmp_path / "saved")
    assert_same_batches(plain.state_dict().values(), saved.values())
    assert [one["step"].item() for one in optimizer.state_dict()["state"].values()] == [1, 1]
    assert called == ["save_file", "load_file"]  # of model.safetensors
    weights_bytes = sum(one.nbytes for one in saved.values())
    size_bytes = sum((tmp_path / "saved" / name).stat().st_size for name in ("optimizer.bin", "random_states_0.pkl"))
    served = {call: (one.calls, one.bytes) for call, one in hooks.report().served.items()}
    assert served == {
        "torch.save": (2, size_bytes),
        "torch.load": (2, size_bytes),
        "safetensors.save_file": (1, weights_bytes),
        "safetensors.load_file": (1, weights_bytes),
    }
    assert hooks.report().left_to_torch == ()


@pytest.mark.parametrize("taken", [1, 12])
def test_save_state_and_load_state_keep_the_place(tmp_path, read, accelerator, taken):
    data = prepare(accelerator, read())
    assert len(data) == 13
    whole = [numbers(batch) for batch in data]
    data.set_epoch(0)
    batches = iter(data)
    assert [numbers(next(batches)) for _ in range(taken)] == whole[:taken]
    accelerator.save_state(tmp_path / "saved")
    del batches
    after = accelerate.Accelerator(cpu=True)
    resumed = prepare(after, read())
    after.load_state(tmp_path / "saved")
    rest, is_last = [], []
    for batch in resumed:
        rest.append(numbers(batch))
        is_last.append(after.gradient_state.end_of_dataloader)
    assert rest == whole[taken:]
    assert is_last == [False] * (12 - taken) + [True]


def test_a_stateful_loader_of_one_process_resumes_too(read):
    configuration = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=True)
    wrap = accelerate.Accelerator(cpu=True, dataloader_config=configuration).prepare
    loader = wrap(DataLoader(read(), batch_size=None))
    batches = iter(loader)
    before = [numbers(next(batches)) for _ in range(5)]
    resumed = wrap(DataLoader(read(), batch_size=None))
    resumed.load_state_dict(loader.state_dict())
    assert before + [numbers(batch) for batch in resumed] == [numbers(batch) for batch in read()]


def test_skip_first_batches_of_an_unprepared_data_set_is_an_error_with_a_remedy(read):
    found = read()
    assert not hasattr(found, "dataset")
    found.dataset = found  # a subclass may have its own
    assert found.dataset is found
    with pytest.raises(AttributeError, match=r"hf_trainer\.use\(trainer\), and .*accelerate\.prepare\(accelerator"):
        accelerate.skip_first_batches(read(), 3)


def test_other_objects_are_refused(read, accelerator):
    with pytest.raises(TypeError, match=r"not a DataLoader: pass a DataLoader, .* to accelerator.prepare\(\)"):
        prepare(accelerator, DataLoader(read(), batch_size=None))
