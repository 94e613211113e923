"""Files of `torch.save`: loaded, or described without their tensors."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from gdsdata.checkpoint.explanations import torch_errors_explained
from gdsdata.checkpoint.open_file import HEAD_BYTES, OpenFile
from gdsdata.checkpoint.stored import Stored
from gdsdata.checkpoint.targets import some_names
from gdsdata.checkpoint.tensor_kinds import is_plain
from gdsdata.checkpoint.tensor_reader import TensorReader
from gdsdata.checkpoint.torch_zip import archive_reader
from gdsdata.checkpoint.torch_zip.archive import Archive, check_records, open_archive
from gdsdata.checkpoint.torch_zip.unpickling import NotPlain
from gdsdata.checkpoint.tree import Path, leaves
from gdsdata.errors import CorruptData
from gdsdata.io import engine
from gdsdata.torch_private import storage_id

# A value, and `Contents.stored_of`; None if the value's leaves stand for themselves.
Described = tuple[Any, Callable[[Path, Any], Any] | None]

# torch reads some small tensors while it builds others, such as the sizes of a nested tensor. So
# storages below this size are filled with zeros. Larger ones are left untouched, which costs
# nothing.
_LOOKED_AT_BYTES = 1 << 20

_MOST_REFERENTS = 1_000_000
_OF_PROGRAMS = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)


def load(file: OpenFile, reader: TensorReader, device: torch.device, weights_only: bool) -> Any:
    """Load all of a file that `torch.save` wrote, with its tensors on ``device``.

    Raises as `gdsdata.load` does.
    """
    try:
        archive = open_archive(file)
        explained = _torch_errors_explained(file, weights_only)
        return archive_reader.read(archive, reader, lambda _: device, device, weights_only, explained)
    except NotPlain as why:
        return _load_by_torch(file, why, device, weights_only, reader.verify)


def contents_of(
    file: OpenFile, device: torch.device, make_reader: Callable[[], TensorReader], weights_only: bool
) -> Described:
    """Find out what a file holds. The arguments are those of `contents.contents_of`."""
    try:
        archive = open_archive(file)
        if (structure := archive_reader.unpickle_structure(archive)) is not None:
            return structure, None
        without_values = _unpickled_without_values(file, archive, weights_only)
        if without_values is not None:
            return without_values
        explained = _torch_errors_explained(file, weights_only)
        return archive_reader.read(archive, make_reader(), lambda _: device, device, weights_only, explained), None
    except NotPlain as why:
        return _load_by_torch(file, why, device, weights_only, make_reader().verify), None


def _unpickled_without_values(file: OpenFile, archive: Archive, weights_only: bool) -> Described | None:
    """Have torch unpickle the object on storages that have no values yet.

    Returns:
        None if anything but a plain tensor that is a leaf refers to a storage, or to such a tensor,
            because that needs the storage's values.
    """
    storages: list[Any] = [torch.UntypedStorage(saved.size_bytes) for saved in archive.storages]  # type: ignore[no-untyped-call]
    for storage in storages:
        if storage.nbytes() < _LOOKED_AT_BYTES:
            storage.fill_(0)
    records = {
        storage_id(storage): archive.record_of(saved) for storage, saved in zip(storages, archive.storages, strict=True)
    }
    try:
        value = archive_reader.unpickle(archive, storages, weights_only)
    except (pickle.UnpicklingError, CorruptData):
        with _torch_errors_explained(file, weights_only):
            raise
    except Exception:  # the caller tries again with the values, and raises what does not come from their lack
        return None
    tensors = {id(one.value): one.value for one in leaves(value) if isinstance(one.value, torch.Tensor)}
    if len(tensors) != archive.references.total or not all(map(is_plain, tensors.values())):
        return None
    if _refer_to([one.value for one in leaves(value) if id(one.value) not in tensors], tensors):
        return None

    def stored_of(path: Path, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        offset = int(leaf.storage_offset()) * leaf.element_size()
        record = records[storage_id(leaf.untyped_storage())]
        return Stored(record, offset, leaf.dtype, tuple(leaf.shape), leaf.stride())

    return value, stored_of


def _refer_to(values: list[Any], tensors: Collection[int]) -> bool:
    """Return whether values refer to one of some tensors, such as a named tuple does.

    Also true if they refer to too many objects to find out.

    Args:
        values: the values.
        tensors: the ids of the tensors.
    """
    return any(count == _MOST_REFERENTS or id(one) in tensors for count, one in enumerate(_referents(values)))


def _referents(values: list[Any]) -> Iterator[Any]:
    """Yield values, and the objects that they refer to, but none of programs."""
    seen: set[int] = set()
    while values:
        values = [one for one in values if id(one) not in seen and not isinstance(one, _OF_PROGRAMS)]
        yield from values
        seen.update(map(id, values))
        values = gc.get_referents(*values)


def warn_of_uncast(file: OpenFile, others: Mapping[Path, Any], dtype: torch.dtype) -> None:
    """Warn of values that have floating-point tensors of another dtype.

    Args:
        file: the file.
        others: values of it that are no tensors, by their paths.
        dtype: that the caller wants.
    """
    if _have_others(list(others.values()), dtype):
        name = os.path.basename(file.path)
        where = some_names([place for place, one in others.items() if _have_others([one], dtype)])
        engine.warn_once(f"'{name}' has tensors of other dtypes in {where}, which dtype= does not cast")


def _have_others(values: list[Any], dtype: torch.dtype) -> bool:
    tensors = (one for one in itertools.islice(_referents(values), _MOST_REFERENTS) if isinstance(one, torch.Tensor))
    return any(one.is_floating_point() and one.dtype != dtype for one in tensors)


def _load_by_torch(file: OpenFile, why: NotPlain, device: torch.device, weights_only: bool, verify: bool) -> Any:
    if verify:
        with file.reader() as reader:
            check_records(reader, file.path, f"'{file.path}'")
    with _torch_errors_explained(file, weights_only), file.reader() as reader:
        try:
            found = torch.load(reader, map_location=device, weights_only=weights_only)
        except pickle.UnpicklingError as error:
            if reader.tell() == file.size_bytes:  # torch takes the half of a class's name for one that it forbids
                raise EOFError("it ends in the middle of a pickle") from error
            raise
    engine.warn_once(f"'{os.path.basename(file.path)}' is read by torch.load: {why}")
    return found


def _torch_errors_explained(file: OpenFile, weights_only: bool) -> AbstractContextManager[None]:
    place, head = f"'{file.path}' of {file.size_bytes} bytes", file.read(0, HEAD_BYTES)
    return torch_errors_explained(file.path, place, file.size_bytes, head=head, weights_only=weights_only)
