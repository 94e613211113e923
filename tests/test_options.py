"""`EngineOptions`: its repr, and the values that it refuses."""

import dataclasses

import pytest

from gdsdata.io.options import EngineOptions


def test_only_options_that_differ_from_their_defaults_are_shown():
    assert repr(EngineOptions()) == "EngineOptions()"
    assert repr(EngineOptions(direct="never", workers=2)) == "EngineOptions(workers=2, direct='never')"


def test_what_is_shown_makes_equal_options():
    options = EngineOptions(backend="posix", strict=True, segment_bytes=5, faults="seed=1")
    assert eval(repr(options)) == options and dataclasses.replace(options) == options


def test_expert_options_are_given_by_keyword():
    with pytest.raises(TypeError, match="positional"):
        EngineOptions("auto", 1, 2, "auto", False, True, 60.0, 4096)


@pytest.mark.parametrize("name", ["workers", "queue_depth", "segment_bytes", "stall_timeout_s"])
def test_a_negative_option_is_refused_by_its_name(name):
    with pytest.raises(ValueError, match=f"EngineOptions\\({name}=-1\\) must not be negative"):
        EngineOptions(**{name: -1})
