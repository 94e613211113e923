"""DTensors in states: this rank's part of each is what a file of this rank has."""

from __future__ import annotations

import sys
from typing import Any

import torch

from gdsdata.checkpoint.nests import Path, mapped, name_of, places


def _dtensor() -> type | None:
    module = sys.modules.get("torch.distributed.tensor")  # where nobody has imported it there are none
    return None if module is None else module.DTensor


def has_dtensors(nest: Any) -> bool:
    kind = _dtensor()
    return kind is not None and any(isinstance(place.leaf, kind) for place in places(nest))


def local_parts(nest: Any) -> Any:
    """The same with each DTensor's part of this rank in its place."""
    kind = _dtensor()
    if not has_dtensors(nest):
        return nest
    return mapped(nest, lambda path, leaf: leaf.detach().to_local() if isinstance(leaf, kind) else leaf)


def with_dtensors(target: Any, parts: Any, found: Any) -> Any:
    """``found`` with DTensors in the places of their parts: those of ``target``, if their ``parts`` have been filled.

    Raises:
        ValueError: a part has another shape than that of ``target``.
    """
    kind = _dtensor()
    if kind is None or not has_dtensors(target):
        return found
    dtensors = {place.path: place.leaf for place in places(target) if isinstance(place.leaf, kind)}
    filled = {place.path: place.leaf for place in places(parts) if place.path in dtensors}

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

    return mapped(found, whole)


def _described(leaf: Any) -> str:
    return f"a tensor of {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else f"a {type(leaf).__name__}"
