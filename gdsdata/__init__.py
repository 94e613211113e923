"""gdsdata: training data and checkpoints at the storage's speed.

Start with `GDSDataset` for training data, and with `save` and `load` for checkpoints; `read_tensor` and `write_tensor`
move single tensors, `Engine` many.
"""

from gdsdata import formats
from gdsdata.checkpoint import load, save
from gdsdata.dataset import GDSDataset
from gdsdata.engine import record_stream
from gdsdata.options import EngineOptions
from gdsdata.tensor import Engine, read_tensor, write_tensor

__version__ = "0.1.0"
__all__ = [
    "Engine",
    "EngineOptions",
    "GDSDataset",
    "formats",
    "load",
    "read_tensor",
    "record_stream",
    "save",
    "write_tensor",
]
