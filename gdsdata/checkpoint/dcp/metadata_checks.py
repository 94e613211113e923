"""Checks of ``.metadata`` before a load: its types, and that its parts make whole tensors."""

from __future__ import annotations

import itertools
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from gdsdata.checkpoint.stored import Stored
from gdsdata.errors import CorruptData

_Box = tuple[Sequence[int], Sequence[int]]  # offsets and sizes


def check_form(metadata: Any) -> None:
    """Check that the parts of ``.metadata`` are of the types that torch writes.

    Raises:
        UnpicklingError: one is not; the message says of what.
    """
    if not isinstance(getattr(metadata, "storage_data", None), dict):
        raise pickle.UnpicklingError("it names no data files")
    for name, about in metadata.state_dict_metadata.items():
        if not (type(name) is str and _has_form(about)):
            raise pickle.UnpicklingError(f"it does not describe {name!r} as torch does")
    for index, info in metadata.storage_data.items():
        if not (isinstance(index, MetadataIndex) and _is_place(info)):
            raise pickle.UnpicklingError(f"it does not say where {index!r} lies")


def _is_place(info: Any) -> bool:
    numbers = [getattr(info, name, None) for name in ("offset", "length")]
    return type(getattr(info, "relative_path", None)) is str and all(type(one) is int and one >= 0 for one in numbers)


def _has_form(about: Any) -> bool:
    if isinstance(about, BytesStorageMetadata):
        return True
    if not isinstance(about, TensorStorageMetadata):
        return False
    try:
        shapes = [about.size, *(shape for one in about.chunks for shape in (one.offsets, one.sizes))]
        return isinstance(about.properties.dtype, torch.dtype) and all(type(one) is torch.Size for one in shapes)
    except (AttributeError, TypeError):
        return False


def check_covered(plan: LoadPlan, planner: LoadPlanner, tensors: Mapping[str, Any], path: str) -> None:
    """Check that a plan fills all of each tensor once. Else a load would leave old values there.

    Tensors that were saved as a whole take 0.5 us each.

    Args:
        plan: of this rank.
        planner: it has the tensors that are to be filled. Only torch's, and those derived from it,
            can be asked for them.
        tensors: ``.metadata`` of each, by name.
        path: of ``.metadata``.

    Raises:
        CorruptData: parts are missing, or lie over each other.
    """
    if not isinstance(planner, DefaultLoadPlanner):
        return
    lost = {name for name in planner.state_dict if not _is_whole(tensors.get(name))}
    if not lost:
        return
    items = defaultdict(list)
    for item in plan.items:
        if item.type is LoadItemType.TENSOR and item.dest_index.fqn in lost:
            items[item.dest_index.fqn].append(item)
    for name in lost:
        # One rank may have saved only its own part, and load it again.
        if not _fill_all(planner.state_dict[name], items[name], planner):
            raise CorruptData(
                f"'{path}' has parts of {name} that do not make a tensor of {tuple(tensors[name].size)}: the file is "
                "damaged, or the parts were saved by a rank alone. Copy the checkpoint again, or load another one",
                path,
            )


def check_placed(plan: LoadPlan, places: Mapping[MetadataIndex, Any], path: str) -> None:
    """Check that ``.metadata`` says where each part of a plan lies.

    Raises:
        CorruptData: it does not.
    """
    for item in plan.items:
        if item.storage_index not in places:
            raise CorruptData(f"'{path}' does not say where {item.storage_index} lies: copy the checkpoint again", path)


def check_shape(item: ReadItem, stored: Stored, tensors: Mapping[str, Any], path: str) -> None:
    """Check that a stored part has the shape that ``.metadata`` says.

    Raises:
        CorruptData: it has another one.
    """
    index = item.storage_index
    about = tensors.get(index.fqn)
    if not isinstance(about, TensorStorageMetadata) or index.index is None or index.index >= len(about.chunks):
        return
    expected = about.chunks[index.index].sizes
    if stored.shape != expected:
        raise CorruptData(
            f"'{path}' has a part of {tuple(expected)} of {index.fqn}, but '{stored.record.path}' has one of "
            f"{tuple(stored.shape)}: one of the files is damaged, or of another checkpoint. Copy it again",
            path,
        )


def _is_whole(about: Any) -> bool:
    """Return whether a tensor's parts cover it once. Other values are whole."""
    if not isinstance(about, TensorStorageMetadata):
        return True
    size, chunks = about.size, about.chunks
    if len(chunks) == 1:
        return chunks[0].sizes == size and not any(chunks[0].offsets)
    return _cover(size, [(one.offsets, one.sizes) for one in chunks])


def _cover(size: Sequence[int], boxes: Sequence[_Box]) -> bool:
    """Return whether boxes cover each element of a tensor once.

    They do if and only if their signed corners add up to those of the tensor: these are the
    differences, along all axes, of how often each element is covered.
    """
    if 0 in size:
        return True
    if not boxes or any(len(one) != len(size) for box in boxes for one in box):
        return False
    numbers = itertools.chain.from_iterable(itertools.chain.from_iterable(boxes))
    begins, sizes = np.fromiter(numbers, np.int64).reshape(len(boxes), 2, len(size)).swapaxes(0, 1)
    ends = begins + sizes
    if (begins < 0).any() or (ends < begins).any() or (ends > size).any():
        return False
    is_split = ((begins > 0) | (ends < size)).any(axis=0)  # the others are whole in all boxes
    shape = np.array(size, np.int64)[is_split]
    if not len(shape):
        return len(boxes) == 1 or not size  # a tensor without axes may have its element from any of them
    begins = np.vstack([begins[:, is_split], np.zeros_like(shape)])
    ends = np.vstack([ends[:, is_split], shape])
    signs = np.ones(len(begins))
    signs[-1] = -1
    places, counts = [], []
    for far in itertools.product((False, True), repeat=len(shape)):
        places.append(np.ravel_multi_index(tuple(np.where(far, ends, begins).T), tuple(shape + 1)))
        counts.append(signs * (-1) ** sum(far))
    corners = np.concatenate(places)
    order = np.argsort(corners)
    firsts = np.flatnonzero(np.diff(corners[order], prepend=-1))  # of each place
    return not np.add.reduceat(np.concatenate(counts)[order], firsts).any()


def _fill_all(target: Any, items: Iterable[ReadItem], planner: DefaultLoadPlanner) -> bool:
    """Return whether items fill each part of a tensor that they name.

    They must name one if the tensor has elements.
    """
    of_part: dict[MetadataIndex, list[_Box]] = defaultdict(list)
    for item in items:
        of_part[item.dest_index].append((item.dest_offsets, item.lengths))
    if not of_part:
        return not isinstance(target, torch.Tensor) or target.numel() == 0
    return all(_cover(planner.lookup_tensor(index).shape, boxes) for index, boxes in of_part.items())
