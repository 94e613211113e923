"""`torch_private`: the arguments of torch.save, and the warning of an unchecked torch."""

import inspect
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


@pytest.mark.new_interpreter
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


def names_in(function) -> set[str]:
    return set(inspect.unwrap(function).__code__.co_names)


def test_torch_save_and_load_look_up_the_functions_that_hooks_replace():
    names = {*torch_private.SAVE_SEAMS, *torch_private.LOAD_SEAMS}
    assert torch_private.serialization_seams().keys() == names
    assert names_in(torch.save) >= {*torch_private.SAVE_SEAMS} and names_in(torch.load) >= {*torch_private.LOAD_SEAMS}
    assert torch.save.__globals__ is torch.load.__globals__ is vars(torch.serialization)
    load = inspect.signature(torch_private.serialization_seams()[torch_private.LOAD_ZIP])
    given = ["zip_file", "map_location", "pickle_module", "pickle_file", "overall_storage"]
    newer = {"weights_only"} & {*load.parameters}  # torch 2.11 has it not
    assert list(load.parameters) == [*given, *newer, "pickle_load_args"]
    assert load.parameters["pickle_file"].default == torch_private.PICKLE_RECORD
    save = inspect.signature(torch_private.serialization_seams()[torch_private.SAVE_ZIP])
    assert list(save.parameters) == ["obj", "zip_file", "pickle_module", "pickle_protocol", "_disable_byteorder_record"]
