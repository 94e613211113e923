"""Find out what a checkpoint file holds, if possible without reading its tensors."""

from __future__ import annotations

import enum
import os
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from gdsdata.checkpoint import safetensors_file
from gdsdata.checkpoint.explanations import empty_file, foreign_file, torch_errors_explained
from gdsdata.checkpoint.open_file import OpenFile
from gdsdata.checkpoint.stored import Stored
from gdsdata.checkpoint.tensor_kinds import is_plain
from gdsdata.checkpoint.tensor_reader import TensorReader
from gdsdata.checkpoint.torch_zip import archive_reader
from gdsdata.checkpoint.torch_zip.archive import Archive, open_archive
from gdsdata.checkpoint.torch_zip.unpickling import NotPlain
from gdsdata.checkpoint.tree import Path, leaves
from gdsdata.errors import CorruptData
from gdsdata.formats.parsers import safetensors_header
from gdsdata.io import engine
from gdsdata.torch_private import storage_id

_HEAD_BYTES = 64  # enough to recognize a format
# torch reads some small tensors while it builds others, such as the sizes of a nested tensor. So
# storages below this size are filled with zeros. Larger ones are left untouched, which costs
# nothing.
_LOOKED_AT_BYTES = 1 << 20


class Kind(enum.Enum):
    """The formats of checkpoint files."""

    TORCH = "a file of torch.save"
    SAFETENSORS = "a safetensors file"
    INDEX = "the index of several safetensors files"


class Contents(NamedTuple):
    """The contents of a file.

    Attributes:
        value: what was saved. Leaves stand for tensors, or are tensors.
        stored_of: called with a path and its leaf. It returns the `Stored` that the leaf stands
            for, or the leaf itself.
    """

    value: Any
    stored_of: Callable[[Path, Any], Any]


def kind_of(file: OpenFile) -> Kind:
    """Recognize the format of a file.

    Raises:
        CorruptData: the file has none of these formats.
    """
    if file.size_bytes == 0:
        raise empty_file(file.path)
    if file.path.endswith(".json"):
        return Kind.INDEX
    head = file.read(0, _HEAD_BYTES)
    if safetensors_header.recognises(head):
        return Kind.SAFETENSORS
    if file.path.endswith(".safetensors"):
        found = foreign_file(f"'{file.path}'", head)
        words = f"'{file.path}' does not begin as a safetensors file: it is another one, or damaged. Fetch it again"
        raise CorruptData(words if found is None else str(found), file.path, 0, len(head))
    return Kind.TORCH  # or an older file of torch, which torch itself recognizes


def load_torch_file(file: OpenFile, reader: TensorReader, device: torch.device, weights_only: bool) -> Any:
    """Load all of a file that `torch.save` wrote, with its tensors on ``device``.

    Raises as `gdsdata.load` does.
    """
    try:
        archive = open_archive(file)
        explained = _torch_errors_explained(file, weights_only)
        return archive_reader.read(archive, reader, lambda _: device, device, weights_only, explained)
    except NotPlain as why:
        return _load_by_torch(file, why, device, weights_only)


def contents_of(
    kind: Kind, file: OpenFile, device: torch.device, make_reader: Callable[[], TensorReader], weights_only: bool
) -> Contents:
    """Find out what a file holds.

    Tensors have no values yet, unless all of the file had to be read.

    Args:
        kind: what `kind_of` returned for the file.
        file: the file.
        device: of tensors, if all of the file has to be read.
        make_reader: called if all of the file has to be read.
        weights_only: as in `torch.load`.
    """
    if kind is Kind.INDEX:
        return Contents(safetensors_file.read_index(file), _unchanged)
    if kind is Kind.SAFETENSORS:
        return Contents(safetensors_file.read_header(file), _unchanged)
    try:
        archive = open_archive(file)
        if (structure := archive_reader.unpickle_structure(archive)) is not None:
            return Contents(structure, _unchanged)
        without_values = _unpickled_without_values(file, archive, weights_only)
        if without_values is not None:
            return without_values
        explained = _torch_errors_explained(file, weights_only)
        value = archive_reader.read(archive, make_reader(), lambda _: device, device, weights_only, explained)
        return Contents(value, _unchanged)
    except NotPlain as why:
        return Contents(_load_by_torch(file, why, device, weights_only), _unchanged)


def _unchanged(path: Path, leaf: Any) -> Any:
    return leaf


def _unpickled_without_values(file: OpenFile, archive: Archive, weights_only: bool) -> Contents | None:
    """Have torch unpickle the object on storages that have no values yet.

    Returns:
        None if anything but a plain tensor that is a leaf refers to a storage, because that needs
            the storage's values.
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

    def stored_of(path: Path, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        offset = int(leaf.storage_offset()) * leaf.element_size()
        record = records[storage_id(leaf.untyped_storage())]
        return Stored(record, offset, leaf.dtype, tuple(leaf.shape), leaf.stride())

    return Contents(value, stored_of)


def _load_by_torch(file: OpenFile, why: NotPlain, device: torch.device, weights_only: bool) -> Any:
    with _torch_errors_explained(file, weights_only), file.reader() as reader:
        found = torch.load(reader, map_location=device, weights_only=weights_only)
    engine.warn_once(f"'{os.path.basename(file.path)}' is read by torch.load: {why}")
    return found


def _torch_errors_explained(file: OpenFile, weights_only: bool) -> AbstractContextManager[None]:
    place, head = f"'{file.path}' of {file.size_bytes} bytes", file.read(0, _HEAD_BYTES)
    return torch_errors_explained(file.path, place, file.size_bytes, head=head, weights_only=weights_only)
