"""A rank's load plan on the way through `torch.distributed.checkpoint.load`.

torch sends the plans of all ranks to one rank and back. A plan as torch pickles it takes 37 us of
that rank for each item (two cores, 2026-11-29).
"""

from __future__ import annotations

import pickle
import zlib
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from gdsdata.checkpoint.gc_pause import collector_paused


class PackedPlan(LoadPlan):
    """A plan that is pickled as one string of bytes, if it has only items of torch's own classes.

    Its items are unpacked where somebody looks at them. So a rank that only passes it on does no
    work for each item.
    """

    _packed: bytes

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        if not self._is_untouched():
            if not self._is_usual():
                return LoadPlan, (self.items, self.storage_data, self.planner_data)
            self._packed = _packed(self.items)
        return _passed_on, (self._packed,)

    def __getattr__(self, name: str) -> Any:
        if name != "items":
            raise AttributeError(f"a LoadPlan has no attribute {name!r}")
        self.items = _unpacked(self._packed)
        return self.items

    def __eq__(self, other: object) -> bool:
        """Compare as a plain plan does, which a planner may have kept."""
        if not isinstance(other, LoadPlan):
            return NotImplemented
        mine, its = ((one.items, one.storage_data, one.planner_data) for one in (self, other))
        return mine == its

    def is_unchanged(self, sent: LoadPlan) -> bool:
        """Return whether this is `sent` after its way, and nobody has looked at its items there."""
        return self._is_untouched() and vars(sent).get("_packed") == self._packed

    def _is_untouched(self) -> bool:
        """Return whether nobody in this process has unpacked its items or set anything."""
        return vars(self).keys() == {"_packed"}

    def _is_usual(self) -> bool:
        return self.storage_data is None and self.planner_data is None and all(map(_is_usual, self.items))


def packed_plan(plan: LoadPlan) -> LoadPlan:
    """Return a plan of the same items that is packed when it is pickled.

    A plan of another class than torch's is returned as it is.
    """
    return PackedPlan(plan.items, plan.storage_data, plan.planner_data) if type(plan) is LoadPlan else plan


def _is_usual(item: ReadItem) -> bool:
    return type(item) is ReadItem and type(item.dest_index) is type(item.storage_index) is MetadataIndex


def _passed_on(packed: bytes) -> PackedPlan:
    plan = PackedPlan.__new__(PackedPlan)
    plan._packed = packed
    return plan


# Tuples, strings and numbers are pickled and unpickled 15 times as fast as the items, and zlib has
# names that are alike shrink to a twentieth (two cores, 2026-11-29).
@collector_paused()
def _packed(items: list[ReadItem]) -> bytes:
    return zlib.compress(pickle.dumps([_row(item) for item in items]), level=1)


def _row(item: ReadItem) -> tuple[Any, ...]:
    return (
        item.type.value,
        _place(item.dest_index),
        tuple(item.dest_offsets),
        _place(item.storage_index),
        tuple(item.storage_offsets),
        tuple(item.lengths),
    )


def _place(index: MetadataIndex) -> tuple[str, tuple[int, ...] | None, int | None]:
    return index.fqn, None if index.offset is None else tuple(index.offset), index.index


@collector_paused()
def _unpacked(packed: bytes) -> list[ReadItem]:
    return [
        ReadItem(
            LoadItemType(kind),
            MetadataIndex(*target),
            torch.Size(target_begin),
            MetadataIndex(*stored),
            torch.Size(stored_begin),
            torch.Size(lengths),
        )
        for kind, target, target_begin, stored, stored_begin, lengths in pickle.loads(zlib.decompress(packed))
    ]
