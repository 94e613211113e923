"""`EngineOptions`: its repr, and the values that it refuses."""

import dataclasses
import errno
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import in_new_process

from gdsdata.errors import IoError
from gdsdata.io.engine import shared_engine
from gdsdata.io.options import EngineOptions


def test_only_options_that_differ_from_their_defaults_are_shown():
    assert repr(EngineOptions()) == "EngineOptions()"
    assert repr(EngineOptions(direct="never", workers=2)) == "EngineOptions(workers=2, direct='never')"


def test_the_repr_of_options_makes_equal_options():
    options = EngineOptions(backend="posix", strict=True, segment_bytes=5, faults="seed=1")
    assert eval(repr(options)) == options and dataclasses.replace(options) == options


def test_expert_options_are_given_by_keyword():
    with pytest.raises(TypeError, match="positional"):
        EngineOptions("auto", 1, 2, "auto", False, True, 60.0, 4096)


@pytest.mark.parametrize("name", ["workers", "queue_depth", "segment_bytes", "stall_timeout_s"])
def test_a_negative_option_is_refused_by_its_name(name):
    with pytest.raises(ValueError, match=f"EngineOptions\\({name}=-1\\) must not be negative"):
        EngineOptions(**{name: -1})


@pytest.mark.parametrize(
    ("name", "value"), [("bounce_bytes", 2**64 - 1), ("coalesce_gap_bytes", 2**64), ("stall_timeout_s", 10**40)]
)
def test_an_option_beyond_all_counting_is_refused_by_its_name(name, value):
    with pytest.raises(ValueError, match=f"EngineOptions\\({name}=[0-9]+\\) is more than 2\\*\\*62: give less"):
        EngineOptions(**{name: value})


def test_a_time_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="stall_timeout_s=nan.*give 0 or more"):
        EngineOptions(stall_timeout_s=float("nan"))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"workers": "4"}, r"EngineOptions\(workers='4'\) is of type str: give a whole number"),
        ({"queue_depth": 2.5}, r"queue_depth=2.5\) is of type float: give a whole number"),
        ({"stall_timeout_s": "60"}, r"stall_timeout_s='60'\) is of type str: give a number"),
        ({"backend": None}, r"backend=None\) is of type NoneType: give a str"),
        ({"workers": True}, r"workers=True\) is of type bool: give a whole number"),
        ({"stall_timeout_s": True}, r"stall_timeout_s=True\) is of type bool: give a number"),
        ({"strict": "no"}, r"strict='no'\) is of type str: give True or False"),
    ],
)
def test_an_option_of_another_type_is_refused_in_words(option, words):
    with pytest.raises(TypeError, match=words):
        EngineOptions(**option)


def test_numbers_of_numpy_are_options():
    options = EngineOptions(workers=np.int32(2), stall_timeout_s=np.float32(3))
    assert options == EngineOptions(workers=2, stall_timeout_s=3)


def error_without_threads() -> Exception:
    """Make an engine where there is no memory for the stacks of its threads."""
    shared_engine(EngineOptions(workers=1), torch.device("cpu"))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, used + 2**24))
    try:
        shared_engine(EngineOptions(workers=64), torch.device("cpu"))
    except Exception as error:
        return error
    raise AssertionError("all threads started")


def test_threads_that_cannot_start_are_an_error_that_says_what_to_raise():
    error = in_new_process(error_without_threads)
    assert isinstance(error, IoError) and error.errno == errno.EAGAIN
    assert str(error).startswith("could not start a thread: Resource temporarily unavailable; raise the limit of proc")
