"""gdsdata: training data and checkpoints at the storage's speed.

Start with `GDSDataset`; `read_tensor` and `write_tensor` move single tensors.
"""

from gdsdata import formats
from gdsdata.dataset import GDSDataset
from gdsdata.options import EngineOptions
from gdsdata.tensor import read_tensor, write_tensor

__version__ = "0.1.0"
__all__ = ["EngineOptions", "GDSDataset", "formats", "read_tensor", "write_tensor"]
