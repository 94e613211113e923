"""`AsyncCheckpointer` and objects within lists, tuples and dicts of a state."""

import pytest
import torch

import gdsdata
from gdsdata import AsyncCheckpointer


def models(*seeds):
    made = []
    for seed in seeds:
        torch.manual_seed(seed)
        made.append(torch.nn.Linear(3, 2))
    return made


def optimizers(of, rate, steps=0):
    made = [torch.optim.Adam(model.parameters(), lr=rate) for model in of]
    for optimizer in made * steps:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
    return made


def begun(*seeds, rate=0.1, steps=0, epoch=0):
    """Return a state with objects in lists, tuples and dicts, beside plain values."""
    made = models(*seeds)
    its = optimizers(made, rate, steps)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1) for one in its]
    return {
        "models": {"generator": made[0], "discriminator": made[1]},
        "optimizers": its,
        "train": {"epoch": epoch, "schedulers": tuple(schedulers), "mean": torch.full((2,), float(epoch))},
    }


def assert_same_weights(state, other):
    for name, model in state["models"].items():
        assert torch.equal(model.weight, other["models"][name].weight)


def test_objects_within_lists_tuples_and_dicts_are_restored_where_they_are(tmp_path):
    saved = begun(1, 2, rate=0.25, steps=3, epoch=5)
    for optimizer, scheduler in zip(saved["optimizers"], saved["train"]["schedulers"], strict=True):
        optimizer.step()
        scheduler.step()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, saved).result()
        state = begun(3, 4)
        held = [*state["models"].values(), *state["optimizers"], *state["train"]["schedulers"]]
        mean = state["train"]["mean"]
        assert checkpointer.restore(state) == 1
    assert_same_weights(state, saved)
    after = [*state["models"].values(), *state["optimizers"], *state["train"]["schedulers"]]
    assert all(one is other for one, other in zip(held, after, strict=True))
    for one, other in zip(state["optimizers"], saved["optimizers"], strict=True):
        assert one.param_groups[0]["lr"] == other.param_groups[0]["lr"] == 0.025
        for its, others in zip(one.state.values(), other.state.values(), strict=True):
            assert torch.equal(its["exp_avg"], others["exp_avg"]) and its["step"] == 4
    assert [one.last_epoch for one in state["train"]["schedulers"]] == [1, 1]
    assert state["train"]["epoch"] == 5 and state["train"]["mean"] is mean and mean.tolist() == [5.0, 5.0]


def test_the_file_has_states_in_the_place_of_the_objects(tmp_path):
    saved = begun(1, 2)
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, saved).result()
    (file,) = tmp_path.glob("step-1/rank-0-*.pt")
    found = gdsdata.load(file)
    assert torch.equal(found["models"]["generator"]["weight"], saved["models"]["generator"].weight)
    assert [one["param_groups"][0]["lr"] for one in found["optimizers"]] == [0.1, 0.1]


def test_an_object_that_was_not_saved_is_an_error_that_names_it(tmp_path):
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"models": models(1, 2), "scalers": [torch.amp.GradScaler("cpu")] * 2}).result()
        with pytest.raises(ValueError, match="has nothing for the object models.2: restore into what was saved"):
            checkpointer.restore({"models": models(1, 2, 3)})
        live = models(3)
        with pytest.raises(ValueError, match="models.1.bias, models.1.weight only in the file"):
            checkpointer.restore({"models": live})
        scalers = [torch.amp.GradScaler("cpu") for _ in range(3)]
        with pytest.raises(ValueError, match="nothing for the object scalers.2"):
            checkpointer.restore({"scalers": scalers})
        assert all(isinstance(one, torch.amp.GradScaler) for one in scalers)
        with pytest.raises(ValueError, match=r"does not fit 'models.1': Error\(s\) in loading state_dict"):
            checkpointer.restore({"models": [models(1)[0], torch.nn.Linear(3, 5)]})


def test_a_model_that_a_nested_value_shares_memory_with_is_restored(tmp_path):
    (model,) = models(1)
    best = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"train": {"best": best, "models": [model]}}).result()
        (new,) = models(2)
        state = {"train": {"best": dict(new.state_dict()), "models": [new]}}
        checkpointer.restore(state)
    assert torch.equal(new.weight, model.weight)
    assert torch.equal(state["train"]["best"]["weight"], best["weight"])


def test_a_class_within_a_list_is_a_plain_value(tmp_path):
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"kinds": [torch.nn.Linear, 3]}).result()
        state = {"kinds": [None, 0]}
        checkpointer.restore(state, weights_only=False)
    assert state["kinds"] == [torch.nn.Linear, 3]


@pytest.mark.parametrize("nested", [False, True])
def test_none_that_was_saved_for_an_object_is_an_error_that_names_it(tmp_path, nested):
    (optimizer,) = optimizers(models(1), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"train": {"scheduler": None}} if nested else {"scheduler": None}).result()
        with pytest.raises(ValueError, match=r"has None for '(train.)?scheduler', which is a StepLR here: restore"):
            checkpointer.restore({"train": {"scheduler": scheduler}} if nested else {"scheduler": scheduler})


class Settings(dict):
    """A dict that has an attribute of any name."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)


def test_a_dict_with_attributes_of_any_name_is_a_plain_value(tmp_path):
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"run": {"settings": Settings(rate=0.5), "step": 3}}).result()
        state = {"run": {"settings": Settings(), "step": 0}}
        checkpointer.restore(state, weights_only=False)
    assert state == {"run": {"settings": {"rate": 0.5}, "step": 3}} and state["run"]["settings"].rate == 0.5


@pytest.mark.parametrize("value", [{"w": torch.ones(2), "n": 3}, [torch.ones(2)], torch.ones(2), 0.5, "text"])
def test_none_takes_all_that_was_saved(tmp_path, value):
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"best": value, "in": {"best": value, "epoch": 1}}).result()
        state = {"best": None, "in": {"best": None, "epoch": 0}}
        assert checkpointer.restore(state) == 1
        gdsdata.save(value, tmp_path / "x.pt")
        for found in (state["best"], state["in"]["best"]):
            gdsdata.save(found, tmp_path / "y.pt")
            assert str(found) == str(value)
        assert state["in"]["epoch"] == 1
        checkpointer.save(2, {"best": None, "in": {"best": None, "epoch": 2}}).result()
        checkpointer.restore(state)
    assert state == {"best": None, "in": {"best": None, "epoch": 2}}
