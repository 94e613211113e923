"""DTensors in states: the file of a rank has this rank's part of each."""

from __future__ import annotations

import sys
from typing import Any

import torch

from gdsdata.checkpoint.tree import Path, any_leaf, leaves, map_leaves, name_of


def _dtensor() -> Any:
    """Return the class of DTensors; None if nobody has imported it.

    Without the import there are no DTensors.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)  # another thread may be importing it


def has_dtensors(tree: Any) -> bool:
    """Return whether a leaf of a tree is a DTensor."""
    kind = _dtensor()
    return kind is not None and any_leaf(tree, lambda leaf: isinstance(leaf, kind))


def local_parts(tree: Any) -> Any:
    """Return a tree with this rank's part in the place of each DTensor."""
    kind = _dtensor()
    if not has_dtensors(tree):
        return tree
    return map_leaves(tree, lambda path, leaf: leaf.detach().to_local() if isinstance(leaf, kind) else leaf)


def shard_of(value: Any) -> tuple[int, ...] | None:
    """Return which part of a DTensor this rank has: its place along each dimension that shards.

    None if it is none.
    """
    kind = _dtensor()
    if kind is None or not isinstance(value, kind):
        return None
    place = value.device_mesh.get_coordinate() or ()
    return tuple(at for at, how in zip(place, value.placements, strict=False) if not how.is_replicate())


def with_dtensors(target: Any, parts: Any, found: Any) -> Any:
    """Return a tree with DTensors in the place of their parts.

    Args:
        target: the tree with its DTensors.
        parts: `local_parts` of ``target``.
        found: what was loaded: the parts themselves if they were filled, else new tensors.

    Returns:
        ``found`` with DTensors: those of ``target`` whose parts were filled, and new ones for new
            tensors.

    Raises:
        ValueError: a loaded part has another shape than that of ``target``.
    """
    kind = _dtensor()
    if kind is None or not has_dtensors(target):
        return found
    dtensors = {one.path: one.value for one in leaves(target) if isinstance(one.value, kind)}
    filled = {one.path: one.value for one in leaves(parts) if one.path in dtensors}

    def whole(path: Path, leaf: Any) -> Any:
        like = dtensors.get(path)
        if like is None or leaf is filled[path]:
            return leaf if like is None else like
        if not isinstance(leaf, torch.Tensor) or leaf.shape != filled[path].shape:
            raise ValueError(
                f"{name_of(path)} was saved as {_described(leaf)}, and this rank's part of it is "
                f"{_described(filled[path])}: restore it into a model of the same shapes and ranks"
            )
        part = leaf.to(like.device)
        return kind.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    return map_leaves(found, whole)


def _described(leaf: Any) -> str:
    return f"a tensor of {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else f"a {type(leaf).__name__}"
