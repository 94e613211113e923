"""`AsyncCheckpointer.prepare` and `restore` have memory made for the first save."""

import gc
import threading
import warnings

import pytest
import torch
from helpers import MIB, eventually, exit_code_of_fork
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

from gdsdata import AsyncCheckpointer
from gdsdata.checkpoint.background import preparation, staging_memory
from gdsdata.checkpoint.background.preparation import Size, size_of
from gdsdata.errors import EngineClosed


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch):
    monkeypatch.setattr(staging_memory, "_PIECE_BYTES", MIB)
    monkeypatch.setattr(staging_memory, "_PAUSES_PER_BUFFER", 0.0)
    monkeypatch.setattr(preparation, "_POLL_S", 0.02)
    monkeypatch.setattr(preparation, "_QUIET_LOOKS", 50)  # one second: so long a busy machine may pause


def has_made(checkpointer: AsyncCheckpointer, buffers: int) -> bool:
    staging = checkpointer._staging
    return eventually(lambda: len(staging._spare) == buffers and staging._makers == 0)


def is_watching() -> bool:
    return any(thread.name == "gdsdata-prepare" for thread in threading.enumerate())


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(1024, 1024)  # 4 MiB, and its optimizer 8
    return model, torch.optim.AdamW(model.parameters())


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()


# ------------------------------------------------------------------------------------------------ how much


def test_the_size_is_of_each_storage_once_and_near_that_of_the_file(tmp_path):
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    whole = torch.zeros(100_000)
    views = {"views": [whole[:10], whole[50:].view(-1, 10), {"x": (whole, 1)}], "step": 7}
    state = {"model": model, "optimizer": optimizer, "more": views, "alone": torch.zeros(2**18)}
    with AsyncCheckpointer(tmp_path) as checkpointer:
        saved = checkpointer.save(0, state)
        assert saved.bytes <= size_of(state).bytes <= saved.bytes + 100_000
    assert size_of(state).gpu is None
    assert size_of({}) == size_of({"a": 1, "b": torch.nn.Linear(9, 9, device="meta")}) == Size(0, None)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_tensors_that_hold_others_are_counted_by_those(tmp_path):
    one, other = torch.zeros(100_000), torch.ones(100_000)
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(TwoTensor(TwoTensor(one, other), one + 1))
    state = {"model": model, "plain": one, "masked": masked_tensor(torch.ones(3), torch.ones(3) > 0)}
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.prepare(state)
        saved = checkpointer.save(0, state)
        assert saved.bytes - 10_000 <= size_of(state).bytes <= saved.bytes + 100_000
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            checkpointer.restore({"model": model}, weights_only=False)


def test_a_model_is_counted_without_its_state_dict():
    class Model(torch.nn.Linear):
        def state_dict(self, *_, **__):
            pytest.fail("this may have side effects")

    assert 2 * MIB < size_of({"model": Model(1024, 512)}).bytes < 2.1 * MIB


def test_tensors_in_other_objects_are_counted_by_their_state_dict():
    class Trainer:
        def state_dict(self):
            return {"weights": {"w": torch.zeros(MIB // 4)}}

    assert MIB < size_of({"trainer": Trainer()}).bytes < 1.1 * MIB


# ------------------------------------------------------------------------------------------------ prepare


def test_a_first_save_finds_memory_that_was_prepared(tmp_path, monkeypatch):
    state = {"a": torch.zeros(5 * MIB // 4)}
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.prepare(state)
        assert has_made(checkpointer, 6)
        monkeypatch.setattr(staging_memory, "paged_memory", lambda *_: pytest.fail("there is enough"))
        checkpointer.save(1, state).result()
        assert checkpointer._staging.size_bytes == 6 * MIB
        assert checkpointer.restore({"a": torch.ones(5 * MIB // 4)}) == 1


def test_preparing_for_another_state_adds_what_it_needs(tmp_path):
    with AsyncCheckpointer(tmp_path, staging_bytes="4MiB") as checkpointer:
        checkpointer.prepare({"a": torch.zeros(MIB // 4)})
        assert has_made(checkpointer, 2)
        checkpointer.prepare({"a": torch.zeros(10 * MIB // 4)})
        assert has_made(checkpointer, 4), "staging_bytes allows 4 MiB"


def test_a_save_while_memory_is_prepared_is_complete(tmp_path, monkeypatch):
    opened, reached, make = threading.Event(), threading.Event(), staging_memory.paged_memory

    def held_up(*arguments):
        if threading.current_thread().name == "gdsdata-staging":
            reached.set()
            assert opened.wait(60)
        return make(*arguments)

    monkeypatch.setattr(staging_memory, "paged_memory", held_up)
    state = {"a": torch.arange(3 * MIB // 8)}
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.prepare(state)
        assert reached.wait(60)
        checkpointer.save(1, state).result()
        opened.set()
        found = {"a": torch.zeros_like(state["a"])}
        assert checkpointer.restore(found) == 1 and found["a"].equal(state["a"])


def test_closing_ends_a_preparation_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(staging_memory, "_PAUSES_PER_BUFFER", 1e9)
    model, optimizer = model_and_optimizer()
    checkpointer = AsyncCheckpointer(tmp_path)
    checkpointer.prepare({"model": model, "optimizer": optimizer})
    assert eventually(lambda: checkpointer._staging._spare) and is_watching()
    checkpointer.close()
    assert checkpointer._staging.size_bytes == 0 == checkpointer._staging._makers
    assert eventually(lambda: not is_watching())
    with pytest.raises(EngineClosed, match="make a new one"):
        checkpointer.prepare({})


def test_dropping_a_checkpointer_ends_its_preparation(tmp_path, monkeypatch):
    monkeypatch.setattr(staging_memory, "_PAUSES_PER_BUFFER", 1e9)
    model, optimizer = model_and_optimizer()
    checkpointer = AsyncCheckpointer(tmp_path)
    checkpointer.prepare({"model": model, "optimizer": optimizer})
    staging = checkpointer._staging
    assert eventually(lambda: staging._spare) and is_watching()
    del checkpointer
    gc.collect()
    assert eventually(lambda: staging._makers == 0 and not is_watching())


def test_a_forked_child_may_drop_a_checkpointer_whose_lock_is_held(tmp_path):
    held, done = threading.Event(), threading.Event()
    checkpointer = AsyncCheckpointer(tmp_path)

    def hold():
        with checkpointer._staging._changed:
            held.set()
            assert done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    assert exit_code_of_fork(checkpointer._end_preparing) == 0
    done.set()
    holder.join()
    checkpointer.close()


def test_a_value_that_is_no_state_is_refused(tmp_path):
    with AsyncCheckpointer(tmp_path) as checkpointer, pytest.raises(TypeError, match="give a dict"):
        checkpointer.prepare([torch.zeros(3)])


# ------------------------------------------------------------------------------------------------ optimizers


def test_an_optimizers_state_is_prepared_for_after_its_first_step(tmp_path):
    model, optimizer = model_and_optimizer()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.prepare({"model": model, "optimizer": optimizer})
        assert has_made(checkpointer, 5)
        step(model, optimizer)
        assert has_made(checkpointer, 13)
        assert eventually(lambda: not is_watching())
        assert checkpointer.save(1, {"model": model, "optimizer": optimizer}).bytes > 12 * MIB
        assert checkpointer._staging.size_bytes == 13 * MIB


def test_an_optimizer_whose_first_step_pauses_is_prepared_for_whole(tmp_path):
    model, optimizer = model_and_optimizer()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.prepare({"model": model, "optimizer": optimizer})
        for buffers, name in ((9, "exp_avg"), (13, "exp_avg_sq")):
            optimizer.state[model.weight][name] = torch.zeros_like(model.weight)
            assert has_made(checkpointer, buffers)
        assert eventually(lambda: not is_watching())


def test_an_optimizer_without_state_is_watched_until_the_first_save(tmp_path):
    model, _ = model_and_optimizer()
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.prepare(state)
        step(model, state["optimizer"])
        assert is_watching()
        checkpointer.save(1, state)
        assert eventually(lambda: not is_watching())


def test_an_optimizer_that_is_gone_is_watched_no_more(tmp_path):
    model, optimizer = model_and_optimizer()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.prepare({"model": model, "optimizer": optimizer})
        del optimizer
        gc.collect()
        assert eventually(lambda: not is_watching())


# ------------------------------------------------------------------------------------------------ restore


def test_restoring_prepares_for_saves_of_the_same_state(tmp_path):
    class Trainer:
        def __init__(self):
            self.weights = torch.ones(3 * MIB // 4)

        def state_dict(self):
            return {"weights": self.weights}

        def load_state_dict(self, state):
            self.weights = state["weights"]

    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "trainer": Trainer()}
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
    with AsyncCheckpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state) == 1
        assert has_made(checkpointer, 16)


def test_restoring_nothing_prepares_without_calling_the_state_dict_of_others(tmp_path):
    class Data:
        def state_dict(self):
            pytest.fail("this may have side effects")

    with AsyncCheckpointer(tmp_path) as checkpointer:
        assert checkpointer.restore({"data": Data(), "a": torch.zeros(2 * MIB // 4), "step": 3}) is None
        assert has_made(checkpointer, 3)


def test_a_state_that_cannot_be_counted_is_restored_with_a_warning(tmp_path, monkeypatch):
    def fail(state):
        raise ZeroDivisionError("no")

    state = {"a": torch.ones(10)}
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        monkeypatch.setattr(preparation, "size_of", fail)
        with pytest.warns(RuntimeWarning, match="could not be made in advance"):
            assert checkpointer.restore({"a": torch.zeros(10)}) == 1


# ------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("is_prepared", [False, True])
def test_the_memory_of_a_state_on_a_gpu_is_pinned(tmp_path, is_prepared):
    state = {"a": torch.arange(10 * MIB // 8, device="cuda"), "b": torch.ones(3)}
    with AsyncCheckpointer(tmp_path) as checkpointer:
        if is_prepared:
            checkpointer.prepare(state)
            assert has_made(checkpointer, 11)
        for step in range(2):
            state["a"].add_(1)
            checkpointer.save(step, state).result()
        assert len(checkpointer._staging._spare) == 11
        assert all(buffer.is_pinned() for buffer in checkpointer._staging._spare)
        found = {"a": torch.zeros_like(state["a"]), "b": torch.zeros(3)}
        assert checkpointer.restore(found) == 1 and found["a"].equal(state["a"]) and found["b"].eq(1).all()


def test_if_no_thread_can_start_a_warning_says_so_and_the_save_makes_memory(tmp_path, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    model, optimizer = model_and_optimizer()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        with (
            monkeypatch.context() as patched,
            pytest.warns(RuntimeWarning, match="in advance .*new thread"),
        ):
            patched.setattr(threading.Thread, "start", refuse)
            checkpointer.prepare({"model": model, "optim": optimizer})
        checkpointer.save(1, {"model": model, "optim": optimizer}).result()
