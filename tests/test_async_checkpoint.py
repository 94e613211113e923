"""`AsyncCheckpointer`: saved states come back, errors are reported, folders stay in order."""

import contextlib
import ctypes
import errno
import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from helpers import MIB, eventually, exit_code_of_fork, run_script, start_script
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint import assert_same, awkward
from test_checkpoint_save import disk_of

import gdsdata
from gdsdata import AsyncCheckpointer, EngineOptions, GDSDataset
from gdsdata.checkpoint.background import staging
from gdsdata.checkpoint.background.checkpoint_folder import LockedFolder
from gdsdata.checkpoint.background.file_saves import FileSaves
from gdsdata.checkpoint.background.save_counts import SaveCounts
from gdsdata.checkpoint.background.save_handle import SaveHandle
from gdsdata.checkpoint.background.saver import Saver
from gdsdata.checkpoint.background.staging import Staged, pieces
from gdsdata.checkpoint.threads import DaemonThreads
from gdsdata.errors import CorruptData, EngineClosed, IoError
from gdsdata.formats import Records

pytestmark = pytest.mark.usefixtures("quick_programs")


def trained(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Make a model, with two steps of its optimizer behind it."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 3))
    return model, torch.optim.AdamW(model.parameters())


def copy_of(model, optimizer):
    moments = optimizer.state_dict()["state"][0]["exp_avg"]
    return [{key: value.clone() for key, value in model.state_dict().items()}, moments.clone()]


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# ------------------------------------------------------------------------------------------------ there and back


def test_a_model_and_its_optimizer_come_back_into_new_ones(tmp_path):
    model, optimizer = trained()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(7, {"model": model, "optim": optimizer})
        assert Path(handle.result()) == tmp_path / "step-7" and handle.done() and handle.step == 7
        assert handle.bytes > 64 * 300 * 4 * 3 and handle.stall_s > 0
    again, its_optimizer = fresh()
    weight = again[0].weight
    assert AsyncCheckpointer(tmp_path).restore({"model": again, "optim": its_optimizer}) == 7
    assert again[0].weight is weight
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    assert_same(its_optimizer.state_dict(), optimizer.state_dict())
    torch.manual_seed(5)
    inputs = torch.randn(8, 64)
    for one, its in ((model, optimizer), (again, its_optimizer)):
        its.zero_grad()
        one(inputs).square().mean().backward()
        its.step()
    assert_same(dict(again.state_dict()), dict(model.state_dict()))


def test_a_state_that_is_there_is_filled_in_place(tmp_path):
    model, optimizer = trained()
    kept = copy_of(model, optimizer)
    moments = optimizer.state[model[0].weight]["exp_avg"]
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model, "optim": optimizer})
        with torch.no_grad():  # while the save is running
            for tensor in [*model.state_dict().values(), moments]:
                tensor.fill_(1)
        assert checkpointer.restore({"model": model, "optim": optimizer}) == 1
    assert_same(copy_of(model, optimizer), kept)
    assert optimizer.state[model[0].weight]["exp_avg"].data_ptr() == moments.data_ptr()


@pytest.mark.filterwarnings("ignore:.*quantize|TypedStorage is deprecated")
def test_torch_reads_the_file_of_a_rank(tmp_path):
    state = awkward()
    del state["storage"]  # two storages are never equal
    with AsyncCheckpointer(tmp_path, staging_bytes="1MiB") as checkpointer:
        folder = Path(checkpointer.save(0, {"state": state}).result())
    (file,) = folder.glob("rank-0-*.pt")
    assert_same(torch.load(file, weights_only=False)["state"], torch_reads(state, tmp_path))
    gdsdata.load(file, verify=True, weights_only=False)


def torch_reads(state, folder: Path):
    torch.save(state, folder / "of_torch.pt")
    return torch.load(folder / "of_torch.pt", weights_only=False)


def test_plain_objects_are_replaced_where_they_are_and_their_tensors_filled(tmp_path):
    saved = {"epoch": 3, "rng": (1, (2, 3), None), "t": torch.ones(2)}
    saved["more"] = {"best": 0.5, "list": [torch.arange(4), "x"]}
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, saved)
        tensors = torch.zeros(4, dtype=torch.int64), torch.zeros(2)
        more = {"best": 0, "list": [tensors[0], "y"]}
        state = {"epoch": 0, "rng": (0, (0, 0), 5), "t": tensors[1], "more": more}
        assert checkpointer.restore(state) == 1
    assert_same(state, saved)
    assert state["more"] is more and state["more"]["list"][0] is tensors[0] and state["t"] is tensors[1]


def test_lists_and_empty_dicts_take_as_many_values_as_were_saved(tmp_path):
    saved = {"losses": [0.5, 0.25], "shape": (2, 3), "best": {"top1": 0.5}, "lists": [[1], [2, 3]]}
    saved["history"] = {"epochs": [{"loss": 1.0, "norms": [1]}], "means": [torch.ones(2), torch.zeros(2)]}

    def begun():
        history = {"epochs": [], "means": []}
        return {"losses": [], "shape": (), "best": {}, "lists": [[], []], "history": history}

    longer = {**begun(), "losses": [0.5, 0.25, 0.125], "shape": (2, 3, 4), "lists": [[1, 1], [2]]}
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(3, saved).result()
        for state in (begun(), longer):
            held = state["losses"], state["best"], state["lists"][0], state["history"]["epochs"]
            assert checkpointer.restore(state) == 3
            assert_same(state, saved)
            assert held[0] is state["losses"] and held[1] is state["best"]
            assert held[2] is state["lists"][0] and held[3] is state["history"]["epochs"]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"it": {"losses": [], "other": 1}}, "it.other only in the state"),
        ({"it": {"losses": []}}, "different names: it.epoch only in the file"),
        ({"it": {"losses": [torch.ones(2)], "epoch": 0}}, "it.losses.1 only in the file"),
        ({"it": {"losses": {"a": 1}, "epoch": 0}}, "it.losses.a only in the state"),
    ],
)
def test_other_names_and_other_lists_of_tensors_are_still_refused(tmp_path, state, words):
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(3, {"it": {"losses": [torch.ones(2), torch.ones(2)], "epoch": 5}}).result()
        with pytest.raises(ValueError, match=words):
            checkpointer.restore(state)


def test_a_data_set_goes_on_where_it_was(tmp_path):
    (tmp_path / "0.bin").write_bytes(bytes(range(200)))
    dataset, again = (GDSDataset(tmp_path / "0.bin", 4, Records("u1", (5,)), seed=3, device="cpu") for _ in range(2))
    batches = iter(dataset)
    before = [next(batches) for _ in range(3)]
    with AsyncCheckpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(3, {"data": dataset})
        assert checkpointer.restore({"data": again}) == 3
    assert len(before) == 3
    assert_same(list(again), list(batches))


def test_without_a_checkpoint_nothing_is_changed(tmp_path):
    state = {"a": torch.ones(3), "b": 4}
    assert AsyncCheckpointer(tmp_path / "absent").restore(state) is None
    assert_same(state, {"a": torch.ones(3), "b": 4})
    assert not (tmp_path / "absent").exists()


def test_names_and_shapes_that_differ_are_errors_that_name_them(tmp_path):
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": {"x": torch.ones(3)}, "b": 1})
        for state, words in (
            ({"c": 1}, "nothing of the name 'c', but 'a', 'b': restore a state without it"),
            ({"a": {"y": torch.ones(3)}}, "a.y only in the state, a.x only in the file: restore into the names"),
            ({"a": {"x": torch.ones(4)}}, r"a.x in .* has shape \(3,\) and dtype torch.float32, .* fill \(4,\) and"),
            ({"a": {"x": torch.ones(3).half()}}, r"a.x in .* dtype torch.float32, .* fill \(3,\) and torch.float16: r"),
            ({"a": {"x": 5}}, "a.x is a tensor in '.*', and of type int in the state"),
            ({"a": {"x": torch.eye(3).to_sparse()}}, "a.x in .* torch.sparse.* cannot be copied into the other"),
        ):
            with pytest.raises(ValueError, match=words) as caught:
                checkpointer.restore(state)
            assert not any(argument in str(caught.value) for argument in ("dtype=", "into=", "strict=", " into,"))
        state = {"b": 0}
        assert checkpointer.restore(state) == 1 and state == {"b": 1}
        with pytest.raises(FileNotFoundError, match="no complete checkpoint of step 2; there are: 1"):
            checkpointer.restore(state, step=2)


# ------------------------------------------------------------------------------------------------ staging


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 30000)), max_size=20),
    st.integers(1, 4),
)
def test_pieces_cover_every_byte_once_and_are_no_longer_than_they_may_be(gaps_and_sizes, pages):
    offsets, sizes, end = [], [], 0
    for gap, size in gaps_and_sizes:
        offsets.append(end + gap)
        sizes.append(size)
        end = offsets[-1] + size
    covered = [0] * len(sizes)
    for piece in pieces(offsets, sizes, 4096 * pages):
        assert piece.file_begin % 4096 == 0
        for part in piece.parts:
            assert part.begin == covered[part.storage] and part.size_bytes > 0
            assert part.file_offset == offsets[part.storage] + part.begin
            assert piece.file_begin <= part.file_offset <= part.file_offset + part.size_bytes
            assert part.file_offset + part.size_bytes <= piece.file_begin + 4096 * pages
            covered[part.storage] += part.size_bytes
    assert covered == sizes


@pytest.mark.parametrize("staging_bytes", ["4KiB", "64KiB", 3 * MIB, "1GiB"])
def test_a_state_larger_than_the_staging_memory_flows_through_it(tmp_path, staging_bytes):
    state = {"a": torch.arange(2_000_003), "small": [torch.full((i,), i) for i in range(50)]}
    if staging_bytes == "4KiB":
        state["a"] = state["a"][:20_000].clone()
    with AsyncCheckpointer(tmp_path, staging_bytes=staging_bytes) as checkpointer:
        for step in range(2):
            state["a"][0] = step
            checkpointer.save(step, {"state": state})
            state["a"][0] = -1
        checkpointer.wait()
        most = {"4KiB": 4096, "64KiB": 65536, "1GiB": 64 * MIB}.get(staging_bytes, staging_bytes)
        assert 0 < checkpointer._staging.size_bytes <= most
        found = {"state": {"a": torch.zeros_like(state["a"]), "small": [torch.zeros_like(x) for x in state["small"]]}}
        assert checkpointer.restore(found) == 1
        state["a"][0] = 1
        assert_same(found["state"], state)


def test_several_saves_may_be_under_way(tmp_path):
    state = {"a": torch.zeros(1 << 20)}
    with AsyncCheckpointer(tmp_path, keep_last=10) as checkpointer:
        for step in range(6):
            state["a"].fill_(step)
            checkpointer.save(step, state)
    for step in range(6):
        assert AsyncCheckpointer(tmp_path).restore(state, step) == step and state["a"].eq(step).all()


def test_a_step_that_is_a_time_in_ns_is_found_again(tmp_path):
    with AsyncCheckpointer(tmp_path) as checkpointer:
        for step in (1_700_000_000_000_000_000, 10**19 - 1):
            checkpointer.save(step, {"a": torch.ones(3)})
    for step in (None, 1_700_000_000_000_000_000):
        state = {"a": torch.zeros(3)}
        assert AsyncCheckpointer(tmp_path).restore(state, step) == (step or 10**19 - 1) and state["a"].eq(1).all()


def test_arguments_out_of_range_are_errors_that_name_them(tmp_path):
    for name, value in {"keep_last": 0, "keep_every": 0, "staging_bytes": 0, "device_staging_bytes": -1}.items():
        with pytest.raises(ValueError, match=f"{name}={value}"):
            AsyncCheckpointer(tmp_path, **{name: value})
    for value in ("many", 10**400, f"{10**308}GiB"):
        with pytest.raises(ValueError, match=f"staging_bytes={value!r:.40}.* must be a number of bytes"):
            AsyncCheckpointer(tmp_path, staging_bytes=value)
    with AsyncCheckpointer(tmp_path) as checkpointer, pytest.raises(ValueError, match="step=-1"):
        checkpointer.save(-1, {})
    with pytest.raises(EngineClosed, match="make a new one"):
        checkpointer.save(1, {})


# ------------------------------------------------------------------------------------------------ copied where they are


class Gate:
    """Blocks staging while it is shut."""

    def __init__(self, monkeypatch):
        self.opened, self.reached, copy_from = threading.Event(), threading.Event(), Staged.copy_from

        def held_up(staged, storages):
            self.reached.set()
            assert self.opened.wait(60)
            copy_from(staged, storages)

        monkeypatch.setattr(Staged, "copy_from", held_up)


def test_a_save_waits_for_no_staging_where_devices_have_room_for_a_copy(tmp_path, monkeypatch):
    gate, state = Gate(monkeypatch), {"a": torch.zeros(1 << 20), "b": [torch.zeros(5), 1]}
    with AsyncCheckpointer(tmp_path, device_staging_bytes="16MiB") as checkpointer:
        for step in (1, 2):
            state["a"].fill_(step)
            state["b"][0].fill_(step)
            handle = checkpointer.save(step, {"state": state})
            state["a"].fill_(-1)
            state["b"][0].fill_(-1)
        assert gate.reached.wait(60) and not handle.done()
        gate.opened.set()
        for step in (1, 2):
            assert checkpointer.restore({"state": state}, step) == step
            assert state["a"].eq(step).all() and state["b"][0].eq(step).all()


def test_states_that_find_no_room_on_their_devices_are_staged_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "_MOST_COPIED_ON_CPU_BYTES", 5 * MIB)
    state, copied = {"a": torch.zeros(1 << 20)}, []
    with AsyncCheckpointer(tmp_path, staging_bytes="64KiB", device_staging_bytes="1GiB", keep_last=9) as checkpointer:
        take = checkpointer._snapshots.take
        monkeypatch.setattr(checkpointer._snapshots, "take", lambda of: copied.append(taken := take(of)) or taken)
        for step in range(6):  # some meet the copy of the save before
            state["a"].fill_(step)
            checkpointer.save(step, state)
            state["a"].fill_(-1)
        checkpointer.wait()
        assert copied[0] is not None and None in copied
        checkpointer.save(6, state).result()
        assert copied[-1] is not None, "a staged state that was written releases its memory"
        for step in range(6):
            assert checkpointer.restore(state, step) == step and state["a"].eq(step).all()


def test_a_full_device_is_a_warning_and_the_state_is_staged_at_once(tmp_path, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    state = {"a": torch.ones(1000)}
    with AsyncCheckpointer(tmp_path, device_staging_bytes="1GiB") as checkpointer:
        with monkeypatch.context() as patched, pytest.warns(RuntimeWarning, match="device_staging_bytes allows"):
            patched.setattr(torch.Tensor, "clone", fail)
            checkpointer.save(1, state).result()
        assert checkpointer.restore({"a": torch.zeros(1000)}) == 1
        assert checkpointer._snapshots.take([state["a"].view(torch.uint8)]) is not None


def test_an_error_while_a_copy_is_staged_is_raised_at_the_next_call(tmp_path, monkeypatch):
    state = {"a": torch.ones(5000)}
    with AsyncCheckpointer(tmp_path, device_staging_bytes="1GiB") as checkpointer:
        with monkeypatch.context() as patched:
            patched.setattr(Staged, "copy_from", lambda *_: 1 / 0)
            handle = checkpointer.save(1, state)
            assert eventually(handle.done)
        with pytest.raises(RuntimeError, match="could not be copied: ZeroDivisionError"):
            checkpointer.save(2, state)
        checkpointer.save(3, state).result()
        assert checkpointer.steps() == [3] and not checkpointer._snapshots._taken


# ------------------------------------------------------------------------------------------------ the folder


def test_a_program_may_change_its_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with AsyncCheckpointer("runs") as checkpointer:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir("elsewhere")
        checkpointer.save(1, {"w": torch.ones(3)})
        checkpointer.wait()
        state = {"w": torch.zeros(3)}
        assert checkpointer.restore(state) == 1
    assert sorted(os.listdir(tmp_path / "runs")) == ["lock", "step-1"] and not os.listdir()


def test_the_newest_and_every_so_manieth_are_kept(tmp_path):
    with AsyncCheckpointer(tmp_path, keep_last=2, keep_every=4) as checkpointer:
        for step in range(1, 11):
            checkpointer.save(step, {"a": step}).result()
        assert checkpointer.steps() == [4, 8, 9, 10]
    assert {name.split("/")[0] for name in files(tmp_path)} == {"lock", "step-4", "step-8", "step-9", "step-10"}


def test_the_newest_is_the_one_that_was_saved_last(tmp_path):
    state = {"a": 0}
    with AsyncCheckpointer(tmp_path, keep_last=2) as checkpointer:
        for step in (100, 110, 50):  # after a return to an earlier step
            checkpointer.save(step, {"a": step}).result()
        assert checkpointer.restore(state) == 50 and state == {"a": 50}
        assert checkpointer.steps() == [110, 50]


def test_a_run_that_went_back_continues_from_its_last_save_in_later_processes(tmp_path):
    state = {"a": 0}
    with AsyncCheckpointer(tmp_path, keep_last=3) as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer.save(step, {"a": step}).result()
        assert checkpointer.restore(state, step=2) == 2
    with AsyncCheckpointer(tmp_path, keep_last=3) as checkpointer:  # nothing was saved since
        assert checkpointer.restore(state) == 4
        assert checkpointer.restore(state, step=2) == 2
        checkpointer.save(3, {"a": 30}).result()
        assert checkpointer.steps() == [2, 4, 3]
    save = """
import sys
import gdsdata

with gdsdata.AsyncCheckpointer(sys.argv[1], keep_last=2) as checkpointer:
    state = {"a": 0}
    assert checkpointer.restore(state) == 3 and state == {"a": 30}, state
    checkpointer.save(2, {"a": 20}).result()
"""
    code, _, stderr = run_script(save, tmp_path)
    assert code == 0, stderr
    checkpointer = AsyncCheckpointer(tmp_path)
    assert checkpointer.steps() == [3, 2]
    assert checkpointer.restore(state) == 2 and state == {"a": 20}


def test_a_step_saved_anew_replaces_the_one_before(tmp_path):
    state = {"a": 0}
    with AsyncCheckpointer(tmp_path) as checkpointer:
        for value in (1, 2):
            checkpointer.save(5, {"a": value}).result()
            assert len(files(tmp_path / "step-5")) == 2
        assert checkpointer.restore(state) == 5 and state == {"a": 2}


def test_leftovers_of_a_crash_are_removed_and_files_of_others_stay(tmp_path):
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": 1})
    theirs = ["notes.txt", "step-1/plot.png", "step-2/readme", "step-x/manifest.json"]
    ours = [
        "step-2/rank-0-00c0ffee.pt", "step-3/rank-0-00c0ffee.pt.12-0.tmp", "step-3/manifest.json.12-1.tmp",
        "step-1/rank-0-00c0ffee.pt", "step-1/rank-0-00c0ffee.pt.9-3.tmp",
    ]  # fmt: skip
    before = set(files(tmp_path))
    for name in theirs + ours:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"?")
    state = {"a": 0}
    assert AsyncCheckpointer(tmp_path).restore(state) == 1 and state == {"a": 1}
    assert set(files(tmp_path)) > set(theirs + ours), "a restore changes nothing"
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(4, {"a": 4})
    left = {name for name in files(tmp_path) if not name.startswith("step-4")}
    assert left == before | set(theirs) | {"step-2", "step-x"}


def test_a_damaged_checkpoint_is_an_error(tmp_path):
    with AsyncCheckpointer(tmp_path) as checkpointer:
        folder = Path(checkpointer.save(1, {"a": torch.ones(3000)}).result())
    (file,), manifest, state = folder.glob("*.pt"), folder / "manifest.json", {"a": torch.zeros(3000)}
    content, said = bytearray(file.read_bytes()), manifest.read_text()
    content[5000] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptData, match="a in .* has the checksum"):
        AsyncCheckpointer(tmp_path).restore(state, verify=True)
    file.write_bytes(content[:-1])
    with pytest.raises(CorruptData, match="and its manifest says"):
        AsyncCheckpointer(tmp_path).restore(state)
    file.unlink()
    with pytest.raises(FileNotFoundError):
        AsyncCheckpointer(tmp_path).restore(state)
    for text in ("", "[]", said.replace('"format": 1', '"format": 2'), said.replace("rank-0", "../rank-0")):
        manifest.write_text(text)
        with pytest.raises(CorruptData, match="is no manifest"):
            AsyncCheckpointer(tmp_path).restore(state)
    said = json.loads(said)
    manifest.write_text(json.dumps({**said, "files": said["files"] * 2}))
    with pytest.raises(ValueError, match="was saved by 2 ranks, and these are 1"):
        AsyncCheckpointer(tmp_path).restore(state)


def test_two_do_not_save_into_one_folder(tmp_path):
    with AsyncCheckpointer(tmp_path) as first, AsyncCheckpointer(tmp_path) as second:
        first.save(1, {"a": 1}).result()
        handle = second.save(2, {"a": 2})
        words = rf"another AsyncCheckpointer of this process .* to '{tmp_path}' now: close\(\) that one first"
        with pytest.raises(IoError, match=words):
            handle.result()
        second.wait()  # that error was reported
        assert second.restore({"a": 0}) == 1
        first.close()
        second.save(2, {"a": 2}).result()


def test_a_forked_child_keeps_no_share_in_the_folder(tmp_path):
    first = AsyncCheckpointer(tmp_path)
    first.save(1, {"a": 1}).result()
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:  # such as a DataLoader's worker
        os.read(reader, 1)
        os._exit(0)
    try:
        with AsyncCheckpointer(tmp_path) as second:
            with pytest.raises(IoError, match="saves checkpoints"):
                second.save(2, {"a": 2}).result()  # the lock's copy in the child is gone, the parent's is not
            first.close()
            second.save(2, {"a": 2}).result()
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)


def test_a_checkpointer_in_a_forked_child_is_an_error_that_says_to_make_a_new_one(tmp_path):
    """Its parent's has a thread that the child does not have, and would wait for."""
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": 1}).result()

        def use(call):
            with pytest.raises(EngineClosed, match="the process that forked this one: make a new one"):
                call()

        for call in (lambda: checkpointer.save(2, {"a": 2}), lambda: checkpointer.restore({"a": 0})):
            assert exit_code_of_fork(lambda call=call: use(call)) == 0
        assert checkpointer.restore({"a": 0}) == 1


def test_a_forked_child_leaves_saves_and_copies_to_its_parent(tmp_path):
    slow = EngineOptions(faults="seed=1,late=1,late_ms=500")
    with AsyncCheckpointer(tmp_path / "run", peers=1, memory_folder=tmp_path, options=slow) as checkpointer:
        handle = checkpointer.save(1, {"a": torch.ones(100_000)})
        assert exit_code_of_fork(checkpointer.close) == 0

        def wait():
            with pytest.raises(EngineClosed, match="the process that forked this one: make a new one"):
                checkpointer.wait()

        assert exit_code_of_fork(wait) == 0
        assert handle.result() and handle.copied()


def test_a_fork_without_pythons_handlers_keeps_no_share_in_the_folder(tmp_path):
    first = AsyncCheckpointer(tmp_path)
    first.save(1, {"a": 1}).result()
    if (child := ctypes.PyDLL(None).fork()) == 0:  # as between the fork and the exec of a subprocess
        try:
            signal.pause()  # it may wait for a lock of Python before that: no other thread is there to release it
        finally:
            os._exit(0)
    try:
        first.close()
        with AsyncCheckpointer(tmp_path) as second:
            second.save(2, {"a": 2}).result()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("name", ["step-07", "step-\u0667", "step-7 ", "step--7", "step-0x7"])
def test_folders_of_other_names_are_none_of_its_business(tmp_path, name):
    (tmp_path / name).mkdir()
    with AsyncCheckpointer(tmp_path, keep_last=1) as checkpointer:
        checkpointer.save(7, {"a": 1}).result()
        assert checkpointer.steps() == [7]
    assert (tmp_path / name).is_dir()


def test_a_crash_releases_the_folder(tmp_path):
    holder = start_script(
        """
import gdsdata, sys, time
checkpointer = gdsdata.AsyncCheckpointer(sys.argv[1])
checkpointer.save(1, {"a": 1}).result()
print("saved", flush=True)
time.sleep(60)
""",
        tmp_path,
    )
    assert holder.stdout.readline() == "saved\n"
    with AsyncCheckpointer(tmp_path) as checkpointer:
        with pytest.raises(IoError, match=f"process {holder.pid} "):
            checkpointer.save(2, {"a": 2}).result()
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
        checkpointer.save(2, {"a": 2}).result()


# ------------------------------------------------------------------------------------------------ errors and ends


def test_an_error_in_the_background_is_raised_once_at_the_next_call(tmp_path):
    with disk_of("3m", tmp_path / "disk") as folder:
        with AsyncCheckpointer(folder, staging_bytes="64KiB") as checkpointer:
            state, large = {"a": torch.ones(1000)}, {"a": torch.ones(4 << 20)}
            checkpointer.save(1, state).result()
            for call in (lambda: checkpointer.save(9, state), lambda: checkpointer.restore(state), checkpointer.wait):
                handle = checkpointer.save(2, large)
                assert eventually(handle.done)
                with pytest.raises(IoError, match="reserve space") as caught:
                    call()
                assert caught.value.errno == errno.ENOSPC
            assert checkpointer.steps() == [1]
            with pytest.raises(IoError):
                checkpointer.save(2, large).result()
            assert {name.split("/")[0] for name in files(folder)} == {"lock", "step-1"}, "nothing is left behind"
            checkpointer.save(3, state).result()
            assert checkpointer.steps() == [1, 3]
            checkpointer.save(2, large)
            with pytest.raises(IoError):
                checkpointer.close()
        assert {name.split("/")[0] for name in files(folder) if name.endswith(".pt")} == {"step-1", "step-3"}
        assert AsyncCheckpointer(folder).restore(state) == 3


def saved_together(checkpointer: AsyncCheckpointer, states: dict, monkeypatch) -> list[SaveHandle]:
    """Save states by their steps. None is written before all of them were asked for."""
    begin, all_are_asked_for = checkpointer._saver._begin, threading.Event()
    monkeypatch.setattr(checkpointer._saver, "_begin", lambda step: all_are_asked_for.wait(60) and begin(step))
    handles = [checkpointer.save(step, state) for step, state in states.items()]
    all_are_asked_for.set()
    return handles


def test_each_save_that_failed_in_the_background_is_named_at_the_next_call(tmp_path, monkeypatch):
    with AsyncCheckpointer(tmp_path, options=EngineOptions(faults="seed=1,fail=1")) as checkpointer:
        states = dict.fromkeys((1, 2, 3), {"a": torch.ones(5000)})
        handles = saved_together(checkpointer, states, monkeypatch)
        assert eventually(lambda: all(handle.done() for handle in handles))
        with pytest.warns(RuntimeWarning) as warned, pytest.raises(IoError, match="step-1"):
            checkpointer.wait()
        said = [str(one.message) for one in warned if "another save failed too: IoError: " in str(one.message)]
        assert ["step-2" in said[0], "step-3" in said[1], len(said)] == [True, True, 2]
        checkpointer.wait()  # each is named once


def test_a_save_to_read_only_storage_is_an_error_and_a_restore_still_works(tmp_path):
    state = {"a": torch.ones(1000)}
    with disk_of("8m", tmp_path / "disk") as folder:
        with AsyncCheckpointer(folder) as checkpointer:
            checkpointer.save(1, state)
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        with AsyncCheckpointer(folder) as checkpointer:
            with pytest.raises(OSError) as caught:
                checkpointer.save(2, state).result()
            assert caught.value.errno == errno.EROFS
            assert checkpointer.restore({"a": torch.zeros(1000)}) == 1
        with pytest.raises(IoError) as caught:
            gdsdata.save(state, folder / "x.pt")
        assert caught.value.errno == errno.EROFS


def test_a_write_that_fails_while_the_state_is_still_staged_ends_the_save(tmp_path):
    options = EngineOptions(faults="seed=0,fail=1")
    with AsyncCheckpointer(tmp_path, staging_bytes="64KiB", options=options) as checkpointer:
        for step in range(3):
            with pytest.raises(IoError, match="fault made on purpose"):
                checkpointer.save(step, {"a": torch.ones(500_000)}).result(30)
    assert AsyncCheckpointer(tmp_path).steps() == []


def test_waiting_is_for_every_save_also_behind_one_that_failed(tmp_path, monkeypatch):
    with disk_of("12m", tmp_path / "disk") as folder, AsyncCheckpointer(folder, keep_last=5) as checkpointer:
        states = {step: {"a": torch.ones(5 << 20 if step == 0 else 1000)} for step in range(4)}
        handles = saved_together(checkpointer, states, monkeypatch)
        with pytest.raises(IoError, match="reserve space"):
            checkpointer.wait()
        assert all(handle.done() for handle in handles)
        assert checkpointer.steps() == [1, 2, 3]


def test_a_checkpoint_is_there_also_where_older_ones_cannot_be_removed(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "no")

    with AsyncCheckpointer(tmp_path, keep_last=1) as checkpointer:
        monkeypatch.setattr(LockedFolder, "retain", fail)
        with pytest.warns(RuntimeWarning, match="older checkpoints in .* could not be removed"):
            checkpointer.save(1, {"a": 1}).result()
        assert checkpointer.steps() == [1]


def test_a_state_that_cannot_be_pickled_is_an_error_at_once(tmp_path):
    with AsyncCheckpointer(tmp_path) as checkpointer:
        with pytest.raises((AttributeError, TypeError)):
            checkpointer.save(1, {"a": threading.Lock()})
        checkpointer.save(2, {"a": 1}).result()
        assert checkpointer.steps() == [2]


def test_a_state_that_cannot_be_staged_is_an_error_of_that_call_alone(tmp_path, monkeypatch):
    state = {"a": torch.ones(5000)}
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state).result()
        with monkeypatch.context() as patched:
            patched.setattr(type(checkpointer._staging), "take", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                checkpointer.save(2, state)
        checkpointer.wait()
        checkpointer.save(3, state).result()
        assert checkpointer.steps() == [1, 3]
    assert {name.split("/")[0] for name in files(tmp_path)} == {"lock", "step-1", "step-3"}


def interrupted_behind(call):
    def interrupted(*arguments):
        call(*arguments)
        raise KeyboardInterrupt

    return interrupted


def test_ctrl_c_before_a_state_is_staged_ends_that_save_and_nobody_waits_for_it(tmp_path, monkeypatch):
    checkpointer = AsyncCheckpointer(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Saver, "submit", interrupted_behind(Saver.submit))
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(1, {"a": torch.ones(5000)})
    checkpointer.save(2, {"a": torch.ones(5000)}).result(10)
    checkpointer.close()
    assert checkpointer.steps() == [2]


def test_ctrl_c_before_a_file_is_staged_ends_that_save_and_nobody_waits_for_it(tmp_path, monkeypatch):
    saves = FileSaves(str(tmp_path), MIB, EngineOptions())
    with monkeypatch.context() as patched:
        patched.setattr(SaveCounts, "begin", interrupted_behind(SaveCounts.begin))
        with pytest.raises(KeyboardInterrupt):
            saves.save_state({"a": torch.ones(5000)}, str(tmp_path / "1.pt"))
    saves.save_state({"a": torch.ones(5000)}, str(tmp_path / "2.pt"))
    saves.close()
    assert files(tmp_path) == ["2.pt"]


def test_a_save_starts_no_thread_that_ctrl_c_could_lose(tmp_path, monkeypatch):
    checkpointer, saves = AsyncCheckpointer(tmp_path), FileSaves(str(tmp_path), MIB, EngineOptions())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted_behind(threading.Thread.start))
        checkpointer.save(1, {"a": 1})
        saves.save_state({"a": 1}, str(tmp_path / "1.pt"))
    checkpointer.close()
    saves.close()


def test_ctrl_c_as_threads_start_leaves_none(monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading.Thread, "start", interrupted_behind(threading.Thread.start))
        DaemonThreads(2, "interrupted")
    assert eventually(lambda: all(one.name != "interrupted" for one in threading.enumerate()))


@pytest.mark.parametrize("device_staging_bytes", [0, "1GiB"])
def test_a_device_lost_while_a_state_is_staged_is_an_error_and_no_hang(tmp_path, monkeypatch, device_staging_bytes):
    class Lost:
        def synchronize(self):
            raise RuntimeError("CUDA error: unspecified launch failure")

    copy_from = Staged.copy_from

    def lose(staged, storages):
        copy_from(staged, storages)
        staged.copied = {torch.device("cuda:0"): Lost()}

    checkpointer = AsyncCheckpointer(tmp_path, staging_bytes="64KiB", device_staging_bytes=device_staging_bytes)
    with monkeypatch.context() as patched:
        patched.setattr(Staged, "copy_from", lose)
        with pytest.raises(RuntimeError, match="unspecified launch failure"):
            checkpointer.save(1, {"a": torch.ones(100_000)}).result(30)
        assert eventually(lambda: len(checkpointer._under_way) == 0)
    with contextlib.suppress(RuntimeError):
        checkpointer.wait()
    assert checkpointer.steps() == []
    checkpointer.close()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with AsyncCheckpointer(tmp_path / "file" / "runs") as checkpointer, pytest.raises(OSError):
        checkpointer.save(1, {"a": 1}).result()


@pytest.mark.parametrize("device_staging_bytes", [0, 1 << 30])
@pytest.mark.whole_end
def test_a_program_that_ends_without_closing_has_saved(tmp_path, device_staging_bytes):
    script = """
import gdsdata, sys, torch
gdsdata.AsyncCheckpointer(sys.argv[1], device_staging_bytes=int(sys.argv[2])).save(3, {"a": torch.ones(1 << 20)})
"""
    code, _, stderr = run_script(script, tmp_path, device_staging_bytes)
    assert code == 0 and stderr == ""
    assert AsyncCheckpointer(tmp_path).steps() == [3]


def test_an_error_in_the_block_is_raised_instead_of_that_of_the_save(tmp_path):
    with pytest.raises(KeyError, match="mine"), AsyncCheckpointer(tmp_path / "run") as checkpointer:
        (tmp_path / "run").write_text("")  # saving will fail
        checkpointer.save(1, {"a": 1})
        raise KeyError("mine")


# ------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("staging_bytes", ["2MiB", "1GiB"])
def test_tensors_of_a_gpu_are_saved_as_they_were_when_save_was_called(tmp_path, staging_bytes):
    state = {"a": torch.zeros(3 << 20, device="cuda"), "b": [torch.zeros(5, device="cuda"), torch.zeros(3 << 20)]}
    tensors = [state["a"], *state["b"]]  # the last piece has CPU tensors only
    with AsyncCheckpointer(tmp_path, staging_bytes=staging_bytes) as checkpointer:
        for step in range(1, 4):
            torch.cuda._sleep(20_000_000)
            for tensor in tensors:
                tensor.fill_(step)
            checkpointer.save(step, {"state": state})
            with torch.cuda.stream(torch.cuda.Stream()):  # any stream, and at once
                for tensor in tensors:
                    tensor.fill_(-1)
            torch.cuda.synchronize()
        for step in range(1, 4):
            assert checkpointer.restore({"state": state}, step) == step
            assert all(tensor.eq(step).all() for tensor in tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("is_side_stream", [False, True])
def test_a_save_waits_for_no_gpu_where_that_has_room_for_a_copy(tmp_path, is_side_stream):
    state = {"a": torch.zeros(3 << 20, device="cuda"), "b": [torch.zeros(5, device="cuda"), torch.zeros(5)]}
    tensors = [state["a"], *state["b"]]
    stream = torch.cuda.Stream() if is_side_stream else torch.cuda.current_stream()
    with AsyncCheckpointer(tmp_path, device_staging_bytes="1GiB") as checkpointer, torch.cuda.stream(stream):
        checkpointer.save(0, {"state": state}).result()  # the first save allocates memory
        for step in range(1, 4):
            torch.cuda._sleep(2_000_000_000)  # one second
            for tensor in tensors:
                tensor.fill_(step)
            handle = checkpointer.save(step, {"state": state})
            assert handle.stall_s < 0.3 and not stream.query()
            for tensor in tensors:
                tensor.fill_(-1)
        for step in range(1, 4):
            assert checkpointer.restore({"state": state}, step) == step
            assert all(tensor.eq(step).all() for tensor in tensors)


@pytest.mark.gpu
def test_an_optimizer_on_a_gpu_gets_its_state_where_it_was(tmp_path):
    model = torch.nn.Linear(300, 300, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 300, device="cuda")).sum().backward()
    optimizer.step()
    again = torch.nn.Linear(300, 300, device="cuda")
    its_optimizer = torch.optim.AdamW(again.parameters())
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model, "optim": optimizer})
        checkpointer.restore({"model": again, "optim": its_optimizer})
    moments, expected = its_optimizer.state[again.weight], optimizer.state[model.weight]
    assert {name: tensor.device for name, tensor in moments.items()} == {n: t.device for n, t in expected.items()}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in moments.items())


def _no_thread(_):
    raise RuntimeError("can't start new thread")


def test_a_checkpointer_whose_threads_cannot_start_names_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", _no_thread)
    with pytest.raises(IoError, match="could not start a thread; raise the limit of processes .ulimit -u"):
        AsyncCheckpointer(tmp_path)


def test_a_save_needs_no_new_thread_of_python(tmp_path, monkeypatch):
    """A save that is queued and finds no thread would run behind a later one."""
    with AsyncCheckpointer(tmp_path) as checkpointer:
        monkeypatch.setattr(threading.Thread, "start", _no_thread)
        assert checkpointer.save(1, {"a": torch.arange(100_000)}).result() == str(tmp_path / "step-1")
