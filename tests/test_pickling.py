"""Pickles of states: those of the engine are torch's own, byte for byte, and so are Python's."""

import argparse
import collections
import dataclasses
import gc
import io
import sys
import threading
import zipfile

import numpy as np
import pytest
import torch
from helpers import engine_can_pickle
from hypothesis import given, settings
from hypothesis import strategies as st
from test_checkpoint import tensors

from gdsdata.checkpoint.torch_zip import pickling
from gdsdata.checkpoint.torch_zip.pickling import pickle_by_python, pickle_with_storages

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*quantize|.*nested tensors|TypedStorage is depr|Sparse CSR|ComplexHalf"
)


def torchs_pickle(state) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return zipfile.ZipFile(file).read("archive/data.pkl")


def with_attribute(tensor):
    tensor.note = "of mine"
    return tensor


# How a tensor is derived from another one; most share its memory.
KINDS = [
    lambda one: one,
    lambda one: one.detach(),
    lambda one: one[:1],
    lambda one: one.reshape(-1)[:1].squeeze(),  # of no dimensions, unless it is empty
    lambda one: one.detach().requires_grad_(one.is_floating_point()),
    lambda one: one.detach().requires_grad_(one.is_floating_point())[::2],  # with a grad_fn
    lambda one: torch.nn.Parameter(one, one.is_floating_point()),
    lambda one: torch.nn.Buffer(one),
    lambda one: with_attribute(one.detach()),
    lambda one: with_attribute(torch.nn.Parameter(one, False)),
    lambda one: one.conj(),
    lambda one: torch.randn(3, dtype=torch.complex64).conj(),
    lambda one: torch.randn(3, dtype=torch.complex64).conj().imag,  # with the bit for negated values
    lambda one: torch.empty_like(one, device="meta"),
    lambda one: torch.eye(3).to_sparse(),
    lambda one: torch.eye(3).to_sparse_csr(),
    lambda one: torch.quantize_per_tensor(torch.randn(20), 0.1, 3, torch.quint8),
    lambda one: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    lambda one: torch.zeros(3, dtype=torch.complex32),
    lambda one: [floats := torch.ones(3), floats.storage(), floats],
    lambda one: [octets := torch.ones(3, dtype=torch.uint8), octets.untyped_storage(), octets],
    lambda one: [collections.OrderedDict(), collections.OrderedDict(a=one)],
    lambda one: with_attribute(collections.OrderedDict()),
]
kinds = st.builds(lambda one, kinds: [kind(one) for kind in kinds], tensors, st.lists(st.sampled_from(KINDS)))


@given(st.recursive(kinds, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)))
@settings(max_examples=200, deadline=None)
def test_the_pickle_is_torchs_own_byte_for_byte(state):
    assert pickle_with_storages(state).pickle == pickle_by_python(state).pickle == torchs_pickle(state)


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_the_pickle_of_each_kind_is_torchs_own(number):
    state = KINDS[number](torch.arange(6.0).reshape(2, 3))
    assert pickle_with_storages(state).pickle == pickle_by_python(state).pickle == torchs_pickle(state)


def test_torch_warns_of_a_hook_that_is_not_saved():
    hooked = torch.ones(3, requires_grad=True)
    hooked.register_hook(lambda gradient: gradient)
    with pytest.warns(UserWarning, match="backward hook .* will not be serialized"):
        pickled = pickle_with_storages(hooked).pickle
    assert pickled == torchs_pickle(torch.ones(3, requires_grad=True))


# ------------------------------------------------------------------------------------------------ by the engine alone


@dataclasses.dataclass
class Settings:
    rate: float
    names: list


def cycle() -> list:
    items: list = []
    items.append({"again": items})
    return items


def shared() -> list:
    tensor, items = torch.ones(3), [1, 2]
    return [tensor, items, {"tensor": tensor, "items": items}, (tensor, items), "cpu", "storage", "0"]


SEVERAL = [*range(5), 255, 256, 65535, 65536, 2**31 - 1, 2**31, -1, -(2**31), -(2**31) - 1, 2**63, 10**40]
STATES = [
    SEVERAL,
    [0.0, -0.0, 1.5, float("inf"), float("nan"), True, False, None, "", "a", "\u00e4\U0001f600", b"", b"ab\xff"],
    [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], {}, set(), {1}, frozenset({2})],
    *(list(range(count)) for count in (999, 1000, 1001, 2000, 2001)),
    *({i: i for i in range(count)} for count in (1, 2, 999, 1000, 1001, 2001)),
    *(collections.OrderedDict((i, str(i)) for i in range(count)) for count in (0, 1, 2, 1000, 1001)),
    collections.defaultdict(list, a=[1]),
    collections.Counter("abca"),
    argparse.Namespace(rate=1e-3, size=torch.Size([3, 4]), dtype=torch.bfloat16, device=torch.device("cpu")),
    Settings(1.0, ["a"]),
    [int, len, Settings, collections.OrderedDict, torch.nn.Linear],
    [np.float64(3), np.arange(3), np.dtype("int8"), np.random.RandomState(3).get_state()],
    torch.nn.Linear(3, 4).state_dict(),
    [torch.get_rng_state(), torch.initial_seed()],
    *(torch.zeros(2, dtype=dtype) for dtype in (torch.bool, torch.int8, torch.uint16, torch.float16, torch.complex128)),
    torch.zeros(2, dtype=torch.float8_e4m3fn),
    [
        torch.empty(9).as_strided((1, 3), (7, 1)),
        torch.empty(9)[9:],
        torch.empty(0, 3),
        torch.tensor(3),
        torch.empty(9)[3:],
    ],
    [torch.ones(9).expand(2, 9), torch.ones(2, 3).t(), torch.ones(2, 1, 3).transpose(0, 2)],
    shared(),
    cycle(),
]


@pytest.fixture
def without_python(monkeypatch):
    """Has Python's pickler pickle nothing, if this torch shows its tensors to the engine's."""
    if engine_can_pickle():
        monkeypatch.setattr(pickling, "pickle_by_python", lambda value: pytest.fail("Python's pickler was asked"))


@pytest.mark.parametrize("state", STATES, ids=lambda state: type(state).__name__)
def test_the_engine_pickles_usual_states_as_torch_does(without_python, state):
    assert pickle_with_storages(state).pickle == torchs_pickle(state)


def test_the_engine_pickles_the_state_of_an_optimizer(without_python):
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    found = pickle_with_storages(state)
    assert found.pickle == torchs_pickle(state) and found.has_only_plain_tensors == engine_can_pickle()
    for mine, pythons in zip(found[2:-1], pickle_by_python(state)[2:-1], strict=True):
        assert mine.dtype == pythons.dtype and mine.tolist() == pythons.tolist()
    assert found.sizes_bytes.tolist() == [48, 16, *[4, 48, 48], *[4, 16, 16]] and set(found.devices) == {-1}


@pytest.mark.parametrize("value", [bytearray(b"ab"), type(None), Ellipsis, "\ud800", [[]] * 3])
def test_a_value_that_the_engine_leaves_to_python_is_pickled_as_by_torch(value):
    assert pickle_with_storages([value, torch.ones(2)]).pickle == torchs_pickle([value, torch.ones(2)])


@pytest.mark.parametrize(("value", "error"), [(lambda: 1, "lambda"), (threading.Lock(), "pickle")])
def test_errors_are_those_of_pythons_pickler(value, error):
    with pytest.raises(Exception, match=error) as caught:
        pickle_with_storages({"a": [1, value]})
    assert "a.1, of type" in str(caught.value)


@pytest.mark.parametrize("name", ["uint1", "uint4", "int4", "int7"])
def test_a_dtype_that_pickles_have_no_name_for_is_refused_and_not_changed(name):
    """DLPack gives such a tensor as one of uint8 or int8."""
    packed = torch.arange(4, dtype=torch.uint8).view(getattr(torch, name))
    said = rf"^a\.b, of type Tensor, cannot be saved: .* torch\.{name}: .*view\(torch\.uint8\)"
    with pytest.raises(TypeError, match=said):
        pickle_with_storages({"a": {"b": packed}})


def test_storages_in_two_dtypes_are_refused():
    numbers = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="view the same data as different types"):
        pickle_with_storages([numbers, numbers.view(torch.float32)])


def test_a_storage_without_an_address_has_one_key():
    storage = torch.empty(4, device="meta").untyped_storage()
    found, by_python = pickle_with_storages([storage, storage]), pickle_by_python([storage, storage])
    assert found.pickle == by_python.pickle
    assert len(found.storages) == len(by_python.storages) == 1


def test_a_nest_too_deep_for_the_stack_is_an_error_and_no_crash():
    state: list = []
    for _ in range(100_000):
        state = [state]
    with pytest.raises(RecursionError):
        pickle_with_storages(state)
    while state:
        state = state.pop()


def test_pickling_keeps_no_reference_to_the_state():
    class Mine:
        pass

    objects = [torch.ones(3), "a text of mine", [1], {"a": 1}, (1, [2]), collections.OrderedDict(b=2), np.arange(3)]
    before = [sys.getrefcount(one) for one in objects]
    for _ in range(3):
        pickle_with_storages([objects, objects])
        with pytest.raises(AttributeError):
            pickle_with_storages([objects, Mine()])
    gc.collect()  # the errors and their frames refer to one another
    assert [sys.getrefcount(one) for one in objects] == before
