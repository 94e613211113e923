"""Plans of `dcp.load` that ranks send each other with `GDSStorageReader`."""

import pickle
from dataclasses import dataclass, fields, replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from test_dcp import assert_same, on_ranks, save
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from gdsdata import GDSLoadPlanner, GDSStorageReader, GDSStorageWriter
from gdsdata.checkpoint.dcp.packed_plan import packed_plan

pytestmark = [
    pytest.mark.usefixtures("quick_programs"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

VALUES = 300  # of the state, the step among them
SIZE = torch.Size((3,))


def state(fill):
    named = {f"layers.{index}.weight": torch.full((3,), fill + index) for index in range(VALUES - 1)}
    return {"model": named, "step": fill}


def without_step(plan):
    return [item for item in plan.items if item.storage_index.fqn != "step"]


class GlobalPlanner(GDSLoadPlanner):
    """Leaves the steps as they are."""

    def create_global_plan(self, plans):
        self.seen = [len(plan.items) for plan in plans]
        return [replace(plan, items=without_step(plan)) for plan in super().create_global_plan(plans)]


class ChangingPlanner(GDSLoadPlanner):
    """Does the same, but in the plans' own lists."""

    def create_global_plan(self, plans):
        for plan in plans:
            plan.items[:] = without_step(plan)
        return plans


class FinishingPlanner(dcp.DefaultLoadPlanner):
    def finish_plan(self, plan):
        self.seen = [len(plan.items)]
        return super().finish_plan(plan)


class GlobalReader(GDSStorageReader):
    def prepare_global_plan(self, plans):
        self.seen = [len(plan.items) for plan in plans]
        return super().prepare_global_plan(plans)


class SkippingReader(GDSStorageReader):
    """Leaves the step as it is."""

    def prepare_local_plan(self, plan):
        plan = super().prepare_local_plan(plan)
        return replace(plan, items=without_step(plan))


PAIRS = [
    (GDSLoadPlanner, GDSStorageReader),
    (dcp.DefaultLoadPlanner, GDSStorageReader),
    (dcp.DefaultLoadPlanner, dcp.FileSystemReader),
    (GlobalPlanner, GDSStorageReader),
    (ChangingPlanner, GDSStorageReader),
    (FinishingPlanner, GDSStorageReader),
    (GDSLoadPlanner, GlobalReader),
    (GDSLoadPlanner, SkippingReader),
]


def _gathered(load):
    """Return the bytes of what this rank has sent to another during `load()`."""
    sent, gather = [], dist.gather_object

    def noted(obj, *others, **named):  # names as torch's callers have them
        sent.append(len(pickle.dumps(obj)))
        return gather(obj, *others, **named)

    dist.gather_object = noted
    try:
        load()
    finally:
        dist.gather_object = gather
    return sum(sent)


def _loads(rank, folder):
    found = {}
    for planner_class, reader_class in PAIRS:
        planner, reader, loaded = planner_class(), reader_class(folder), state(0)
        sent = _gathered(lambda p=planner, r=reader, s=loaded: dcp.load(s, storage_reader=r, planner=p))
        assert_same(loaded["model"], state(7)["model"])
        seen = getattr(planner, "seen", None) or getattr(reader, "seen", None)
        found[planner_class, reader_class] = sent, seen, loaded["step"]
    return found


@pytest.fixture(scope="module")
def loads(tmp_path_factory):
    """Give for each of two ranks, and each pair: bytes sent, items seen, the step loaded."""
    folder = tmp_path_factory.mktemp("exchange")
    save(state(7), GDSStorageWriter(folder))
    return on_ranks(2, _loads, folder)


def test_plans_are_small_on_the_way(loads):
    for found in loads:
        stock = found[dcp.DefaultLoadPlanner, dcp.FileSystemReader]
        for planner in (GDSLoadPlanner, dcp.DefaultLoadPlanner):
            packed = found[planner, GDSStorageReader]
            assert packed[0] < stock[0] / 8
            assert packed[2] == stock[2] == 7


@pytest.mark.parametrize(
    ("planner", "reader", "ranks"),
    [(GlobalPlanner, GDSStorageReader, 1), (FinishingPlanner, GDSStorageReader, 2), (GDSLoadPlanner, GlobalReader, 1)],
)
def test_subclasses_that_look_at_plans_see_all_items(planner, reader, ranks, loads):
    seen = [items for found in loads[:ranks] for items in found[planner, reader][1]]
    assert seen == [VALUES] * 2


@pytest.mark.parametrize(
    ("planner", "reader"),
    [(GlobalPlanner, GDSStorageReader), (ChangingPlanner, GDSStorageReader), (GDSLoadPlanner, SkippingReader)],
)
def test_a_plan_that_a_subclass_has_changed_is_read(planner, reader, loads):
    assert [found[planner, reader][2] for found in loads] == [0, 0]


INDEXES = st.builds(
    MetadataIndex,
    st.text(),
    st.none() | st.lists(st.integers(0, 2**62), max_size=4),
    st.none() | st.integers(0, 2**31),
)
SIZES = st.lists(st.integers(0, 2**62), max_size=4).map(torch.Size)
ITEMS = st.lists(st.builds(ReadItem, st.sampled_from(LoadItemType), INDEXES, SIZES, INDEXES, SIZES, SIZES))


@given(items=ITEMS, hops=st.integers(1, 3))
def test_any_items_come_back_as_they_were(items, hops):
    sent = plan = packed_plan(LoadPlan(items))
    for _ in range(hops):
        plan = pickle.loads(pickle.dumps(plan))
    assert plan.is_unchanged(sent)
    assert plan.items == items
    assert [type(size) for item in plan.items for size in (item.dest_offsets, item.lengths)].count(torch.Size) == (
        2 * len(items)
    )
    assert not plan.is_unchanged(sent)


@given(items=ITEMS)
def test_a_plan_that_was_changed_elsewhere_is_not_taken_for_the_own_one(items):
    sent = packed_plan(LoadPlan(items))
    other = pickle.loads(pickle.dumps(sent))
    other.items.append(ReadItem(LoadItemType.BYTE_IO, MetadataIndex("more"), SIZE, MetadataIndex("more"), SIZE, SIZE))
    back = pickle.loads(pickle.dumps(other))
    assert not back.is_unchanged(sent)
    assert back.items == [*items, other.items[-1]]


@dataclass(frozen=True)
class OwnItem(ReadItem):
    note: str = "mine"


@dataclass
class OwnPlan(LoadPlan):
    note: str = "mine"


def one_item(kind=ReadItem):
    return kind(LoadItemType.TENSOR, MetadataIndex("a"), SIZE, MetadataIndex("a"), SIZE, SIZE)


@pytest.mark.parametrize(
    "plan",
    [
        LoadPlan([one_item()], storage_data={"mine": 1}),
        LoadPlan([one_item()], planner_data={"mine": 1}),
        LoadPlan([one_item(), one_item(OwnItem)]),
        OwnPlan([one_item()]),
    ],
)
def test_nothing_of_a_plan_that_is_not_as_torch_makes_it_is_lost(plan):
    """Whether it comes from the rank itself, or was made on the way."""
    on_its_way = pickle.loads(pickle.dumps(packed_plan(LoadPlan([]))))
    changed = replace(on_its_way, **{field.name: getattr(plan, field.name) for field in fields(LoadPlan)})
    for sent in (packed_plan(plan), changed):
        came = pickle.loads(pickle.dumps(sent))
        for field in fields(plan if sent is not changed else LoadPlan):
            assert getattr(came, field.name) == getattr(plan, field.name)


def test_storage_data_that_are_set_on_the_way_are_kept():
    sent = packed_plan(LoadPlan([one_item()]))
    on_its_way = pickle.loads(pickle.dumps(sent))
    on_its_way.storage_data = {"mine": 1}
    assert not on_its_way.is_unchanged(sent)
    assert pickle.loads(pickle.dumps(on_its_way)) == LoadPlan([one_item()], storage_data={"mine": 1})


def test_a_plan_is_equal_to_the_one_that_was_packed():
    plan = LoadPlan([one_item()])
    packed = packed_plan(plan)
    for one in (packed, pickle.loads(pickle.dumps(packed))):
        assert one == plan and plan == one
        assert one != LoadPlan([]) and one != LoadPlan([one_item()], planner_data=1) and one != "plan"


def test_a_packed_plan_has_no_other_attributes():
    plan = pickle.loads(pickle.dumps(packed_plan(LoadPlan([]))))
    assert plan.storage_data is None and plan.planner_data is None
    with pytest.raises(AttributeError, match="no attribute 'others'"):
        plan.others  # noqa: B018
