"""gdsdata: training data and checkpoints at the storage's speed.

`GDSDataset` reads training data, and `Mix` combines several data sets. `save` and `load` are for
checkpoints, and `GDSStorageWriter` and `GDSStorageReader` for those of
torch.distributed.checkpoint. `safetensors` has the functions of the package of that name.
`read_tensor` and `write_tensor` move single tensors, `Engine` many.

A name of this package is imported when it is first used, so a program loads only what it uses.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for tools that read the code and do not run it
    from gdsdata import decoders, errors, formats, safetensors
    from gdsdata.checkpoint import AsyncCheckpointer, install_torch_hooks, load, save, torch_hooks
    from gdsdata.checkpoint.dcp.planner import GDSLoadPlanner, GDSSavePlanner
    from gdsdata.checkpoint.dcp.storage_reader import GDSStorageReader
    from gdsdata.checkpoint.dcp.storage_writer import GDSStorageWriter
    from gdsdata.data.batches.ragged import Ragged
    from gdsdata.data.batches.streams import record_stream
    from gdsdata.data.dataset import GDSDataset
    from gdsdata.data.groups import Fields, Reading, Sharding
    from gdsdata.data.mix import Mix
    from gdsdata.data.order.lanes import Lanes
    from gdsdata.data.order.row_groups import RowGroups
    from gdsdata.io.options import EngineOptions
    from gdsdata.io.tensor import Engine, read_tensor, write_tensor
    from gdsdata.observe.trace import profile
    from gdsdata.progress_bars import show_progress
    from gdsdata.version import __version__ as __version__

__all__ = [
    "AsyncCheckpointer",
    "Engine",
    "EngineOptions",
    "Fields",
    "GDSDataset",
    "GDSLoadPlanner",
    "GDSSavePlanner",
    "GDSStorageReader",
    "GDSStorageWriter",
    "Lanes",
    "Mix",
    "Ragged",
    "Reading",
    "RowGroups",
    "Sharding",
    "decoders",
    "errors",
    "formats",
    "install_torch_hooks",
    "load",
    "profile",
    "read_tensor",
    "record_stream",
    "safetensors",
    "save",
    "show_progress",
    "torch_hooks",
    "write_tensor",
]

_HOMES = {
    "checkpoint": ("AsyncCheckpointer", "install_torch_hooks", "load", "save", "torch_hooks"),
    "checkpoint.dcp.planner": ("GDSLoadPlanner", "GDSSavePlanner"),
    "checkpoint.dcp.storage_reader": ("GDSStorageReader",),
    "checkpoint.dcp.storage_writer": ("GDSStorageWriter",),
    "data.batches.ragged": ("Ragged",),
    "data.batches.streams": ("record_stream",),
    "data.dataset": ("GDSDataset",),
    "data.groups": ("Fields", "Reading", "Sharding"),
    "data.mix": ("Mix",),
    "data.order.lanes": ("Lanes",),
    "data.order.row_groups": ("RowGroups",),
    "io.options": ("EngineOptions",),
    "io.tensor": ("Engine", "read_tensor", "write_tensor"),
    "observe.trace": ("profile",),
    "progress_bars": ("show_progress",),
    "version": ("__version__",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        found = getattr(importlib.import_module(f"gdsdata.{_HOME_OF[name]}"), name)
    elif name in __all__:
        found = importlib.import_module(f"gdsdata.{name}")
    else:
        raise AttributeError(f"module 'gdsdata' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
