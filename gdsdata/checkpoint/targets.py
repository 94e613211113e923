"""The tensors that a load fills, and whether saved tensors fit into them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Container, Iterable, Mapping
from typing import Any, TypeGuard

import numpy as np
import torch

from gdsdata.checkpoint.stored import Stored
from gdsdata.checkpoint.tensor_kinds import (
    AS_IT_WAS,
    are_of_one_kind,
    check_not_freed,
    copy_into,
    has_own_memory,
    is_on_meta,
    is_plain,
    kind_in_words,
    takes_copy_of,
)
from gdsdata.checkpoint.tensor_reader import TensorReader
from gdsdata.checkpoint.tree import Leaf, Path, any_leaf, leaves, name_of

_MOST_NAMES_SHOWN = 5


class Words:
    """Words in which a tree is refused that a file cannot fill.

    Args:
        tree: what the tree is called.
        misnamed, unlike: what to do about other names, and about another shape or dtype.
        uncopied: what else to do about a tensor that takes no copy.
    """

    def __init__(self, tree: str, misnamed: str, unlike: str, uncopied: str) -> None:
        self.tree, self.misnamed, self.unlike, self.uncopied = tree, misnamed, unlike, uncopied


OF_A_LOAD = Words(
    "into",
    "strict=False takes those in both",
    "the shapes must be equal, and dtype= allows a cast to its dtype",
    ", or load it without into=",
)


def check_into(path: str, into: Any) -> None:
    """Check that ``into`` has tensors that the file ``path`` can fill.

    Raises:
        TypeError: it is a module, or no tree of dicts, lists and tuples.
        ValueError: a tensor is on the meta device, or its memory was freed.
    """
    if isinstance(into, torch.nn.Module):
        raise TypeError(
            f"into= is a module ({type(into).__name__}): pass its tensors, into=model.state_dict(), or call "
            f"model.load_state_dict(gdsdata.load({path!r}))"
        )
    if not isinstance(into, torch.Tensor) and any(one.path == () for one in itertools.islice(leaves(into), 1)):
        remedy = "pass a nest of dicts and lists with tensors in it, as state_dict() gives it"
        if isinstance(into, dict):  # a class of its own, which may do anything when a value is set
            remedy = "pass dict(into), which has the same tensors"
        raise TypeError(f"into= is of type {type(into).__name__}, which has nothing to fill: {remedy}")
    check_has_memory(path, into)


def check_has_memory(path: str, tree: Any) -> None:
    """Check that no tensor of a tree is on the meta device, and that the memory of none was freed.

    A file has nothing to fill there.

    Raises:
        ValueError: a tensor is so; the message has its name.
    """
    check_not_freed(tree, f"fill from '{path}'")
    if not any_leaf(tree, is_on_meta):
        return
    for one in leaves(tree):
        if is_on_meta(one.value):
            name = name_of(one.path) or "the tensor"
            raise ValueError(
                f"{name} is on the meta device, which has no memory to fill from '{path}': call "
                f"model.load_state_dict(gdsdata.load({path!r}, device=...), assign=True), which gives the model the "
                "loaded tensors, or model.to_empty(device=...) before"
            )


def fits(target: Any, leaf: Stored | torch.Tensor, dtype: torch.dtype | None = None) -> TypeGuard[torch.Tensor]:
    """Return whether ``target`` can take the values of a saved tensor.

    Args:
        target: what is to be filled.
        leaf: the saved tensor.
        dtype: a dtype that ``target`` may have besides that of the saved tensor.
    """
    if not isinstance(target, torch.Tensor):
        return False
    if not isinstance(leaf, Stored) and not (has_own_memory(target) and has_own_memory(leaf)):
        return are_of_one_kind(target, leaf) and takes_copy_of(target, leaf)
    if not has_own_memory(target) or _is_expanded(target):
        return False
    return target.shape == leaf.shape and target.dtype in (leaf.dtype, dtype)  # torch.Size is a tuple


def _is_expanded(target: torch.Tensor) -> bool:
    """Return whether several elements lie in one place, as those of `torch.Tensor.expand` do."""
    strides = target.stride()
    return 0 in strides and any(step == 0 and size > 1 for step, size in zip(strides, target.shape, strict=True))


def check_fits(
    path: str, place: Path, target: Any, leaf: Any, dtype: torch.dtype | None = None, words: Words = OF_A_LOAD
) -> None:
    """Check `fits` for what the file ``path`` has at ``place``.

    Raises:
        ValueError: it does not fit, torch has no cast from one to the other, or only one of
            ``target`` and ``leaf`` is a tensor.
    """
    name, is_tensor = name_of(place), isinstance(target, torch.Tensor)
    if is_tensor and not isinstance(leaf, (Stored, torch.Tensor)):
        raise ValueError(f"{name} is a tensor in {words.tree}, and none in '{path}'")
    if not is_tensor and isinstance(leaf, (Stored, torch.Tensor)):
        remedy = f"give a tensor of shape {tuple(leaf.shape)} and dtype {leaf.dtype}"
        if isinstance(target, np.ndarray):
            remedy = "give a tensor, as torch.from_numpy(array) is"
        raise ValueError(f"{name} is a tensor in '{path}', and {kind_in_words(target)} in {words.tree}: {remedy}")
    if fits(target, leaf, dtype):
        if isinstance(leaf, Stored) and target.dtype != leaf.dtype:
            _check_cast(path, place, leaf.dtype, target.dtype)
        return
    if not has_own_memory(target) or not (isinstance(leaf, Stored) or has_own_memory(leaf)):
        raise ValueError(
            f"{name} in '{path}' is {_described(leaf)}, and the tensor to fill is {_described(target)}: "
            f"one cannot be copied into the other: {AS_IT_WAS}{words.uncopied}"
        )
    if _is_expanded(target):
        raise ValueError(
            f"{name} is to be filled from '{path}', but it was expanded: elements of it share one place. "
            "Give a tensor with a place for each, as expanded.contiguous() is"
        )
    raise ValueError(
        f"{name} in '{path}' has shape {tuple(leaf.shape)} and dtype {leaf.dtype}, and the tensor to fill "
        f"{tuple(target.shape)} and {target.dtype}: {words.unlike}"
    )


def check_casts(path: str, stored: Mapping[Path, Stored], dtype: torch.dtype) -> None:
    """Check that torch casts the floating-point tensors of the file ``path`` to ``dtype``.

    Raises:
        ValueError: it does not cast one of them; the message has its name.
    """
    for place, one in stored.items():
        if one.dtype != dtype and one.dtype.is_floating_point:
            _check_cast(path, place, one.dtype, dtype)


def _check_cast(path: str, place: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    if not _is_cast(stored, wanted):
        raise ValueError(
            f"{name_of(place)} in '{path}' is of {stored}, which torch does not cast to {wanted}: leave dtype= out, "
            "or leave this tensor out by only="
        )


@functools.lru_cache
def _is_cast(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether torch casts these dtypes. It has no casts of packed elements."""
    try:
        torch.empty(1, dtype=stored).to(wanted)
    except NotImplementedError:
        return False
    return True


def filled_by_another_name(targets: Iterable[Leaf], saved: Container[Path]) -> set[Path]:
    """Return the paths that the file lacks of tensors that it fills under another path.

    Such are tied weights, of which a safetensors file has one.
    """
    lacking: dict[tuple[Any, ...], list[Path]] = {}
    for path, value in targets:
        if path not in saved and isinstance(value, torch.Tensor) and has_own_memory(value) and value.numel() > 0:
            lacking.setdefault(place_of(value), []).append(path)
    if not lacking:
        return set()
    filled = [one for path, one in targets if path in saved and isinstance(one, torch.Tensor) and has_own_memory(one)]
    return {path for one in filled for path in lacking.get(place_of(one), ())}


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what is equal for tied tensors alone, if they have elements in memory of their own."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def check_names(path: str, asked: set[Path], saved: set[Path], words: Words = OF_A_LOAD) -> None:
    """Check that the file ``path`` has the names that were asked for, and no others.

    Raises:
        ValueError: names differ; the message has some of them.
    """
    differences = ((asked - saved, words.tree), (saved - asked, "the file"))
    if found := ", ".join(f"{some_names(names)} only in {where}" for names, where in differences if names):
        raise ValueError(f"'{path}' and {words.tree} have different names: {found}: {words.misnamed}")


def no_common_names(path: str, asked: set[Path], saved: set[Path]) -> str:
    """Return the message for a load from a file that has none of the names in ``into``."""
    if asked == {()}:
        return (
            f"'{path}' and into have no name in common: into= is one tensor, and the names in the file are "
            f"{some_names(saved)}: pass a dict of tensors by these names"
        )
    return (
        f"'{path}' and into have no name in common: {some_names(asked)} in into, {some_names(saved)} in the file: "
        "use the file's names in into"
    )


def some_names(paths: Iterable[Path]) -> str:
    """Return the first few names of these paths for a message."""
    names = sorted(map(name_of, paths))
    shown = ", ".join(names[:_MOST_NAMES_SHOWN]) or "none"
    rest = len(names) - _MOST_NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown


def fill(target: torch.Tensor, leaf: Stored | torch.Tensor, place: Path, reader: TensorReader) -> None:
    """Have ``reader`` fill ``target`` with the values of the tensor that was saved at ``place``."""
    if isinstance(leaf, Stored):
        return reader.tensor_into(target, leaf, place)
    return reader.afterwards(functools.partial(copy_into, target, leaf))


def _described(one: Stored | torch.Tensor) -> str:
    kind = "plain Tensor" if isinstance(one, Stored) or is_plain(one) else type(one).__name__
    if isinstance(one, Stored):
        return f"a {kind} of {one.dtype}"
    return f"a {kind} of {one.dtype} and {one.layout} on {one.device}"
