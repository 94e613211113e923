"""`Value` and `Frozen`: frozen dataclasses without generated code."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from gdsdata import EngineOptions
from gdsdata.formats.index import records_of
from gdsdata.formats.sample import Sample

VALUES = {
    "EngineOptions": (lambda: EngineOptions(workers=3, segment_bytes=4096), {"workers": 4}),
    "Sample": (lambda: Sample(np.dtype("<f4"), (2, 3)), {"shape": (3, 2)}),
}


def twin_of(value):
    """Return the same value of a class with generated methods."""
    kind = type(value)
    fields = dataclasses.fields(value)
    made = dataclasses.make_dataclass(kind.__qualname__, [(one.name, one.type) for one in fields], frozen=True)
    return made(*(getattr(value, one.name) for one in fields))


@pytest.fixture(params=VALUES)
def make_and_change(request):
    return VALUES[request.param]


def test_values_are_equal_and_hashed_by_their_attributes(make_and_change):
    make, change = make_and_change
    value, same = make(), make()
    assert value == same and hash(value) == hash(same)
    assert {value: 1}[same] == 1
    assert value != object() and value != twin_of(value)
    other = dataclasses.replace(value, **change)
    assert other != value and {name: getattr(other, name) for name in change} == change


def test_values_are_shown_as_dataclasses_show_them(make_and_change):
    value = make_and_change[0]()
    if type(value) is not EngineOptions:  # it shows only what differs from the defaults
        assert repr(value) == repr(twin_of(value))


def test_a_value_is_the_same_after_it_was_asked():
    asked, fresh = (Sample(np.dtype("<f4"), (2, 3)) for _ in range(2))
    assert asked.bytes == 24  # is kept in the object
    assert asked == fresh and hash(asked) == hash(fresh) and repr(asked) == repr(fresh)


def test_a_value_cannot_be_changed(make_and_change):
    value = make_and_change[0]()
    before = repr(value)
    for name in (*(one.name for one in dataclasses.fields(value)), "no_such_attribute"):
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot assign to field '{name}'"):
            setattr(value, name, 1)
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot delete field '{name}'"):
            delattr(value, name)
    assert repr(value) == before


def test_copies_of_a_value_are_that_value(make_and_change):
    value = make_and_change[0]()
    for copied in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert copied == value and type(copied) is type(value)
        with pytest.raises(dataclasses.FrozenInstanceError):
            copied.anything = 1


def test_an_index_cannot_be_changed_and_is_itself_alone(tmp_path):
    (tmp_path / "a").write_bytes(bytes(100))
    index, same = (records_of(str(tmp_path / "a"), 10) for _ in range(2))
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'paths'"):
        index.paths = []
    assert index == index and index != same and len({index, same}) == 2
    assert len(pickle.loads(pickle.dumps(index))) == len(dataclasses.replace(index)) == 10
