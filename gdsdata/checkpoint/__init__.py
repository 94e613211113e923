"""Checkpoints in the files that people already use: `load`.

`api` says what is wanted, `layout_torch` and `layout_safetensors` find where it lies in a file, `reading` brings it.
"""

from gdsdata.checkpoint.api import load

__all__ = ["load"]
