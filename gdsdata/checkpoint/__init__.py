"""Checkpoints in the files that people already use: `save` and `load`.

`api` says what is asked for; `torch_zip` and `safetensors_file` say where it lies in a file;
`tensor_reader` and `file_writer` move it.
"""

from typing import TYPE_CHECKING

from gdsdata.lazy import lazily

if TYPE_CHECKING:  # for tools that read and do not run
    from gdsdata.checkpoint.api import load, save
    from gdsdata.checkpoint.background.checkpointer import AsyncCheckpointer
    from gdsdata.checkpoint.hooks import install_torch_hooks, torch_hooks

__all__ = ["AsyncCheckpointer", "install_torch_hooks", "load", "save", "torch_hooks"]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "AsyncCheckpointer": "background.checkpointer",
        "install_torch_hooks": "hooks",
        "load": "api",
        "save": "api",
        "torch_hooks": "hooks",
    },
)
