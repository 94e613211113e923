"""torch.distributed.checkpoint's plans, with less work for tensors that are no rank's part of anything."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from gdsdata.checkpoint.pause import collector_paused
from gdsdata.torch_private import caches_plans

Place = tuple[str | int, ...]  # keys and indices, from a state on


class GDSSavePlanner(DefaultSavePlanner):
    """torch's default planner, quicker where tensors are plain.

        writer, planner = gdsdata.GDSStorageWriter("step-100"), gdsdata.GDSSavePlanner()
        torch.distributed.checkpoint.save(state, storage_writer=writer, planner=planner)

    Its plans are equal to torch's, and it goes with any storage writer; arguments and errors are
    `DefaultSavePlanner`'s.
    """

    @collector_paused()
    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        places = _places(state_dict) if self.flatten_state_dict else None
        if places is None:
            return super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict, self.mappings = _flat(places)
        self.is_coordinator = is_coordinator
        return None

    @collector_paused()
    def create_local_plan(self) -> SavePlan:
        if not self.flatten_state_dict or caches_plans(self):
            return super().create_local_plan()
        items = []
        for name, value in self.state_dict.items():
            if _is_plain(value):
                items.append(_write_of_all(name, value))
            else:
                items += create_default_local_save_plan({name: value}, self.is_coordinator).items
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    @collector_paused()
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict.get(index.fqn)
        return found if _is_all(found, index) else super().lookup_object(index)


class GDSLoadPlanner(DefaultLoadPlanner):
    """torch's default planner, quicker where tensors are plain and were saved as a whole.

        reader, planner = gdsdata.GDSStorageReader("step-100"), gdsdata.GDSLoadPlanner()
        torch.distributed.checkpoint.load(state, storage_reader=reader, planner=planner)

    For each tensor torch's own asks what else it might be: 25 us of Python 3.11, and here 2. This one asks so only of
    DTensors, other subclasses and what was saved in parts. Its plans are equal to torch's, but for the order of their
    items, and it goes with any storage reader; arguments and errors are `DefaultLoadPlanner`'s.
    """

    @collector_paused()
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        places = _places(state_dict) if self.flatten_state_dict else None
        if places is None:
            return super().set_up_planner(state_dict, metadata, is_coordinator)
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = _flat(places)
        self.metadata, self.is_coordinator = metadata, is_coordinator
        return None

    @collector_paused()
    def create_local_plan(self) -> LoadPlan:
        stored = self.metadata and self.metadata.state_dict_metadata
        if stored is None or not stored.keys() <= self.state_dict.keys():  # torch may know an older way to name them
            return super().create_local_plan()
        items, others = [], {}
        for name, value in self.state_dict.items():
            item = _read_of_all(name, value, stored.get(name))
            if item is None:
                others[name] = value
            else:
                items.append(item)
        if others:
            items += create_default_local_load_plan(others, self.metadata, not self.allow_partial_load).items
        return LoadPlan(items)

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.shape == read_item.lengths else super().transform_tensor(read_item, tensor)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        found = self.state_dict.get(index.fqn)
        return found if _is_all(found, index) else super().lookup_tensor(index)


# ------------------------------------------------------------------------------------------------ flattening

_SCALARS = frozenset({int, float, bool, str, bytes, type(None)})


class _Unusual(Exception):
    """Something that torch has to look at."""


def _places(state: dict[str, Any]) -> dict[str, tuple[Place, Any]] | None:
    """Each value and where it is, by the name that torch's flattening gives it; None: torch has to look.

    Torch does the same to dicts and lists. What it does besides is for tensors on the meta device, ShardedTensors and
    what is of other kinds.
    """
    found: dict[str, tuple[Place, Any]] = {}
    try:
        for place, value in _values(state, ()):
            name = ".".join(map(str, place))
            if name in found:
                return None  # torch says so
            found[name] = (place, value)
    except _Unusual:
        return None
    return found


def _flat(places: dict[str, tuple[Place, Any]]) -> tuple[dict[str, Any], dict[str, Place]]:
    """A planner's `state_dict` and `mappings`."""
    values = {name: value for name, (_, value) in places.items()}
    return values, {name: place for name, (place, _) in places.items()}


def _values(value: object, place: Place) -> Iterator[tuple[Place, object]]:
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        for key, one in value.items():
            yield from _values(one, (*place, str(key)))
    elif kind is list and any(type(one) is dict or _is_plain(one) for one in value):
        for i, one in enumerate(value):
            within = list(_values(one, (*place, i)))
            if not within:
                raise _Unusual  # torch makes the list anew, without it
            yield from within
    elif _is_plain(value) or kind is DTensor:
        if value.is_meta:
            raise _Unusual
        yield place, value
    elif kind in _SCALARS or ((kind is list or kind is tuple) and _SCALARS.issuperset(map(type, value))):
        yield place, value
    else:
        raise _Unusual


# ------------------------------------------------------------------------------------------------ items


def _is_plain(value: object) -> bool:
    """And no part of another tensor, which a plain one may say of itself (`CheckpointableTensor`)."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and not hasattr(value, "global_offsets")


def _is_all(value: object, index: MetadataIndex) -> bool:
    """Whether the index means all of a plain tensor."""
    return _is_plain(value) and (index.offset is None or not any(index.offset))


def _write_of_all(name: str, tensor: torch.Tensor) -> WriteItem:
    size = tensor.shape
    begin = torch.Size([0] * len(size))
    chunk, properties = ChunkStorageMetadata(begin, size), TensorProperties.create_from_tensor(tensor)
    data = TensorWriteData(chunk, properties, size)
    return WriteItem(MetadataIndex(name, begin), WriteItemType.TENSOR, tensor_data=data)


def _read_of_all(name: str, value: object, stored: STORAGE_TYPES | None) -> ReadItem | None:
    """None where it is not a plain tensor, saved in one piece."""
    if not _is_plain(value) or type(stored) is not TensorStorageMetadata or len(stored.chunks) != 1:
        return None
    size = value.shape
    if stored.size != size or stored.chunks[0].sizes != size or 0 in size:
        return None
    begin = torch.Size([0] * len(size))
    if stored.chunks[0].offsets != begin:
        return None
    index = MetadataIndex(name, begin, 0)
    return ReadItem(LoadItemType.TENSOR, index, begin, index, begin, size)
