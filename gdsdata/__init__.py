"""gdsdata: training data and checkpoints at the storage's speed.

Start with `GDSDataset` for training data (`Mix` for several), and with `save` and `load` for checkpoints
(`GDSStorageWriter` and `GDSStorageReader` for those of torch.distributed.checkpoint); `read_tensor` and `write_tensor`
move single tensors, `Engine` many.
"""

from typing import Any

from gdsdata import formats
from gdsdata.checkpoint import AsyncCheckpointer, install_torch_hooks, load, save, torch_hooks
from gdsdata.dataset import GDSDataset
from gdsdata.engine import record_stream
from gdsdata.field_batches import Ragged
from gdsdata.lanes import Lanes
from gdsdata.mix import Mix
from gdsdata.options import EngineOptions
from gdsdata.row_groups import RowGroups
from gdsdata.tensor import Engine, read_tensor, write_tensor

__version__ = "0.1.0"
__all__ = [
    "AsyncCheckpointer",
    "Engine",
    "EngineOptions",
    "GDSDataset",
    "GDSStorageReader",
    "GDSStorageWriter",
    "Lanes",
    "Mix",
    "Ragged",
    "RowGroups",
    "formats",
    "install_torch_hooks",
    "load",
    "read_tensor",
    "record_stream",
    "save",
    "torch_hooks",
    "write_tensor",
]


def __getattr__(name: str) -> Any:
    """torch.distributed.checkpoint, which takes a second to import, is imported when it is first asked for."""
    if name in ("GDSStorageReader", "GDSStorageWriter"):
        from gdsdata.checkpoint import dcp

        return getattr(dcp, name)
    raise AttributeError(f"module 'gdsdata' has no attribute {name!r}")
