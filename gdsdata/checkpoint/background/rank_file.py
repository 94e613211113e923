"""The file that one rank saved, read over the state that it is restored into."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from gdsdata.checkpoint.api import load
from gdsdata.checkpoint.background.states import PlainValues, is_open_ended
from gdsdata.checkpoint.contents import Kind, kind_of
from gdsdata.checkpoint.explanations import call_named
from gdsdata.checkpoint.gc_pause import collector_paused
from gdsdata.checkpoint.open_object import open_path
from gdsdata.checkpoint.shared_targets import filled_apart
from gdsdata.checkpoint.stored import Stored
from gdsdata.checkpoint.targets import Words, check_fits, check_has_memory, check_names, fill, fits
from gdsdata.checkpoint.tensor_kinds import are_of_one_kind, has_own_memory
from gdsdata.checkpoint.tensor_reader import TensorReader
from gdsdata.checkpoint.torch_zip.archive import open_archive
from gdsdata.checkpoint.torch_zip.archive_reader import unpickle_structure
from gdsdata.checkpoint.torch_zip.unpickling import NotPlain
from gdsdata.checkpoint.tree import Path, first_device, has_place, leaves, map_leaves, name_of
from gdsdata.errors import CorruptData
from gdsdata.io import engine
from gdsdata.io.options import EngineOptions

if TYPE_CHECKING:
    from gdsdata.collective.transfers import SharedReads


_OF_A_RESTORE = Words("the state", "restore into the names that were saved", "restore into what was saved", "")


@collector_paused()
def load_over(
    path: str,
    targets: dict[str, Any],
    *,
    plain: PlainValues,
    verify: bool,
    weights_only: bool,
    options: EngineOptions,
    together: SharedReads | None = None,
) -> dict[str, Any]:
    """Load what a file of `torch.save` has under each name of ``targets``.

    A tensor with the path, shape and dtype of a target is read into that target. Others are read
    into new tensors, on a device of the kind that they were saved from. A tensor without memory of
    its own is copied, or takes the target's place. So does one that was saved apart from another
    tensor, if their targets share memory.

    Args:
        path: of the file, or its URL.
        targets: the states, by name.
        plain: the values among which all paths must be the same, and all tensors must fit, except
            in containers that `_open_ended` yields.
        verify: compare checksums.
        weights_only: as in `torch.load`.
        options: of the engine.
        together: the ranks that read together. None: this one alone.

    Raises:
        ValueError: a name is not in the file, or something of ``plain`` differs.
    """
    check_has_memory(path, targets)
    file = open_path(path)
    if kind_of(file) is not Kind.TORCH:
        raise CorruptData(f"'{path}' is a safetensors file, and no checkpoint of AsyncCheckpointer's", path)
    reader = TensorReader(options, verify, together)
    reader.expect(file.size_bytes, first_device(targets))
    try:
        saved = unpickle_structure(open_archive(file))
    except NotPlain:
        saved = None
    if saved is None:  # only torch can make it
        saved = _loaded_by_torch(path, verify, weights_only, options)
    lost = [name for name in targets if not isinstance(saved, dict) or name not in saved]
    if lost:
        has = ", ".join(map(repr, saved)) if isinstance(saved, dict) else "no names"
        raise ValueError(f"'{path}' has nothing of the name {lost[0]!r}, but {has}: restore a state without it")
    chosen = {name: saved[name] for name in targets}
    for place in sorted(plain.objects, key=name_of):
        if not has_place(chosen, place):
            raise ValueError(f"'{path}' has nothing for the object {name_of(place)}: restore into what was saved")
    target_of = {one.path: one.value for one in leaves(targets)}
    saved_of = {one.path: one.value for one in leaves(chosen)}
    tensors = {place: leaf for place, leaf in saved_of.items() if isinstance(leaf, (Stored, torch.Tensor))}
    filled = {place for place, leaf in tensors.items() if fits(target_of.get(place), leaf)}
    for name in targets:
        if name in plain.names:
            unchecked = {*plain.objects, *_open_ended(targets[name], chosen[name], (name,), plain)}
            _check_strictly(path, name, saved_of, target_of, filled, unchecked)
    in_memory = {place: one for place, one in target_of.items() if place in filled and has_own_memory(one)}
    apart = filled_apart(in_memory, tensors, plain.has)
    filled -= apart
    new: dict[torch.device, dict[Path, Stored]] = {}
    for place, leaf in tensors.items():
        if place in filled:
            fill(target_of[place], leaf, place, reader)
        elif isinstance(leaf, Stored):
            device = target_of[place].device if place in apart else _device_like(leaf.location)
            new.setdefault(device, {})[place] = leaf
    made = {place: tensor for device in new for place, tensor in reader.tensors(new[device], device).items()}
    reader.run()

    def restored(place: Path, leaf: Any) -> Any:
        if place in filled:
            return target_of[place]
        if plain.has(place) and are_of_one_kind(target_of.get(place), leaf):
            return leaf.to(target_of[place].device)
        return made.get(place, leaf)

    return map_leaves(chosen, restored)


def _loaded_by_torch(path: str, verify: bool, weights_only: bool, options: EngineOptions) -> Any:
    with call_named(f"'{path}'", "restore(..., weights_only=False)"):
        return load(path, verify=verify, weights_only=weights_only, options=options)


def _open_ended(target: Any, saved: Any, place: Path, plain: PlainValues) -> Iterator[Path]:
    """Yield the paths of values that are restored as they were saved, however much is in them.

    They are lists and tuples without tensors and objects whose length differs, empty dicts, and
    None: the lists of a program that has just started are shorter than those that it saved.
    """
    kinds = type(target), type(saved)
    if place in plain.objects:
        return
    if is_open_ended(target, saved) and not any(one[: len(place)] == place for one in plain.objects):
        yield place
    elif kinds[0] is kinds[1] and kinds[0] in (dict, collections.OrderedDict):
        for key in target.keys() & saved.keys():
            yield from _open_ended(target[key], saved[key], (*place, key), plain)
    elif kinds[0] is kinds[1] and kinds[0] in (list, tuple):
        for i, both in enumerate(zip(target, saved, strict=False)):
            yield from _open_ended(*both, (*place, i), plain)


def _check_strictly(
    path: str,
    name: str,
    saved_of: dict[Path, Any],
    target_of: dict[Path, Any],
    filled: set[Path],
    unchecked: set[Path],
) -> None:
    """Check that the file and the targets agree under a name.

    All paths must be the same, and all tensors must fit. Those of ``filled`` do. Nothing is checked
    below the paths of ``unchecked``.

    Raises:
        ValueError: they do not agree.
    """

    def is_checked(place: Path) -> bool:
        if place[0] != name:
            return False
        return not unchecked or unchecked.isdisjoint(itertools.accumulate((key,) for key in place))

    saved = [place for place in saved_of if is_checked(place)]
    check_names(path, {place for place in target_of if is_checked(place)}, set(saved), _OF_A_RESTORE)
    for place in itertools.filterfalse(filled.__contains__, saved):
        leaf, target = saved_of[place], target_of[place]
        is_tensor = isinstance(leaf, (Stored, torch.Tensor)) or isinstance(target, torch.Tensor)
        if is_tensor and not are_of_one_kind(target, leaf):
            check_fits(path, place, target, leaf, words=_OF_A_RESTORE)


def _device_like(location: str) -> torch.device:
    """Return the current GPU if a tensor was saved from one; else the CPU.

    Without a GPU here, it is the CPU too.
    """
    on_gpu = location.startswith("cuda") and torch.cuda.is_available()
    return engine.resolved("cuda") if on_gpu else torch.device("cpu")
