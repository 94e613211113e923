"""The cost of importing gdsdata, and the names that it finds."""

import pytest
from helpers import run_script

import gdsdata


def test_importing_gdsdata_imports_none_of_its_modules():
    script = "import sys, torch, gdsdata; print([name for name in sys.modules if name.startswith('gdsdata.')])"
    assert run_script(script) == (0, "[]\n", "")


def test_what_is_used_brings_no_more_than_it_needs():
    script = "import sys, gdsdata; gdsdata.{}; print(sorted({} & sys.modules.keys()))"
    assert run_script(script.format("GDSDataset", {"gdsdata.checkpoint", "gdsdata.data.mix"})) == (0, "[]\n", "")
    others = {"gdsdata.data.dataset", "torch.distributed.checkpoint"}
    assert run_script(script.format("save", others)) == (0, "[]\n", "")


def test_every_public_name_is_found_and_listed():
    for name in gdsdata.__all__:
        assert getattr(gdsdata, name) is not None
    assert set(gdsdata.__all__) <= set(dir(gdsdata))
    with pytest.raises(AttributeError, match="has no attribute 'GDSNothing'"):
        gdsdata.GDSNothing  # noqa: B018
