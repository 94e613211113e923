"""`torch_private`: the arguments of torch.save, and the warning of an unchecked torch."""

import re
import warnings

import pytest
import torch
from helpers import run_script

import gdsdata
from gdsdata import torch_private


@pytest.fixture
def is_torch(monkeypatch):
    """Return a function that changes torch's version."""

    def change(version):
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
        torch_private.warn_if_newer.cache_clear()
        torch_private.storage_types.cache_clear()

    yield change
    torch_private.warn_if_newer.cache_clear()
    torch_private.storage_types.cache_clear()


def next_version():
    major, minor = torch_private.CHECKED[1]
    return f"{major}.{minor + 1}"


@pytest.mark.parametrize("suffix", [".0", ".1+cu130", ".0.dev20260101+cpu", ".0a0+git1234567"])
def test_a_newer_torch_warns_once_at_the_first_use(tmp_path, is_torch, suffix):
    is_torch(next_version() + suffix)
    with pytest.warns(RuntimeWarning, match=f"and this is torch {re.escape(next_version() + suffix)}") as seen:
        gdsdata.save({"x": torch.ones(3)}, tmp_path / "a.pt")
        gdsdata.save({"x": torch.ones(3)}, tmp_path / "b.pt")
    assert len(seen) == 1


def test_a_checked_torch_does_not_warn(tmp_path, is_torch):
    for major, minor in torch_private.CHECKED:
        is_torch(f"{major}.{minor}.3+cu130")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            gdsdata.save({"x": torch.ones(3)}, tmp_path / "a.pt")


@pytest.mark.usefixtures("quick_programs")
def test_import_does_not_warn_of_a_newer_torch():
    script = f"""
import sys, torch
assert not [name for name in sys.modules if name.startswith("gdsdata.checkpoint")]
torch.__version__ = torch.torch_version.TorchVersion("{next_version()}.0")
import gdsdata.checkpoint.api, gdsdata.checkpoint.hooks, gdsdata.checkpoint.dcp.storage_reader
import gdsdata.checkpoint.dcp.storage_writer
import gdsdata.checkpoint.background.checkpointer
"""
    assert run_script(script) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "named", "expected"),
    [
        ((), {}, True),
        ((True, False), {}, True),
        ((False,), {}, False),
        ((True, True), {}, False),
        ((True, False, 1), {}, False),
        ((), {"_use_new_zipfile_serialization": False}, False),
        ((), {"_disable_byteorder_record": True}, False),
        ((), {"a_newer_argument": None}, False),
    ],
)
def test_arguments_of_torch_save_that_change_the_file_are_recognized(arguments, named, expected):
    assert torch_private.writes_usual_zip(*arguments, **named) is expected
