"""Find out what a checkpoint file holds, if possible without reading its tensors."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gdsdata.checkpoint.explanations import DCP_METADATA, dcp_file, empty_file, foreign_file
from gdsdata.checkpoint.open_file import HEAD_BYTES, OpenFile
from gdsdata.checkpoint.tensor_reader import TensorReader
from gdsdata.checkpoint.tree import Path
from gdsdata.errors import CorruptData
from gdsdata.formats.parsers import safetensors_header


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
    if file.path.endswith(".distcp") or os.path.basename(file.path) == DCP_METADATA:
        raise dcp_file(file.path)
    head = file.read(0, HEAD_BYTES)
    if safetensors_header.recognises(head):
        return Kind.SAFETENSORS
    if file.path.endswith(".safetensors"):
        if head[safetensors_header.LENGTH_BYTES :].startswith(b"{"):
            return Kind.SAFETENSORS  # its length is too large, as reading it says
        found = foreign_file(f"'{file.path}'", head)
        words = f"'{file.path}' does not begin as a safetensors file: it is another one, or damaged. Fetch it again"
        raise CorruptData(words if found is None else str(found), file.path, 0, len(head))
    return Kind.TORCH  # or an older file of torch, which torch itself recognizes


def contents_of(
    kind: Kind, file: OpenFile, device: torch.device, make_reader: Callable[[], TensorReader], weights_only: bool
) -> Contents:
    """Find out what a file holds.

    Tensors have no values yet, unless all of the file had to be read.

    Args:
        kind: what `kind_of` returned for the file.
        file: the file.
        device: of tensors, if all of the file has to be read.
        make_reader: its reader says whether checksums are compared, and reads the file if all of it
            has to be read.
        weights_only: as in `torch.load`.
    """
    # Modules of one format are imported late: a first load of the other one takes 2 to 5 ms less.
    if kind is not Kind.TORCH:
        from gdsdata.checkpoint import safetensors_file

        read = safetensors_file.read_index if kind is Kind.INDEX else safetensors_file.read_header
        return Contents(read(file, verify=make_reader().verify), _unchanged)
    from gdsdata.checkpoint.torch_zip import torch_file

    value, stored_of = torch_file.contents_of(file, device, make_reader, weights_only)
    return Contents(value, stored_of or _unchanged)


def _unchanged(path: Path, leaf: Any) -> Any:
    return leaf
