"""Checkpoints of Lightning and Fabric that gdsdata writes and reads.

A `GDSDataset` needs nothing from here: pass it as ``train_dataloaders``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import Any

import torch

from gdsdata.checkpoint.api import load, save
from gdsdata.checkpoint.explanations import call_named
from gdsdata.checkpoint.urls import is_url, joined, plain_path, store_and_key
from gdsdata.integrations.versions import importing
from gdsdata.io.options import EngineOptions, options_of
from gdsdata.storage.paths import absolute
from gdsdata.storage.store import ObjectInfo

with importing("lightning"):
    try:
        from lightning.fabric.plugins import CheckpointIO
    except ModuleNotFoundError:  # pytorch-lightning alone has it under its older name
        from lightning_fabric.plugins import CheckpointIO  # type: ignore[assignment]

__all__ = ["GDSCheckpointIO"]


class GDSCheckpointIO(CheckpointIO):
    """Saves and loads checkpoints by `gdsdata.save` and `gdsdata.load`.

        Trainer(plugins=[GDSCheckpointIO()])  # Fabric takes it too

    A checkpoint is on storage when a save returns, and replaces the old one as a whole. Paths may
    be URLs of objects (``s3://bucket/run/last.ckpt``). It also works inside Lightning's
    `AsyncCheckpointIO`; `gdsdata.integrations.lightning_async` copies less.

    Lightning does not ask it with FSDP and ModelParallel, whose checkpoints are
    torch.distributed.checkpoint's: call `gdsdata.install_torch_hooks` for these.

    Args:
        options: of the engine; None: the defaults.
    """

    def __init__(self, options: EngineOptions | None = None) -> None:
        self._options = options_of(options)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint. A missing folder is made.

        Raises:
            TypeError: ``storage_options`` is given.
            IoError, ...: as `gdsdata.save`.
        """
        save(checkpoint, prepared_place(path, storage_options), options=self._options)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint.

        Args:
            path: of the file, or the URL of an object.
            map_location: the device of its tensors. None: the CPU. A function or a dict is left to
                `torch.load`, and needs a file.
            weights_only: False allows every object in the checkpoint; None: torch's default, True.

        Raises:
            FileNotFoundError: there is no checkpoint.
            pickle.UnpicklingError: ``weights_only`` forbids something in it.
            IoError, ...: as `gdsdata.load`.
        """
        if callable(map_location) or isinstance(map_location, dict):
            return torch.load(local_place(path), map_location, weights_only=weights_only)
        place, device = local_place(path), "cpu" if map_location is None else map_location
        with call_named(f"'{place}'", "trainer.fit or fabric.load with weights_only=False"):
            return load(place, device, weights_only=weights_only is not False, options=self._options)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint: a file, a folder, or objects. It is no error if there is none."""
        place = local_place(path)
        if is_url(place):
            store, key = store_and_key(place)
            below = [one.url for one in store.list(joined(key, "")) if isinstance(one, ObjectInfo)]
            store.delete([key, *(store_and_key(url)[1] for url in below)])
        elif os.path.isdir(place) and not os.path.islink(place):
            shutil.rmtree(place)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(place)


def _register() -> None:
    """Have pytorch_lightning accept the class too. It has a copy of the interface."""
    with contextlib.suppress(ImportError):
        from lightning_fabric.plugins import CheckpointIO as Copy

        Copy.register(GDSCheckpointIO)


_register()


def local_place(path: str | os.PathLike[str]) -> str:
    """Return a path, or the URL of an object; of a ``file://`` URL its path."""
    return plain_path(os.fsdecode(path))


def prepared_place(path: str | os.PathLike[str], storage_options: Any) -> str:
    """Return where to save a checkpoint, and make its folder."""
    if storage_options is not None:
        raise TypeError(
            f"storage_options={storage_options!r:.100} is not taken: the environment has the settings of a store "
            "(docs/guide/remote.md)"
        )
    place = local_place(path)
    if not is_url(place):
        os.makedirs(os.path.dirname(absolute(place)), exist_ok=True)
    return place
