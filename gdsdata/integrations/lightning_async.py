"""Checkpoints of Lightning that are written while training goes on."""

from __future__ import annotations

import functools
import os
from typing import Any

from gdsdata.checkpoint.api import save
from gdsdata.checkpoint.background.arguments import size_in_bytes
from gdsdata.checkpoint.background.file_saves import FileSaves
from gdsdata.checkpoint.urls import is_url
from gdsdata.integrations.lightning import GDSCheckpointIO, prepared_place
from gdsdata.io.options import EngineOptions

__all__ = ["AsyncGDSCheckpointIO"]


class AsyncGDSCheckpointIO(GDSCheckpointIO):
    """Saves in the background, as `gdsdata.AsyncCheckpointer` does.

        Trainer(plugins=[AsyncGDSCheckpointIO()])

    A save copies the state to staging memory of the host, which is kept for the next one, and
    returns. Storage follows in a thread. Lightning's `AsyncCheckpointIO` would clone each tensor
    where it is, in the GPU's memory too.

    An old checkpoint is removed after the saves that came before, and not if one of them failed.
    Checkpoints at URLs are saved before the call returns.

    Args:
        staging_bytes: the most host memory for states that are being written: a number, or as
            "8GiB" (the default). A larger state passes through it piece by piece.
        options: of the engine; None: the defaults.
    """

    def __init__(self, staging_bytes: int | str = "8GiB", options: EngineOptions | None = None) -> None:
        super().__init__(options)
        self._staging_bytes = size_in_bytes("staging_bytes", staging_bytes)
        self._saves: FileSaves | None = None  # from the first save until `teardown`

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Copy a checkpoint to the host, and write it in the background.

        Raises:
            IoError, ...: an earlier save failed, and nobody has seen its error yet. This save has
                not begun then.
            TypeError, pickle.PicklingError, ...: as of `GDSCheckpointIO`.

        Stream semantics: tensors on a GPU are copied after all work that the current stream of that
        GPU has so far.
        """
        if self._saves is not None:
            self._saves.raise_unseen(only_ended=True)
        place = prepared_place(path, storage_options)
        if is_url(place):
            return save(checkpoint, place, options=self._options)
        if self._saves is None:
            self._saves = FileSaves(os.path.dirname(place), self._staging_bytes, self._options)
        self._saves.step = int(checkpoint.get("global_step", 0))
        self._saves.save_state(checkpoint, place)
        return None

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Wait for saves in progress, and load a checkpoint as `GDSCheckpointIO` does."""
        if self._saves is not None:
            self._saves.raise_unseen()
        return super().load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint when the saves before it are complete."""
        if self._saves is None:
            return super().remove_checkpoint(path)
        return self._saves.behind(functools.partial(super().remove_checkpoint, path))

    def teardown(self) -> None:
        """Wait until every save has ended, and free the memory. Lightning calls it after a run.

        Raises:
            IoError, ...: a save failed, and nobody has seen its error yet.
        """
        saves, self._saves = self._saves, None
        if saves is None:
            return
        try:
            saves.raise_unseen()
        finally:
            saves.close()
