"""Checkpoints in the files that people already use: `save` and `load`.

`api` says what is wanted, `layout_torch` and `layout_safetensors` where it lies in a file, and `reading` and `writing`
move it.
"""

from gdsdata.checkpoint.api import load, save
from gdsdata.checkpoint.asynchronous import AsyncCheckpointer

__all__ = ["AsyncCheckpointer", "load", "save"]
