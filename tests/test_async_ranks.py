"""`AsyncCheckpointer` on several ranks: they save and restore together, and share errors."""

import ast
import atexit
import contextlib
import os
import signal
import weakref

import pytest
import torch
import torch.distributed as dist
from folder_store import FolderStore, install
from test_checkpoint import assert_same
from test_dcp import on_ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gdsdata import AsyncCheckpointer, EngineOptions
from gdsdata.errors import CorruptData, IoError, RankLost, SaveAborted

FAILS = EngineOptions(faults="seed=1,fail=1")


def _each_saves_its_own(rank, folder):
    with AsyncCheckpointer(folder / "run", keep_last=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"mine": torch.full((50_000,), 10.0 * step + rank), "rank": rank})
        state = {"mine": torch.zeros(50_000), "rank": None}
        assert checkpointer.restore(state) == 2
        assert state["mine"].eq(20 + rank).all() and state["rank"] == rank
    return sorted(path.name.split("-")[0:2] for path in (folder / "run" / "step-2").iterdir())


def test_each_rank_saves_and_restores_its_own_state(tmp_path):
    (names, others) = on_ranks(2, _each_saves_its_own, tmp_path)
    assert names == others == [["manifest.json"], ["rank", "0"], ["rank", "1"]]
    with pytest.raises(ValueError, match="was saved by 2 ranks, and these are 1"):
        AsyncCheckpointer(tmp_path / "run").restore({"rank": 0})


def _sharded(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(33, 50), torch.nn.Linear(50, 7))
    for layer in (*model, model):
        fully_shard(layer)
    return model, torch.optim.AdamW(model.parameters())


def _step(model, optimizer):
    torch.manual_seed(9)
    optimizer.zero_grad()
    model(torch.randn(4, 33)).square().mean().backward()
    optimizer.step()


def _whole(model, optimizer):
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()["state"]}
    return torch.utils._pytree.tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, state)


def _save_and_restore_sharded(rank, folder):
    model, optimizer = _sharded(1)
    _step(model, optimizer)
    again, its_optimizer = _sharded(2)
    with AsyncCheckpointer(folder / "run") as checkpointer:
        checkpointer.save(1, {"model": model, "optim": optimizer})
        assert checkpointer.restore({"model": again, "optim": its_optimizer}) == 1
    assert_same(_whole(again, its_optimizer), _whole(model, optimizer))
    _step(again, its_optimizer)
    _step(model, optimizer)
    assert_same(_whole(again, its_optimizer), _whole(model, optimizer))


def test_sharded_models_and_their_optimizers_come_back(tmp_path):
    on_ranks(2, _save_and_restore_sharded, tmp_path)


def _error_of(call):
    try:
        call()
    except (IoError, SaveAborted, KeyError) as error:
        return type(error).__name__, str(error)
    return None


def _fail_on_rank_1(rank, folder):
    state = {"a": torch.ones(5000)}
    with AsyncCheckpointer(folder / "run", options=FAILS if rank == 1 else None) as checkpointer:
        errors = [_error_of(checkpointer.save(step, state).result) for step in (2, 3)]
    return errors, AsyncCheckpointer(folder / "run").restore(state)


def _save(rank, folder, step):
    with AsyncCheckpointer(folder / "run") as checkpointer:
        checkpointer.save(step, {"a": torch.full((5000,), float(step))})


def test_an_error_of_one_rank_is_raised_on_all_and_nothing_is_committed(tmp_path):
    on_ranks(2, _save, tmp_path, 1)
    (first, its_step), (second, _) = on_ranks(2, _fail_on_rank_1, tmp_path)
    assert its_step == 1
    for of_first, of_second in zip(first, second, strict=True):
        assert of_second[0] == "IoError"
        assert of_first == ("SaveAborted", f"rank 1 failed: IoError: {of_second[1]}")
    files = [path.name.split("-")[0] for path in (tmp_path / "run").glob("*/*")]
    assert sorted(files) == ["manifest.json", "rank", "rank"], "the failed save leaves nothing behind"


def _save_what_cannot_be_pickled_on_rank_1(rank, folder):
    with AsyncCheckpointer(folder / "run") as checkpointer:
        if rank == 1:
            with pytest.raises((AttributeError, TypeError)):
                checkpointer.save(1, {"a": lambda: None})
        else:
            return _error_of(checkpointer.save(1, {"a": 1}).result)


def test_a_save_that_one_rank_cannot_begin_fails_on_the_others(tmp_path):
    kind, text = on_ranks(2, _save_what_cannot_be_pickled_on_rank_1, tmp_path)[0]
    assert kind == "SaveAborted" and text.startswith("rank 1 failed: ")


def _fail_to_begin_and_restore(rank, folder):
    state = {"a": torch.zeros(5000)}
    with AsyncCheckpointer(folder / "run") as checkpointer:
        checkpointer.save(1, {"a": torch.ones(5000)}).result()
        handle = None
        for step in (2, 3):  # the handle reports the error on one rank, the next call on the other
            try:
                handle = checkpointer.save(step, {"a": (lambda: None) if rank == 1 else torch.ones(5000)})
            except (AttributeError, TypeError, SaveAborted):
                continue
        if rank == 0 and handle is not None:
            assert _error_of(handle.result) is not None
        _error_of(lambda: checkpointer.restore(state))
        assert checkpointer.restore(state) == 1
    return state["a"].eq(1).all().item()


def test_restoring_comes_behind_all_saves_of_all_ranks(tmp_path):
    assert on_ranks(2, _fail_to_begin_and_restore, tmp_path) == [True, True]


def _restore_damaged(rank, folder):
    state = {"a": torch.zeros(5000)}
    try:
        AsyncCheckpointer(folder / "run").restore(state, verify=True)
    except (CorruptData, SaveAborted) as error:
        return type(error).__name__
    return None


def test_a_rank_that_cannot_restore_stops_the_others(tmp_path):
    on_ranks(2, _save, tmp_path, 1)
    (file,) = (tmp_path / "run" / "step-1").glob("rank-1-*.pt")
    content = bytearray(file.read_bytes())
    content[9000] ^= 1
    file.write_bytes(content)
    assert on_ranks(2, _restore_damaged, tmp_path) == ["SaveAborted", "CorruptData"]


def _save_other_steps(rank, folder):
    with AsyncCheckpointer(folder / "run") as checkpointer:
        return _error_of(checkpointer.save(rank, {"a": 1}).result)


def test_a_save_of_different_steps_is_an_error_on_all_ranks(tmp_path):
    for kind, text in on_ranks(2, _save_other_steps, tmp_path):
        assert kind == "SaveAborted" and "the ranks save different steps: this one 1, and the first one 0" in text


class _Interrupted:
    def state_dict(self):
        raise KeyboardInterrupt


def _interrupt_on_rank_1(rank, folder):
    with AsyncCheckpointer(folder / "run", timeout_s=3) as checkpointer:
        if rank == 1:
            with pytest.raises(KeyboardInterrupt):
                checkpointer.save(1, {"a": _Interrupted()})
        error = None if rank == 1 else _error_of(checkpointer.save(1, {"a": 1}).result)
        checkpointer.save(2, {"a": 1}).result()
        return error


def test_ctrl_c_before_a_save_is_queued_ends_that_save_on_all_ranks(tmp_path):
    (kind, text), _ = on_ranks(2, _interrupt_on_rank_1, tmp_path)
    assert kind == "SaveAborted" and "rank 1 failed: SaveAborted: the save was interrupted" in text


def _save_into_other_folders(rank, folder):
    with AsyncCheckpointer(folder / f"run-{rank}") as checkpointer:
        return _error_of(checkpointer.save(1, {"a": 1}).result)


def test_a_save_into_different_folders_is_an_error_on_all_ranks(tmp_path):
    for _, text in on_ranks(2, _save_into_other_folders, tmp_path):
        assert f"made the folder '{tmp_path}/run-0/step-1', and this rank has no '{tmp_path}/run-1/step-1'" in text
        assert "Give all ranks the same folder" in text


def _die_on_rank_1(rank, folder):
    checkpointer = AsyncCheckpointer(folder / "run", timeout_s=20)
    checkpointer.save(1, {"a": 1}).result()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error = _error_of(checkpointer.save(2, {"a": 2}).result)
    (folder / "error").write_text(repr(error))
    os._exit(0)


def test_a_rank_that_dies_ends_the_save_of_the_others_and_leaves_the_old_checkpoint(tmp_path):
    with pytest.raises(BaseException):  # no rank answers  # noqa: B017
        on_ranks(2, _die_on_rank_1, tmp_path)
    kind, text = ast.literal_eval((tmp_path / "error").read_text())
    assert kind == "SaveAborted" and text.startswith("a rank of the 2 that save and restore together has ended")
    assert AsyncCheckpointer(tmp_path / "run").steps() == [1]


def _one_of_two_uploads(rank, folder):
    alone = dist.new_group([0])
    if rank == 0:
        install(FolderStore(folder / "bucket"))
        with AsyncCheckpointer(folder / "run", upload="s3://bucket/run", process_group=alone) as checkpointer:
            checkpointer.save(1, {"mine": torch.ones(100)})
    dist.barrier()
    return (folder / "bucket").exists()


def test_a_rank_that_saves_for_all_uploads_without_the_others(tmp_path):
    assert on_ranks(2, _one_of_two_uploads, tmp_path) == [True, True]


def _upload_on_one_rank(rank, folder):
    install(FolderStore(folder / "bucket"))
    with pytest.raises(ValueError, match=r"upload= differs among the ranks: rank 0 has 's3://b/run', and rank 1 has N"):
        AsyncCheckpointer(folder / "run", upload="s3://b/run" if rank == 0 else None, timeout_s=20)


def test_an_upload_that_only_one_rank_is_given_is_refused(tmp_path):
    on_ranks(2, _upload_on_one_rank, tmp_path)


def _restore_other_steps(rank, folder):
    with AsyncCheckpointer(folder / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"a": torch.full((3,), step)})
        state = {"a": torch.zeros(3, dtype=torch.int64)}
        with pytest.raises(ValueError, match=r"step= differs among the ranks: rank 0 has 1, and rank 1 has 2"):
            checkpointer.restore(state, step=1 + rank)
        assert not state["a"].any()
        return checkpointer.restore(state, step=2)


def test_a_restore_of_different_steps_is_an_error_and_changes_nothing(tmp_path):
    assert on_ranks(2, _restore_other_steps, tmp_path) == [2, 2]


class _Refuses:
    def __init__(self, refuses):
        self._refuses = refuses

    def state_dict(self):
        return {"a": 1}

    def load_state_dict(self, state):
        if self._refuses:
            raise KeyError("this one takes no state")


def _restore_into_one_that_refuses(rank, folder):
    with AsyncCheckpointer(folder / "run") as checkpointer:
        checkpointer.save(1, {"object": _Refuses(False)})
        error = _error_of(lambda: checkpointer.restore({"object": _Refuses(rank == 1)}))
        return error, checkpointer.restore({"object": _Refuses(False)})


def test_an_object_that_refuses_its_state_on_one_rank_is_an_error_on_all(tmp_path):
    (others, after), (own, _) = on_ranks(2, _restore_into_one_that_refuses, tmp_path)
    assert own[0] == "KeyError" and after == 1
    assert others[0] == "SaveAborted" and "rank 1 failed: KeyError: 'this one takes no state'" in others[1]


def _make_one_on_the_first_rank_alone(rank, folder):
    text = ""
    if rank == 0:
        with pytest.raises(RankLost) as caught:
            AsyncCheckpointer(folder / "run", timeout_s=1)
        text = str(caught.value)
    dist.barrier()
    return text


def test_a_checkpointer_of_the_first_rank_alone_says_that_all_ranks_make_its_calls(tmp_path):
    text = on_ranks(2, _make_one_on_the_first_rank_alone, tmp_path)[0]
    assert "All ranks make the calls of an AsyncCheckpointer, also if only some of them write (replicas=)" in text


def _restore_when_a_rank_comes_later(rank, folder):
    with AsyncCheckpointer(folder / "run", timeout_s=1) as checkpointer:
        checkpointer.save(1, {"a": 1}).result()
        for _ in range(2 if rank == 0 else 0):
            with pytest.raises(RankLost):
                checkpointer.restore({"a": 0})
        dist.barrier()
        with contextlib.suppress(RankLost):  # rank 1 learns now that it was given up
            checkpointer.restore({"a": 0})
        dist.barrier()
        return checkpointer.restore({"a": 0})


def test_a_rank_that_comes_after_others_have_given_up_restores_with_them(tmp_path):
    assert on_ranks(2, _restore_when_a_rank_comes_later, tmp_path) == [1, 1]


def _group_at_the_end(rank, folder):
    checkpointer = AsyncCheckpointer(folder / "run")
    checkpointer.save(1, {"a": 1}).result()
    checkpointer.close()
    group = weakref.ref(checkpointer._ranks._group)
    atexit._run_exitfuncs()
    return group() is None


def test_the_end_of_a_program_waits_for_the_threads_of_a_checkpointers_group(tmp_path):
    """They free tensors, for which torch acquires the GIL. Later, that would abort the program."""
    assert on_ranks(2, _group_at_the_end, tmp_path) == [True, True]
