"""The work of `load`, with a file that it has opened."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from gdsdata.checkpoint.contents import Kind, contents_of, kind_of
from gdsdata.checkpoint.open_file import OpenFile
from gdsdata.checkpoint.stored import Stored
from gdsdata.checkpoint.targets import (
    check_casts,
    check_fits,
    check_into,
    check_names,
    fill,
    filled_by_another_name,
    no_common_names,
    place_of,
    some_names,
)
from gdsdata.checkpoint.tensor_kinds import is_plain, plain_of
from gdsdata.checkpoint.tensor_reader import TensorReader
from gdsdata.checkpoint.tree import LEFT_OUT, Leaf, Path, empty_containers, leaves, map_leaves, name_of, with_leaves
from gdsdata.io.captures import wait_for_streams
from gdsdata.io.options import EngineOptions
from gdsdata.warn import warn

if TYPE_CHECKING:
    from gdsdata.collective.transfers import SharedReads


def load_new(
    file: OpenFile,
    device: torch.device,
    only: Sequence[str] | None,
    dtype: torch.dtype | None,
    verify: bool,
    weights_only: bool,
    options: EngineOptions,
    together: SharedReads | None = None,
) -> Any:
    """Read the tensors of a file into new ones, and return what was saved.

    The arguments are those of `gdsdata.load`, and the ranks that read together.
    """
    make_reader = functools.partial(TensorReader, options, verify, together)
    kind = kind_of(file)
    if kind is Kind.TORCH and only is None and dtype is None:
        from gdsdata.checkpoint.torch_zip import torch_file  # as in `contents_of`

        return torch_file.load(file, make_reader(), device, weights_only)
    contents = contents_of(kind, file, device, make_reader, weights_only)
    saved = {one.path: contents.stored_of(*one) for one in _chosen(file.path, contents.value, only)}
    stored = {place: one for place, one in saved.items() if isinstance(one, Stored)}
    if dtype is None:
        reader = make_reader()
        tensors = reader.tensors(stored, device)
        reader.run()
    else:
        from gdsdata.checkpoint.casts import tensors_cast  # late, because few loads cast

        check_casts(file.path, stored, dtype)
        tensors = tensors_cast(stored, dtype, device, make_reader, verify, at_once=together is not None)
        if kind is Kind.TORCH:
            from gdsdata.checkpoint.torch_zip import torch_file

            others = {place: one for place, one in saved.items() if not isinstance(one, (Stored, torch.Tensor))}
            torch_file.warn_of_uncast(file, others, dtype)
    casts: dict[object, torch.Tensor] = {}  # tied tensors stay tied

    def loaded(place: Path, _: Any) -> Any:
        if place not in saved:
            return LEFT_OUT
        leaf = saved[place]
        if place in tensors:
            return tensors[place]
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if dtype is None or not leaf.is_floating_point():
            return plain_of(leaf)
        tie = place_of(leaf) if is_plain(leaf) and leaf.numel() > 0 else id(leaf)
        if tie not in casts:
            with torch.no_grad():  # a graph would keep the original in memory
                casts[tie] = plain_of(leaf).to(dtype)
        return casts[tie]

    made = map_leaves(contents.value, loaded)
    wait_for_streams({cast.device for cast in casts.values()})
    return {} if made is LEFT_OUT else made


def load_into(
    file: OpenFile,
    into: Any,
    only: Sequence[str] | None,
    dtype: torch.dtype | None,
    strict: bool,
    verify: bool,
    weights_only: bool,
    options: EngineOptions,
    together: SharedReads | None = None,
) -> Any:
    """Fill the tensors of ``into`` whose paths match, and replace its other values.

    Everything is checked before the first change. The arguments are those of `load_new`, and
    ``into`` and ``strict`` those of `gdsdata.load`.

    Returns:
        ``into``; a new tuple if it is one, and has other values than tensors.
    """
    path = file.path
    check_into(path, into)
    make_reader = functools.partial(TensorReader, options, verify, together)
    reader = make_reader()
    contents = contents_of(kind_of(file), file, torch.device("cpu"), make_reader, weights_only)
    saved = dict(_chosen(path, contents.value, only))
    targets = [leaf for leaf in leaves(into) if _matches(leaf.path, only)]
    asked = {target.path for target in targets}
    if asked and saved and asked.isdisjoint(saved):
        message = no_common_names(path, asked, set(saved))
        if strict:
            raise ValueError(message)
        warn(f"nothing was loaded: {message}")
    elif strict:
        check_names(path, asked - filled_by_another_name(targets, saved), set(saved))
    found = [
        (target, contents.stored_of(target.path, saved[target.path])) for target in targets if target.path in saved
    ]
    for target, value in found:
        if isinstance(target.value, torch.Tensor) or isinstance(value, (Stored, torch.Tensor)):
            check_fits(path, target.path, target.value, value, dtype)
    others = {}
    for target, value in found:
        if isinstance(target.value, torch.Tensor):
            fill(target.value, value, target.path, reader)
            if together is None:  # ranks share what they want at the same time
                reader.run_if_full()
        else:
            others[target.path] = value
    reader.run()
    return with_leaves(into, others)


def _matches(place: Path, only: Sequence[str] | None) -> bool:
    return only is None or any(fnmatch.fnmatchcase(name_of(place), pattern) for pattern in only)


def _chosen(path: str, saved: Any, only: Sequence[str] | None) -> list[Leaf]:
    """Return the leaves of a saved value whose paths match, with their paths in the file.

    Raises:
        ValueError: no path matches, and no empty container's does.
    """
    chosen = [one for one in leaves(saved) if _matches(one.path, only)]
    if only and not chosen:
        # "state.*" also means an empty "state".
        empty = [one for place in empty_containers(saved) for one in (place, (*place, ""))]
        if not any(_matches(one, only) for one in empty):
            names = some_names({one.path for one in leaves(saved)})
            raise ValueError(f"only={list(only)!r} matches no name in '{path}'. Give patterns of these: {names}")
    return chosen
