"""Tensors that a load fills, and that share memory although they were saved apart.

For example, the weights of a model are tied, and a file has two. Read side by side, they would be
mixed in that memory. Tensors of which one begins elsewhere in the other are not noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from gdsdata.checkpoint.stored import Stored, bytes_of
from gdsdata.checkpoint.tree import Path, name_of
from gdsdata.warn import warn


class SharedTargets:
    """Notes from where memory is filled, in the order in which that is asked for."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[torch.Tensor, Stored, Path, bool]] = {}  # by address; True: it has several sources

    def note(self, target: torch.Tensor, stored: Stored, name: Path) -> Path | None:
        """Note that ``target`` is to have the values of a stored tensor.

        Args:
            target: a tensor with elements in memory of its own.
            stored: where its values lie.
            name: the path of the tensor in what was saved.

        Returns:
            The path of the tensor that fills this memory before, if it has other values or lies
            there in another way. None: the target may be read in place.
        """
        address = target.data_ptr()
        last = self._last.get(address)
        if last is None:
            self._last[address] = (target, stored, name, False)
            return None
        its_target, its_stored, its_name, has_several = last
        if not has_several and _lie_alike(target, its_target) and _lie_alike(stored, its_stored):
            return None
        self._last[address] = (target, stored, name, True)
        return its_name


def fill_last(target: torch.Tensor, values: torch.Tensor, name: Path, before: Path, path: str) -> None:
    """Copy values into memory that another tensor has filled, and warn if they differ.

    Args:
        target: the memory.
        values: of the tensor ``name``.
        name, before: paths of this tensor and of the other one.
        path: of the file.
    """
    cast = values.to(target.device, target.dtype)
    if not torch.equal(_contents(target), _contents(cast)):
        names = name_of(before), name_of(name)
        warn(
            f"{names[0]} and {names[1]} share memory here, and '{path}' has other values for each: those of {names[1]} "
            "were taken. To have both, untie them before the load"
        )
    target.copy_(cast)


def filled_apart(
    targets: Mapping[Path, torch.Tensor], saved: Mapping[Path, Stored | torch.Tensor], is_plain: Callable[[Path], bool]
) -> frozenset[Path]:
    """Return the paths of targets that must not be filled in place, because they share memory.

    They were saved apart. A ``load_state_dict`` copies the new tensors as its object wants it. The
    first of plain values keeps its place, unless that is in the memory of such an object.

    Args:
        targets: the tensors to fill.
        saved: what each of them is to have.
        is_plain: called with a path: whether it is in no object that has a ``load_state_dict``.
    """
    by_address: dict[int, list[Path]] = {}
    for place, target in targets.items():
        if target.numel() > 0:
            by_address.setdefault(target.data_ptr(), []).append(place)
    apart: list[Path] = []
    for places in by_address.values():
        first = places[0]
        unlike = [
            place
            for place in places[1:]
            if not (_lie_alike(targets[place], targets[first]) and _lie_alike(saved[place], saved[first]))
        ]
        if unlike:
            apart += unlike if all(map(is_plain, places)) else places
    return frozenset(apart)


def _lie_alike(one: Stored | torch.Tensor, other: Stored | torch.Tensor) -> bool:
    """Return whether equal elements of two tensors lie in equal places."""
    return _place_of(one) == _place_of(other)


def _place_of(one: Stored | torch.Tensor) -> tuple[object, ...]:
    if isinstance(one, Stored):
        return one.record, one.offset, one.dtype, one.stride
    return one.device, one.data_ptr(), one.dtype, one.stride()


def _contents(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements, in their order."""
    return bytes_of(tensor.detach().resolve_conj().resolve_neg().contiguous())
