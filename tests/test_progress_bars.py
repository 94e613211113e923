"""Progress bars: when they are drawn, what they count, and that they are removed."""

import gzip
import io
import os
import re
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import eventually, exit_code_of_fork

import gdsdata
from gdsdata import drawn_bars, progress_bars
from gdsdata.checkpoint.urls import last_part
from gdsdata.formats.shards import Shard
from gdsdata.formats.unpacking import unpacked
from gdsdata.progress_bars import bar, current


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self):
        return True

    def shown(self):
        """Return what was written, without its escape sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())


def set_stderr(monkeypatch, stderr):
    """Give bars this stderr. pytest sets `sys.stderr` itself, after fixtures."""
    for module in (progress_bars, drawn_bars):
        monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=stderr, modules=sys.modules))


@pytest.fixture
def terminal(monkeypatch):
    """Return a terminal that bars are drawn in at once."""
    found = Terminal()
    set_stderr(monkeypatch, found)
    monkeypatch.setattr(drawn_bars, "_APPEARS_S", 0.0)
    monkeypatch.setattr(drawn_bars, "_REDRAWN_S", 0.001)
    for name in ("GDSDATA_PROGRESS", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.fixture(params=["rich", "tqdm"])
def library(request, monkeypatch):
    pytest.importorskip(request.param)
    if request.param == "tqdm":
        monkeypatch.setitem(sys.modules, "rich.console", None)
    return request.param


def threads_that_draw():
    return [one for one in threading.enumerate() if one.name == "gdsdata-progress"]


# ------------------------------------------------------------------------------------------------- when


def test_no_bar_is_drawn_where_stderr_is_no_terminal(capsys):
    with bar("working", 10) as shown:
        assert shown is current() is progress_bars._NO_BAR
        assert not threads_that_draw()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "value", "is_shown"),
    [
        ("GDSDATA_PROGRESS", "0", False),
        ("GDSDATA_PROGRESS", "1", True),
        ("RANK", "1", False),
        ("RANK", "0", True),
        ("SLURM_PROCID", "3", False),
    ],
)
def test_the_environment_says_whether_bars_are_drawn(terminal, monkeypatch, name, value, is_shown):
    monkeypatch.setenv(name, value)
    with bar("working", 10) as shown:
        assert (shown is not progress_bars._NO_BAR) is is_shown


def test_show_progress_switches_bars_off_and_on(terminal):
    gdsdata.show_progress(False)
    try:
        with bar("working", 10) as shown:
            assert shown is progress_bars._NO_BAR
    finally:
        gdsdata.show_progress(True)
    with bar("working", 10) as shown:
        assert shown is current()


@pytest.mark.parametrize("stderr", [None, "closed"])
def test_a_program_without_stderr_has_no_bars(monkeypatch, stderr):
    if stderr == "closed":
        stderr = Terminal()
        stderr.isatty = lambda: io.StringIO.isatty(stderr)  # it raises
        stderr.close()
    set_stderr(monkeypatch, stderr)
    with bar("working", 10) as shown:
        assert shown is progress_bars._NO_BAR


def test_a_short_call_draws_nothing_and_imports_no_library(terminal, monkeypatch):
    monkeypatch.setattr(drawn_bars, "_APPEARS_S", 60.0)
    monkeypatch.setattr(drawn_bars, "_drawn", lambda: pytest.fail("it draws"))
    with bar("working", 10) as shown:
        shown.add(10)
    assert eventually(lambda: not threads_that_draw())
    assert terminal.getvalue() == ""


# ------------------------------------------------------------------------------------------------- drawing


def test_a_bar_is_drawn_and_removed(terminal, library):
    with bar("working", 2_000_000) as shown:
        shown.add(500_000)
        shown.add(1_000_000)
        assert eventually(lambda: "1.5 MB of 2.0 MB" in terminal.shown())
        assert "working" in terminal.shown()
    lines = terminal.getvalue()
    assert lines.count("\x1b[?25l") == lines.count("\x1b[?25h")  # the cursor is there again
    assert eventually(lambda: not threads_that_draw())
    assert terminal.getvalue() == lines or library == "rich"


def test_two_threads_have_a_bar_each_in_one_drawing(terminal, library):
    both = threading.Barrier(2, timeout=60)

    def work(name):
        with bar(name, 10, "files") as shown:
            both.wait()
            shown.add(3)
            assert eventually(lambda: f"{name}" in terminal.shown(), 30)
            both.wait()

    other = threading.Thread(target=work, args=("second",))
    other.start()
    work("first")
    other.join()
    assert eventually(lambda: not threads_that_draw())
    assert "3 files of 10 files" in terminal.shown()


def test_an_error_removes_the_bar_before_it_is_seen(terminal, library):
    with pytest.raises(KeyboardInterrupt), bar("working", 10):
        assert eventually(lambda: "working" in terminal.shown())
        raise KeyboardInterrupt
    assert not drawn_bars.drawer._bars and not drawn_bars.drawer._seen
    assert current() is progress_bars._NO_BAR


def test_without_a_library_nothing_is_drawn(terminal, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with bar("working", 10) as shown:
        shown.add(1)
    assert eventually(lambda: not threads_that_draw())
    assert terminal.getvalue() == ""


def test_a_terminal_that_fails_does_not_end_the_work(terminal, monkeypatch):
    asked = threading.Event()

    class Broken:
        def draw(self, bars):
            asked.set()
            raise OSError("the terminal is gone")

        close = draw

    monkeypatch.setattr(drawn_bars, "_drawn", lambda: Broken())
    with bar("working", 10) as shown:
        assert asked.wait(30)
        shown.add(1)
    assert eventually(lambda: not threads_that_draw())


def test_many_threads_count_each_byte_once(terminal):
    with bar("working") as shown:
        threads = [threading.Thread(target=lambda: [shown.add(1) for _ in range(2000)]) for _ in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert shown.done == 8000


def test_a_fork_inside_a_bar_has_none_and_hangs_on_no_lock(terminal):
    def child():
        assert current() is progress_bars._NO_BAR
        with bar("in the child", 10) as own:
            own.add(1)

    with bar("working", 10) as shown, shown._lock, drawn_bars.drawer._changed:
        assert exit_code_of_fork(child) == 0


def test_a_bar_counts_only_its_unit(terminal):
    with bar("indexing", unit="files") as shown:
        assert current() is progress_bars._NO_BAR
        assert current("files") is shown


# ------------------------------------------------------------------------------------------------- what is counted


@pytest.fixture
def bars(terminal, monkeypatch):
    """Return the bars that began, which nobody draws."""
    begun = []
    monkeypatch.setattr(drawn_bars.Drawer, "begin", lambda self, one: begun.append(one))
    monkeypatch.setattr(drawn_bars.Drawer, "end", lambda self, one: None)
    return begun


def test_a_save_and_a_load_count_the_bytes_of_tensors(bars, tmp_path):
    state = {"a": torch.arange(100_000), "b": torch.ones(30_000)}
    for name in ("model.pt", "model.safetensors"):
        gdsdata.save(state, tmp_path / name)
        gdsdata.load(tmp_path / name)
        saved, loaded = bars[-2:]
        assert (saved.what, loaded.what) == (f"saving {name}", f"loading {name}")
        size_bytes = os.path.getsize(tmp_path / name)
        assert saved.total == size_bytes and 920_000 <= saved.done <= size_bytes
        assert loaded.done == loaded.total == 920_000
    assert len(bars) == 4


def test_indexing_counts_files(bars, tmp_path):
    for i in range(70):
        np.save(tmp_path / f"{i}.npy", np.zeros(4))
    gdsdata.GDSDataset(tmp_path, batch_size=2, device="cpu")
    (shown,) = (one for one in bars if one.what == "indexing")
    assert (shown.done, shown.total, shown.unit) == (70, 70, "files")


def test_unpacking_counts_unpacked_bytes(bars, tmp_path):
    content = bytes(300_000)
    for name in "ab":
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
    shards = [
        Shard(f"{tmp_path}/{name}", len(content), 1, f"{tmp_path}/index.json", f"{tmp_path}/{name}.gz", "gz")
        for name in "ab"
    ]
    with pytest.warns(RuntimeWarning, match="2 compressed shards were unpacked"):
        unpacked(shards, str(tmp_path / "kept"), "mds")
    assert [(one.what, one.done, one.total) for one in bars] == [("unpacking", 600_000, 600_000)]


def test_a_restore_has_a_bar_and_saves_in_the_background_have_none(bars, tmp_path):
    with gdsdata.AsyncCheckpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"a": torch.ones(1000)})
        checkpointer.wait()
        assert bars == []
        checkpointer.restore({"a": torch.zeros(1000)})
    assert [(one.what, one.done, one.total) for one in bars] == [("restoring a checkpoint", 4000, 4000)]


def test_saves_and_loads_of_dcp_count_the_bytes_of_tensors(bars, tmp_path):
    state = {"a": torch.arange(100_000), "b": torch.ones(30_000), "step": 3}
    dcp.save(state, storage_writer=gdsdata.GDSStorageWriter(tmp_path / "step-3/"), no_dist=True)
    dcp.load(dict(state), storage_reader=gdsdata.GDSStorageReader(tmp_path / "step-3"), no_dist=True)
    saved, loaded = bars
    assert (saved.what, loaded.what) == ("saving step-3", "loading step-3")
    assert saved.total == os.path.getsize(tmp_path / "step-3/__0_0.distcp") and 920_000 <= saved.done <= saved.total
    assert loaded.done == loaded.total and 920_000 <= loaded.done < 925_000  # and the step


def test_saves_of_dcp_in_the_background_and_other_ranks_have_no_bar(bars, tmp_path, monkeypatch):
    state = {"a": torch.arange(1000)}
    dcp.async_save(state, storage_writer=gdsdata.GDSStorageWriter(tmp_path / "a"), no_dist=True).result()
    monkeypatch.setenv("RANK", "1")
    dcp.save(state, storage_writer=gdsdata.GDSStorageWriter(tmp_path / "b"), no_dist=True)
    dcp.load(state, storage_reader=gdsdata.GDSStorageReader(tmp_path / "b"), no_dist=True)
    assert bars == []


@pytest.mark.parametrize(
    ("path", "name"),
    [("run/step-3/", "step-3"), ("a.pt", "a.pt"), ("s3://bucket/run/a.pt?X-Signature=secret", "a.pt")],
)
def test_a_bar_names_the_last_part_of_a_path(path, name):
    assert last_part(path) == name
