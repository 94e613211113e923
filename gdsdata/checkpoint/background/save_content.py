"""`SaveContent`: the bytes that a save writes, and where they go in the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from gdsdata.checkpoint.background.staging import Column, Sources
from gdsdata.checkpoint.gc_pause import collector_paused
from gdsdata.checkpoint.stored import bytes_of
from gdsdata.checkpoint.tensor_kinds import check_has_values
from gdsdata.checkpoint.torch_zip import torch_config
from gdsdata.checkpoint.torch_zip.pickling import pickle_with_storages
from gdsdata.checkpoint.torch_zip.state_layout import Checksums, StateLayout


class SaveContent(NamedTuple):
    """The content of a file.

    Attributes:
        sources: the memory of its tensors.
        layout: where it goes, and everything else in the file.
    """

    sources: Sources
    layout: StateLayout | TensorsLayout


@collector_paused()
def content_of_state(
    state: Any, alignment: int = torch_config.SMALL_ALIGNMENT, has_checksums: bool = True
) -> SaveContent:
    """Return the content of an archive as `torch.save` writes it.

    Args:
        state: any value.
        alignment, has_checksums: as of `StateLayout`.

    Raises:
        ValueError: a tensor is on the meta device, or its memory was freed.
        RuntimeError, pickle.PicklingError, ...: as `pickle_with_storages` does.
    """
    pickled = pickle_with_storages(state)
    if not (pickled.has_only_plain_tensors and pickled.sizes_bytes.all()):
        check_has_values(state)
    sources = Sources(pickled.storages, pickled.addresses, pickled.devices < 0)
    return SaveContent(sources, StateLayout(pickled.pickle, pickled.sizes_bytes, alignment, has_checksums))


def content_of_tensors(tensors: Sequence[torch.Tensor], header: bytes) -> SaveContent:
    """Return the content of a safetensors file.

    Args:
        tensors: contiguous ones, in the order of the file.
        header: everything in the file before the first one.
    """
    # The memory of a conjugate or negative view differs from its values.
    memory = [bytes_of(one.detach().resolve_conj().resolve_neg()) for one in tensors]
    return SaveContent(Sources.of(memory), TensorsLayout(header, [one.nbytes for one in memory]))


class _Places(NamedTuple):
    """Where tensors lie in a file, as columns.

    Attributes:
        offsets, sizes_bytes: of each tensor.
    """

    offsets: Column
    sizes_bytes: Column

    def __len__(self) -> int:
        return len(self.offsets)


class TensorsLayout:
    """The layout of a safetensors file: tensors follow one another behind one header.

    Args:
        header: everything before the first tensor.
        sizes_bytes: of the tensors.

    Attributes:
        storages: where the tensors lie.
        end: the size of the file.
    """

    def __init__(self, header: bytes, sizes_bytes: Sequence[int]) -> None:
        self._header = header
        ends = len(header) + np.cumsum(sizes_bytes, dtype=np.int64)
        sizes = np.array(sizes_bytes, np.int64)
        self.storages = _Places(ends - sizes, sizes)
        self.end = len(header) + int(sizes.sum())

    def around(self, storages: Sequence[int], checksums: Checksums) -> Iterator[tuple[int, bytes]]:
        """Yield everything that is no tensor: offsets in the file, and bytes."""
        yield 0, self._header
